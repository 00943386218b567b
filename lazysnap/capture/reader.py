"""The bytes of a tensor on a device in pieces, in order, for copies into memory that is not page-locked."""

import ctypes
import threading
from collections.abc import Iterator, Sequence

import torch

from lazysnap.capture.devices import event_for_thread

CHUNK_BYTES = 16 << 20
"""A piece of device memory: the bytes that are copied to the host at a time."""


def pieces_of(tensor: torch.Tensor, ready: Sequence[torch.Event] = ()) -> Iterator[memoryview]:
    """Yield views of the bytes of ``tensor``, which is on a device; each is valid until the next.

    Blocks: until everything before ``ready`` and each copy to the host is done. Copies run on a separate stream, so
    training's kernels wait for nothing. The device copies a piece while the caller uses the piece before.
    """
    side, buffers = _ring(tensor.device)
    with torch.accelerator.device_index(tensor.device.index), side:
        for event in ready:
            side.wait_event(event)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    parts = torch.split(flat, CHUNK_BYTES)
    queued = _queue(parts[0], side, buffers[0])
    for number in range(len(parts)):
        landed = queued
        if number + 1 < len(parts):
            queued = _queue(parts[number + 1], side, buffers[(number + 1) % 2])
        with torch.accelerator.device_index(tensor.device.index):
            landed.synchronize()
        address = buffers[number % 2].data_ptr()
        yield memoryview((ctypes.c_ubyte * parts[number].nbytes).from_address(address)).cast("B")


def _queue(part: torch.Tensor, side: torch.Stream, buffer: torch.Tensor) -> torch.Event:
    with torch.accelerator.device_index(part.device.index), side:
        buffer[: part.nbytes].copy_(part, non_blocking=True)
        part.record_stream(side)  # a caller that takes no further piece may release the tensor
        return event_for_thread(part.device)


class _Local(threading.local):
    def __init__(self) -> None:
        self.rings: dict[torch.device, tuple[torch.Stream, list[torch.Tensor]]] = {}


_local = _Local()


def _ring(device: torch.device) -> tuple[torch.Stream, list[torch.Tensor]]:
    """Return a stream and two page-locked buffers that only this thread uses."""
    if device not in _local.rings:
        buffers = [_locked_buffer(), _locked_buffer()]
        _local.rings[device] = torch.Stream(device), buffers
    return _local.rings[device]


def _locked_buffer() -> torch.Tensor:
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
