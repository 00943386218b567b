"""Slots registered with CUDA or ROCm (page-locked), so that a device writes into them by DMA.

Registering 20 GB takes seconds. It is done in the background, before a slot counts as ready, and never at a capture.
It ends before the memory is unmapped: CUDA would otherwise keep the pages for as long as the process lives.
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from lazysnap.capture.devices import page_locker
from lazysnap.memory.arena import Slot

logger = logging.getLogger(__name__)

_PORTABLE = 1
"""``cudaHostRegisterPortable``: the registration holds for every device of this process."""
_tried: "weakref.WeakSet[Slot]" = weakref.WeakSet()


def registrar(tensors: Iterable[torch.Tensor]) -> Callable[[Slot], None]:
    """Return a function that makes a slot ready for captures of ``tensors``: page-locked if one is on a device."""
    device = next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)
    return _leave if device is None else partial(register, device=device)


def _leave(slot: Slot) -> None:
    """Copies from a CPU need no registration."""


def register(slot: Slot, device: torch.device | None, runtime: Any = None) -> None:
    """Register the slot with CUDA, once; any thread may. Blocks: for some seconds where the slot is large.

    A failure is logged: captures into that slot then block while they copy. ``device``: ``None`` is the current one.
    ``runtime``: what to call instead of torch's CUDA runtime.
    """
    if slot in _tried:
        return
    _tried.add(slot)
    # A thread starts on device 0. Calling the runtime there would make a context of 0.5 GB on another rank's device.
    with torch.accelerator.device_index(None if device is None else device.index):
        cuda = page_locker(device) if runtime is None and device is not None else runtime
        if cuda is None:
            logger.warning("%s cannot page-lock memory: captures block training while they copy", device)
            return
        view = torch.frombuffer(slot.buffer, dtype=torch.uint8)  # keeps the memory mapped if the slot is closed now
        pointer = view.data_ptr()
        result = int(cuda.cudaHostRegister(pointer, slot.size_bytes, _PORTABLE))
        del view
    if result != 0:
        logger.warning(
            "CUDA refused to register a slot of %d bytes (cudaHostRegister returned %d): captures into it block "
            "training while they copy; `ulimit -l` bounds what may be registered",
            slot.size_bytes,
            result,
        )
        return
    unregister = weakref.finalize(slot, _unregister, cuda, pointer)
    unregister.atexit = False  # the driver does it when the process ends
    slot.before_unmap = unregister


def _unregister(cuda: Any, pointer: int) -> None:
    result = int(cuda.cudaHostUnregister(pointer))
    if result != 0:
        logger.warning("CUDA did not unregister a slot (cudaHostUnregister returned %d)", result)
