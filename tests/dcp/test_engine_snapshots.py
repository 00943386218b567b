"""Snapshots that an engine took, and those of the first format, are read too."""

import shutil
import uuid
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from saving import bits
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.dcp import SnapshotLoadPlanner, SnapshotReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


def train(model, optimizer):
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_an_engine_took_is_loaded_by_dcp(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    counters = {"seen": 3}
    level = PersistentLevel(str(tmp_path), every_n_steps=1)
    config = SnapshotConfig(levels=(level,), job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=1))
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer, "counters": counters})
    try:
        assert engine.wait_ready(30)
        train(model, optimizer)
        assert engine.boundary(1)
        engine.gate()
    finally:
        engine.close()
    expected = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    moments = {f"{n}.{k}": bits(v) for n, held in optimizer.state_dict()["state"].items() for k, v in held.items()}
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "counters": {"seen": 0}}
    state["optimizer"]["param_groups"][0]["lr"] = 5.0

    reader = SnapshotReader(str(tmp_path))
    dcp.load(state, storage_reader=reader, planner=SnapshotLoadPlanner())

    assert reader.step == 1
    assert {name: bits(tensor) for name, tensor in state["model"].items()} == expected
    held = state["optimizer"]["state"]
    assert {f"{n}.{k}": bits(v) for n, values in held.items() for k, v in values.items()} == moments
    assert state["optimizer"]["param_groups"][0]["lr"] == 1e-3
    assert state["counters"] == {"seen": 3}
    optimizer.load_state_dict(state["optimizer"])


def test_the_first_format_is_read(tmp_path):
    golden = Path(__file__).parent.parent / "golden" / "v1"
    shutil.copytree(golden, tmp_path / "level")
    (shard,) = golden.glob("*/*.safetensors")
    expected = safetensors.torch.load_file(shard)

    found = _load_state_dict_from_keys(storage_reader=SnapshotReader(str(tmp_path / "level")))

    tensors = [bits(tensor) for tensor in tensors_in(found)]
    assert [name for name, tensor in expected.items() if bits(tensor) not in tensors and tensor.dim() == 1] == []
    assert len(tensors) >= len(expected)


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
