"""Promises about what the engine itself writes: a fine-tuning of a frozen base."""

import uuid

import pytest
import safetensors.torch
import torch
from cli_level import files, run

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

TIMEOUT_S = 60


class Adapted(torch.nn.Module):
    """A frozen base of 2 MB, tied to nothing, and something small that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(700, 700).requires_grad_(False)
        self.adapter = torch.nn.Linear(700, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(x))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """URL of a level with steps 1 to 3, step 2 kept by name; and the model after the last one."""
    url = str(tmp_path_factory.mktemp("tuned") / "level")
    torch.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.SGD(model.adapter.parameters(), lr=0.1, momentum=0.9)
    level = PersistentLevel(url, every_n_steps=1, keep_last=3)
    config = SnapshotConfig(levels=(level,), job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=60))
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    try:
        assert engine._wait_ready(TIMEOUT_S)
        for step in (1, 2, 3):
            model(torch.randn(4, 700)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert engine.boundary(step)
            if step == 2:
                engine.keep("before-anneal")
            assert engine.wait(step, timeout_s=TIMEOUT_S)
    finally:
        engine.close(drain=True)
    return url, model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["w.safetensors", "w.ckpt"])
def test_an_export_has_base_and_adapter(tuned, tmp_path, name):
    url, model = tuned
    assert run("export", url, "latest", "--to", tmp_path / name) == 0
    if name.endswith(".ckpt"):
        loaded = torch.load(tmp_path / name, weights_only=True)["model"]
    else:
        loaded = safetensors.torch.load_file(tmp_path / name)
    fresh = Adapted()
    fresh.load_state_dict(loaded)
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_copy_can_be_resumed_from_by_the_engine(tuned, make_url):
    url, model = tuned
    target = make_url("local")
    assert run("copy", url, target) == 0
    assert files(target) == [name for name in files(url) if not name.startswith("events-")]
    fresh = Adapted()
    optimizer = torch.optim.SGD(fresh.adapter.parameters(), lr=0.1, momentum=0.9)
    config = SnapshotConfig(levels=(PersistentLevel(target),), job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=0))
    engine = SnapshotEngine(config, {"model": fresh, "optimizer": optimizer})
    try:
        assert engine.restore("latest").step == 3
    finally:
        engine.close(drain=False)
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in model.state_dict().items())
