"""A tensor of more than 4 GiB through all of it: captured, written, read back, restored from the disk.

What is captured is memory that nobody wrote to but in a few places, so it takes none; the slots are real. Reads of such
a slot, and of single blocks, are in ``tests/capture/test_beyond_4_gib.py``.
"""

import mmap
import shutil
import uuid

import pytest
import torch

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

GIB = 1 << 30
LARGE = 4 * GIB + 4096 * 11
TIMEOUT_S = 240
NEEDED = 4 * LARGE + GIB
"""Three slots, and the tensor that is restored."""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("large"), pytest.mark.timeout(2 * TIMEOUT_S)]


def available_bytes():
    with open("/proc/meminfo") as file:
        facts = dict(line.split(":") for line in file)
    return int(facts["MemAvailable"].split()[0]) * 1024


def make():
    room = mmap.mmap(-1, LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    model = torch.nn.Module()
    model.huge = torch.nn.Parameter(torch.frombuffer(room, dtype=torch.bfloat16))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_tensor_of_more_than_4_gib_comes_back_from_a_disk(tmp_path):
    if available_bytes() < NEEDED or shutil.disk_usage(tmp_path).free < 2 * LARGE:
        pytest.skip(f"needs {NEEDED >> 30} GiB of memory and {2 * LARGE >> 30} GiB of disk")
    place = tmp_path / "level"
    config = SnapshotConfig(
        levels=(PersistentLevel(str(place)),),
        memory=MemoryLevel(linger_s=0),
        job_id=f"large-{uuid.uuid4().hex}",
        io_timeout_s=TIMEOUT_S,
        drain_timeout_s=TIMEOUT_S,
    )
    model, optimizer = make()
    edge = 2 * GIB  # elements before 4 GiB
    places = [0, 1, edge - 1, edge, edge + 1, LARGE // 2 - 1, *torch.randint(LARGE // 2, (20,)).tolist()]
    with torch.no_grad():
        model.huge[places] = torch.randn(len(places), dtype=torch.bfloat16)
    try:
        engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
        assert engine._wait_ready(TIMEOUT_S)
        assert engine.boundary(1)
        assert engine.close(), "the step is durable"

        again, optimizer = make()
        engine = SnapshotEngine(config, {"model": again, "optimizer": optimizer})
        snapshot = engine._fetch()
        assert snapshot.level == str(place)
        assert torch.equal(snapshot.state["model"]["huge"], model.huge)
        assert engine.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)
