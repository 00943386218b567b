"""LoRA by peft: base and adapters go on bit for bit; merging writes to the base, and is captured."""

import time

import peft
import pytest
import torch

TIMEOUT_S = 60
WIDTH = 400


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, batch):
        return self.last(torch.relu(self.first(batch)))


class Adapted:
    """``get_peft_model`` over a plain module, or adapters injected into it."""

    def __init__(self, engines, *, seed, injected=False):
        torch.manual_seed(seed)
        settings = peft.LoraConfig(target_modules=["first", "last"], r=4, lora_dropout=0.1, init_lora_weights=False)
        if injected:
            self.model = peft.inject_adapter_in_model(settings, Base())
        else:
            self.model = peft.get_peft_model(Base(), settings)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        self.engine = engines({"model": self.model, "optimizer": self.optimizer})

    def train(self):
        batch = torch.randn(4, WIDTH)
        (self.model(batch) - batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, first, last):
        for step in range(first, last + 1):
            self.train()
            self.capture(step)

    def capture(self, step):
        deadline = time.monotonic() + TIMEOUT_S
        assert self.engine._wait_ready(TIMEOUT_S)
        while not self.engine.boundary(step):
            assert self.engine._wait_ready(TIMEOUT_S)
            assert time.monotonic() < deadline, self.engine.statistics().skipped
        self.engine.gate()

    def facts(self):
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            state |= {f"{index}.{name}": tensor.clone() for name, tensor in moments.items()}
        return state | {"next": torch.rand(3)}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(("injected", "place"), [(False, "memory"), (True, "storage")])
def test_adapters_go_on_bit_for_bit(engines, tmp_path, injected, place):
    whole = Adapted(engines, seed=0, injected=injected)
    for _ in range(6):
        whole.train()
    wanted = whole.facts()
    first = Adapted(engines, seed=0, injected=injected)
    first.run(1, 4)
    first.engine.close() if place == "storage" else first.engine.abandon()

    second = Adapted(engines, seed=5, injected=injected)
    snapshot = second.engine.restore("latest")
    second.run(5, 6)

    assert (snapshot.step, snapshot.level) == (4, "memory" if place == "memory" else str(tmp_path))
    assert_same(second.facts(), wanted)
    second.engine.close()


def test_adapters_that_are_merged_into_the_base_are_captured_and_every_snapshot_is_right(engines):
    first = Adapted(engines, seed=0)
    first.run(1, 2)

    first.model.merge_adapter(safe_merge=True)
    first.capture(3)
    merged = first.engine._fetch("latest")
    assert merged.step == 3
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(merged.state["model"][name], tensor), name

    first.model.unmerge_adapter()
    first.run(4, 5)
    wanted = first.facts()
    first.engine.abandon()
    second = Adapted(engines, seed=5)
    assert second.engine.restore("latest").step == 5
    assert_same(second.facts(), wanted)
