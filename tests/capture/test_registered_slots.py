"""Slots of a keeper are registered with CUDA before a trainer sees them, and not any more when they are returned."""

import gc
import uuid

import pytest
import torch
from support.cuda_runtime import CudaRuntime
from support.waiting import until

from lazysnap import SnapshotConfig
from lazysnap.capture.registration import register
from lazysnap.core.messages import Farewell, MemoryWish
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity

TIMEOUT_S = 60


@pytest.mark.slow
def test_slots_are_ready_only_when_registered_and_a_new_size_leaves_none_behind():
    """Each round asks for slots of another size, as a plan that is made anew does, and returns the old ones."""
    cuda = CudaRuntime()
    identity = JobIdentity.from_config(SnapshotConfig(job_id=f"registered-{uuid.uuid4().hex}"))
    client = KeeperClient(identity, 0, linger_s=5, io_timeout_s=TIMEOUT_S)
    client.make_ready(lambda slot: register(slot, torch.device("cuda"), cuda))
    try:
        client.connect(TIMEOUT_S)
        for size in (1 << 20, 64 << 20):
            client.ask_memory(MemoryWish(num_slots=2, meta_bytes=1 << 16, image_bytes=size))
            for slot in client.mapped():
                if slot.image_capacity_bytes != size:
                    client.return_slot(slot)
            slot = None
            until(lambda size=size: sum(slot.image_capacity_bytes == size for slot in client.slots()) == 2)
            ready = {torch.frombuffer(slot.image, dtype=torch.uint8).data_ptr() for slot in client.slots()}
            assert ready <= cuda.registered.keys()
        until(lambda: len(client.slots()) == 2)
        gc.collect()
        assert len(cuda.registered) == 2
    finally:
        client.leave(Farewell.OVER, TIMEOUT_S)
    gc.collect()
    assert cuda.registered == {}
    assert all(cuda.was_mapped_at_unregister)
