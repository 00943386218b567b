"""Without memory a state on a device is written to storage by the training process: the same bytes."""

import pathlib
import uuid

import pytest
import torch
from support import accelerator

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not accelerator.IS_THERE, reason=accelerator.WHY_NOT),
]
TIMEOUT_S = 60


def shard(directory, memory):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Conv2d(3, 8, 3)).to(accelerator.TYPE)
    model[1].to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = SnapshotConfig(
        job_id=uuid.uuid4().hex, levels=(PersistentLevel(str(directory), every_n_steps=1),), memory=memory
    )
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    engine.wait_ready(TIMEOUT_S)
    loss = model[0](torch.ones(4, 2048, device=accelerator.TYPE)).sum()
    if accelerator.SOFTWARE is None:  # which has no convolutions
        loss = loss + model[1](torch.ones(1, 3, 8, 8, device=accelerator.TYPE)).sum()
    loss.backward()
    optimizer.step()
    while not engine.boundary(1, force=True):
        assert engine.wait_ready(TIMEOUT_S)
    writes = engine.statistics().direct.count
    assert engine.close()
    [path] = pathlib.Path(directory).glob("step-*/*.safetensors")
    return writes, path.read_bytes()


def test_the_bytes_are_those_that_a_keeper_writes(tmp_path):
    usual = shard(tmp_path / "usual", MemoryLevel())
    direct = shard(tmp_path / "direct", MemoryLevel(max_bytes=1 << 16))

    assert (usual[0], direct[0]) == (0, 1)
    assert direct[1] == usual[1]
