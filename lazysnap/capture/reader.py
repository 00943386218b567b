"""The bytes of a tensor in pieces, in order, without a second copy of the whole: for checksums and one-time copies."""

import ctypes
import threading
from collections.abc import Iterator, Sequence

import torch

SLICE_BYTES = 1 << 20
"""A piece of CPU memory: fits a core's cache, so that a second pass over it is nearly free."""
CHUNK_BYTES = 16 << 20
"""A piece of device memory: what is brought to the host at once."""


def pieces_of(tensor: torch.Tensor, ready: Sequence[torch.Event] = ()) -> Iterator[memoryview]:
    """Views of ``tensor``'s bytes, each good until the next is asked for. The tensor is dense and stays alive.

    Blocks: on a device, until everything before ``ready`` and each copy to the host is done; on a stream of its own,
    so that training's kernels wait for nothing. (That part has never run on a GPU.)
    """
    if tensor.device.type == "cpu":
        whole = memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
        for start in range(0, len(whole), SLICE_BYTES):
            yield whole[start : start + SLICE_BYTES]
        return
    side, staging = _side_stream(tensor.device)
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for start in range(0, tensor.nbytes, CHUNK_BYTES):
        part = flat[start : start + CHUNK_BYTES]
        with side:
            for event in ready:
                side.wait_event(event)
            staging[: part.nbytes].copy_(part, non_blocking=True)
            part.record_stream(side)
        side.synchronize()
        yield memoryview((ctypes.c_ubyte * part.nbytes).from_address(staging.data_ptr())).cast("B")


class _Local(threading.local):
    def __init__(self) -> None:
        self.sides: dict[torch.device, tuple[torch.Stream, torch.Tensor]] = {}


_local = _Local()


def _side_stream(device: torch.device) -> tuple[torch.Stream, torch.Tensor]:
    """A stream and page-locked host memory of this thread's own."""
    if device not in _local.sides:
        staging = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        _local.sides[device] = torch.Stream(device), staging
    return _local.sides[device]
