"""Restores onto a CUDA device: what was read goes there block by block, beside reading and comparing."""

import uuid

import pytest
import torch

from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TIMEOUT_S = 60
WIDTH = 1024


def make():
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer):
    model(torch.randn(16, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model, optimizer):
    held = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu().clone() for tensor in (*model.parameters(), *held)]


@pytest.fixture
def config():
    return SnapshotConfig(job_id=f"gpu-{uuid.uuid4().hex}", memory=MemoryLevel(linger_s=TIMEOUT_S))


@pytest.fixture
def saved(config):
    """What was captured by an engine that left as a crash would."""
    model, optimizer = make()
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    train(model, optimizer)
    assert engine.wait_ready(TIMEOUT_S)
    assert engine.boundary(1)
    assert engine.wait(1, until="captured", timeout_s=TIMEOUT_S)
    found = values(model, optimizer)
    engine.abandon()
    return found


def test_a_fetched_snapshot_lies_where_the_live_tensors_do(config, saved):
    model, optimizer = make()
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})

    snapshot = engine.fetch()

    state = snapshot.state["optimizer"]["state"]
    assert {tensor.device.type for tensor in snapshot.state["model"].values()} == {"cuda"}
    assert {one["exp_avg"].device.type for one in state.values()} == {"cuda"}
    assert {one["step"].device.type for one in state.values()} == {"cpu"}
    engine.close()


@pytest.mark.parametrize("has_room", [True, False])
def test_a_restore_is_exact_also_where_the_device_has_no_room_for_a_second_copy(config, saved, has_room):
    model, optimizer = make()
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    torch.cuda.empty_cache()
    in_use, whole = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    try:
        if not has_room:
            torch.cuda.set_per_process_memory_fraction((in_use + (1 << 20)) / whole)
        snapshot = engine.fetch()
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert snapshot.state["model"]["0.weight"].is_cuda == has_room
        model.load_state_dict(snapshot.state["model"])
        optimizer.load_state_dict(snapshot.state["optimizer"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert all(map(torch.equal, values(model, optimizer), saved))
    engine.close()
