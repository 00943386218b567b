"""Slots are registered with CUDA before they are used, and not any more when their memory goes.

The CUDA runtime is played by a double that keeps its books like the real one; tests/gpu runs the real one.
"""

import gc
import uuid
from pathlib import Path

import pytest
import torch
from support.waiting import until

from lazysnap import MemoryLevel, SnapshotConfig
from lazysnap.capture.registration import register, registrar
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.memory.arena import Slot, Word

TIMEOUT_S = 60


def is_mapped(pointer):
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= pointer < int(end, 16) for start, end in ranges)


class CudaRuntime:
    """What ``torch.cuda.cudart()`` offers, with the answers of the real one."""

    def __init__(self):
        self.registered = {}
        self.was_mapped_at_unregister = []
        self.registrations = 0

    def cudaHostRegister(self, pointer, size, flags):
        if pointer in self.registered:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.registered[pointer] = size
        self.registrations += 1
        return 0

    def cudaHostUnregister(self, pointer):
        self.was_mapped_at_unregister.append(is_mapped(pointer))
        return 0 if self.registered.pop(pointer, None) else 713  # cudaErrorHostMemoryNotRegistered


class NoMoreLockedMemory(CudaRuntime):
    def cudaHostRegister(self, pointer, size, flags):
        return 2  # cudaErrorMemoryAllocation


def test_a_slot_is_registered_once_and_whole():
    cuda, slot = CudaRuntime(), Slot.create(1 << 16, 1 << 20)
    for _ in range(3):
        register(slot, torch.device("cuda"), cuda)

    assert list(cuda.registered.values()) == [slot.size_bytes]
    assert cuda.registrations == 1
    slot.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["closed", "forgotten"])
def test_registration_ends_before_the_memory_is_unmapped(way):
    cuda, slot = CudaRuntime(), Slot.create(1 << 16, 1 << 20)
    register(slot, torch.device("cuda"), cuda)

    if way == "closed":
        slot.close()
    del slot
    gc.collect()

    assert cuda.registered == {}
    assert cuda.was_mapped_at_unregister == [True]


def test_a_refused_registration_is_said_and_the_slot_still_serves(caplog):
    cuda, slot = NoMoreLockedMemory(), Slot.create(1 << 16, 1 << 20)
    register(slot, torch.device("cuda"), cuda)

    assert "ulimit -l" in caplog.text
    slot.begin(1, sequence=1, image_bytes=8, meta=b"{}", pin=False)
    slot.commit()
    slot.close()
    assert cuda.was_mapped_at_unregister == []


def test_a_state_on_a_cpu_registers_nothing():
    slot = Slot.create(1 << 16, 1 << 20)
    registrar([torch.zeros(3)])(slot)

    assert slot.word(Word.BEGIN) == 0
    slot.close()


@pytest.mark.slow
def test_slots_of_a_keeper_are_ready_only_when_registered_and_a_new_size_leaves_none_behind():
    """Each round asks for slots of another size, as a plan that is made anew does, and returns the old ones."""
    cuda = CudaRuntime()
    config = SnapshotConfig(job_id=f"registered-{uuid.uuid4().hex}", memory=MemoryLevel(linger_s=5))
    client = KeeperClient(JobIdentity.from_config(config, None), config)
    client.make_ready(lambda slot: register(slot, torch.device("cuda"), cuda))
    try:
        client.connect(TIMEOUT_S)
        for size in (1 << 20, 64 << 20):
            client.reserve((1 << 16, size), 2)
            for slot in client.mapped():
                if slot.image_capacity != size:
                    client.return_slot(slot)
            slot = None
            until(lambda size=size: sum(slot.image_capacity == size for slot in client.slots()) == 2)
            ready = {torch.frombuffer(slot.buffer, dtype=torch.uint8).data_ptr() for slot in client.slots()}
            assert ready <= cuda.registered.keys()
        until(lambda: len(client.slots()) == 2)
        gc.collect()
        assert len(cuda.registered) == 2
    finally:
        client.goodbye(TIMEOUT_S)
    gc.collect()
    assert cuda.registered == {}
    assert all(cuda.was_mapped_at_unregister)
