"""Optimizer state comes back with the dtypes, strides and values that it had, and trains on as if never interrupted."""

import pytest
import torch
from small_training import TIMEOUT_S
from transformers import Adafactor

from lazysnap import SnapshotEngine

pytestmark = pytest.mark.slow

STEPS, CUT = 8, 4
"""Steps of the whole training, and the step after which it dies."""


class Keeping(torch.optim.Optimizer):
    """State of every kind: weights in fp32, moments in int8, fp8 and fp64, all of it used for the next step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": torch.tensor(0.05, dtype=torch.float64), "scales": [torch.ones(2).half()]})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["lr"].mul_(0.99)
            group["scales"][0].mul_(0.9)
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float()
                    state["coarse"] = torch.zeros(parameter.shape, dtype=torch.int8)
                    state["small"] = torch.zeros(parameter.shape).to(torch.float8_e4m3fn)
                    state["sum"] = torch.zeros(parameter.shape, dtype=torch.float64)
                    state["kind"] = "keeping"
                    state["nested"] = {"pair": (torch.zeros(3), 1), "list": [torch.zeros(2, dtype=torch.float64)]}
                gradient = parameter.grad.float() * group["scales"][0].float().mean()
                state["sum"] += gradient.double() / 3
                state["coarse"] = (gradient * 50).clamp(-127, 127).to(torch.int8)
                state["small"] = (state["small"].float() * 0.9 + gradient).to(torch.float8_e4m3fn)
                state["nested"]["pair"][0].add_(gradient.sum() / 3)
                state["nested"]["list"][0].add_(gradient.double().mean() / 3)
                moved = state["sum"] + state["coarse"] / 50 + state["small"].double() + state["nested"]["list"][0].sum()
                state["master"].sub_((moved * group["lr"]).float())
                parameter.copy_(state["master"])


class Turning(torch.optim.Optimizer):
    """Rotates gradients into bases that ``torch.linalg`` gives column by column, as SOAP does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})
        self.count = 0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["seen"] = torch.eye(len(gradient)) / 7
                    state["bases"] = [torch.eye(len(gradient)), torch.eye(gradient.shape[1])]
                    state["square"] = torch.linalg.qr(torch.randn(*parameter.shape[:1], parameter.shape[0]))[0]
                state["seen"] += gradient @ gradient.T
                state["bases"][0] = torch.linalg.eigh(state["seen"])[1]
                state["bases"][1] = torch.linalg.qr(gradient.T @ gradient + state["bases"][1])[0]
                left, right = state["bases"]
                parameter -= group["lr"] * (state["square"] @ (left @ (left.T @ gradient @ right).tanh() @ right.T))


def columns(*shape):
    """A tensor with its last two dimensions in column-major order."""
    return torch.randn(*shape).mT.contiguous().mT


KINDS = {
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.01, t0=2),
    "adafactor": lambda parameters: Adafactor(parameters, lr=0.01, relative_step=False, scale_parameter=False),
    "keeping": Keeping,
    "turning": Turning,
}


class Training:
    """One small model for each optimizer; of "turning" in fp32, else in bf16."""

    def __init__(self, config):
        torch.manual_seed(0)
        self.models = {name: torch.nn.Linear(24, 24, bias=False, dtype=torch.bfloat16) for name in KINDS}
        self.models["turning"] = torch.nn.Linear(24, 24, bias=False)
        self.optimizers = {name: kind(self.models[name].parameters()) for name, kind in KINDS.items()}
        for way in ("fused", "foreach"):
            model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 2))
            model.to(memory_format=torch.channels_last)
            self.models[way] = model
            self.optimizers[way] = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True, **{way: True})
        self.plain = {"table": torch.zeros(0), "rows": torch.arange(6.0).reshape(2, 3)}
        optimizers = {f"optimizer_{name}": one for name, one in self.optimizers.items()}
        self.engine = SnapshotEngine(config, {**self.models, **optimizers, "plain": self.plain})

    def run(self, first, last):
        for step in range(first, last + 1):
            for name, model in self.models.items():
                if name in ("fused", "foreach"):
                    out = model(torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last))
                else:
                    out = model(torch.randn(8, 24, dtype=model.weight.dtype))
                out.float().square().mean().backward()
                self.optimizers[name].step()
                self.optimizers[name].zero_grad()
            self.plain["table"] = columns(5, 3, 4)
            assert self.engine._wait_ready(TIMEOUT_S)
            assert self.engine.boundary(step)
        self.engine.gate()

    def facts(self):
        """Dtype, strides and values of everything."""
        found = {}

        def add(name, value):
            if isinstance(value, torch.Tensor):
                values = value.detach().contiguous().view(torch.uint8) if value.dim() else value.detach().item()
                found[name] = (value.dtype, value.stride(), values.tolist() if value.dim() else values)
            elif isinstance(value, dict):
                for key, item in value.items():
                    add(f"{name}.{key}", item)
            elif isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    add(f"{name}.{index}", item)
            else:
                found[name] = value

        for name, model in self.models.items():
            add(name, model.state_dict())
            add(f"optimizer {name}", self.optimizers[name].state_dict())
        add("plain", self.plain)
        return found


@pytest.fixture
def start(job):
    def make():
        training = Training(job.config())
        job.trainings.append(training)
        return training

    return make


def test_a_resumed_training_goes_on_bit_for_bit_whatever_dtypes_and_strides_its_optimizers_keep(job, start):
    first = start()
    first.run(1, CUT)
    assert first.engine.wait(CUT, until="captured", timeout_s=TIMEOUT_S)
    at_cut = first.facts()
    job.crash(first)
    second = start()

    assert second.engine.restore("latest").step == CUT
    assert second.facts() == at_cut
    moments = second.optimizers["fused"].state[second.models["fused"][0].weight]
    assert moments["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    second.run(CUT + 1, STEPS)
    resumed = second.facts()
    second.engine.close(drain=False)

    whole = start()
    whole.run(1, STEPS)
    assert resumed == whole.facts()


def test_a_rollback_puts_optimizers_back_bit_for_bit_and_later_captures_leave_them_alone(start):
    training = start()
    training.run(1, CUT)
    at_cut, streams = training.facts(), torch.get_rng_state()
    training.run(CUT + 1, CUT + 1)

    assert training.engine.rollback(steps=2).step == CUT
    assert training.facts() == at_cut
    assert torch.get_rng_state().equal(streams)
    training.run(CUT + 1, STEPS)
    rolled_back = training.facts()
    training.engine.close(drain=False)

    whole = start()
    whole.run(1, STEPS)
    assert rolled_back == whole.facts()


def test_a_rollback_puts_back_state_whose_elements_share_memory(job):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["share"] = torch.full((1,), 0.5).expand(3)
    with SnapshotEngine(job.config(), {"model": model, "optimizer": optimizer}) as engine:
        assert engine._wait_ready(TIMEOUT_S)
        for step in (1, 2):
            assert engine.boundary(step)
            assert engine.wait(step, until="captured", timeout_s=TIMEOUT_S)
            optimizer.state[model.weight]["share"] = torch.full((1,), float(step)).expand(3)

        assert engine.rollback(steps=2).step == 1

        assert optimizer.state[model.weight]["share"].tolist() == [0.5] * 3
