"""A tensor of more than 4 GiB through all of it: captured, kept in memory, written, read back, restored; a damaged one.

What is captured is memory that nobody wrote to but in a few places, so it takes none; the slots are real.
"""

import mmap
import os
import shutil
import signal
import uuid

import pytest
import torch
from support.catalogue import inventory_of
from support.damage import flip
from support.keepers import keeper_of
from support.waiting import until

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.errors import FormatError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.levels.blocks import verify
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.store import open_storage
from lazysnap.shard.checksum import BLOCK_BYTES

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


def test_a_tensor_of_more_than_4_gib_comes_back_from_memory_and_from_a_disk(tmp_path):
    if available_bytes() < NEEDED or shutil.disk_usage(tmp_path).free < 2 * LARGE:
        pytest.skip(f"needs {NEEDED >> 30} GiB of memory and {2 * LARGE >> 30} GiB of disk")
    place = tmp_path / "level"
    config = SnapshotConfig(
        levels=(PersistentLevel(str(place)),),
        memory=MemoryLevel(linger_s=TIMEOUT_S),
        job_id=f"large-{uuid.uuid4().hex}",
        io_timeout_s=TIMEOUT_S,
        drain_timeout_s=TIMEOUT_S,
    )
    model, optimizer = make()
    edge = 2 * GIB  # elements before 4 GiB
    places = [0, 1, edge - 1, edge, edge + 1, LARGE // 2 - 1, *torch.randint(LARGE // 2, (20,)).tolist()]
    with torch.no_grad():
        model.huge[places] = torch.randn(len(places), dtype=torch.bfloat16)
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    assert engine._wait_ready(TIMEOUT_S)
    assert engine.boundary(1)
    assert engine.wait(1, until="captured", timeout_s=TIMEOUT_S)
    engine.abandon()
    again, optimizer = make()
    try:
        for level in ("memory", str(place)):
            engine = SnapshotEngine(config, {"model": again, "optimizer": optimizer})
            snapshot = engine._fetch()
            assert snapshot.level == level
            assert torch.equal(snapshot.state["model"]["huge"], model.huge)
            del snapshot
            assert engine.close()
            if level == "memory":  # which stays as it was; its keeper stores it
                until(lambda: any(place.rglob("*.json")), timeout_s=TIMEOUT_S)
                os.kill(keeper_of(JobIdentity.from_config(config)), signal.SIGKILL)
        storage = open_storage(str(place))
        [entry] = inventory_of(storage).entries
        flip(place / FilePlace.of(storage, entry).file_path, LARGE)
        # All blocks before it are as they should be.
        with pytest.raises(FormatError, match=rf"block {4 * GIB // BLOCK_BYTES} \(bytes {4 * GIB} to"):
            verify(FilePlace.of(storage, entry))
    finally:
        shutil.rmtree(place, ignore_errors=True)
