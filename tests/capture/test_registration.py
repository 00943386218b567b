"""Slots are registered with CUDA before they are used, and not any more when their memory goes.

The CUDA runtime is played by a double that keeps its books like the real one; tests/gpu runs the real one.
"""

import gc

import pytest
import torch
from support.cuda_runtime import CudaRuntime
from support.slots import trainer_slot

from lazysnap.capture.registration import register, registrar
from lazysnap.memory.slot_choice import SlotPhase


class NoMoreLockedMemory(CudaRuntime):
    def cudaHostRegister(self, pointer, size, flags):
        return 2  # cudaErrorMemoryAllocation


def test_a_slot_is_registered_once_and_whole():
    cuda, slot = CudaRuntime(), trainer_slot(1 << 16, 1 << 20)
    for _ in range(3):
        register(slot, torch.device("cuda"), cuda)

    assert list(cuda.registered.values()) == [slot.image_capacity_bytes]
    assert cuda.registrations == 1
    slot.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["closed", "forgotten"])
def test_registration_ends_before_the_memory_is_unmapped(way):
    cuda, slot = CudaRuntime(), trainer_slot(1 << 16, 1 << 20)
    register(slot, torch.device("cuda"), cuda)

    if way == "closed":
        slot.close()
    del slot
    gc.collect()

    assert cuda.registered == {}
    assert cuda.was_mapped_at_unregister == [True]


def test_a_refused_registration_is_said_and_the_slot_still_serves(caplog):
    cuda, slot = NoMoreLockedMemory(), trainer_slot(1 << 16, 1 << 20)
    register(slot, torch.device("cuda"), cuda)

    assert "ulimit -l" in caplog.text
    slot.begin(1, 1, sequence=1, image_bytes=8, meta=b"{}")
    slot.commit(copied_ns=0)
    slot.close()
    assert cuda.was_mapped_at_unregister == []


def test_a_slot_that_is_a_file_is_never_registered(tmp_path):
    """Neither in the background nor at the first capture, which asks once more whether it is."""
    cuda, slot = CudaRuntime(), trainer_slot(1 << 16, 1 << 20, directory=str(tmp_path))

    assert register(slot, torch.device("cuda"), cuda) is False
    assert cuda.registrations == 0
    slot.close()


def test_a_state_on_a_cpu_registers_nothing():
    slot = trainer_slot(1 << 16, 1 << 20)
    registrar([torch.zeros(3)])(slot)

    assert slot.view().phase is SlotPhase.EMPTY
    slot.close()
