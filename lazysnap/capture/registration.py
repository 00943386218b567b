"""Slots registered with CUDA or ROCm (page-locked), so that a device writes into them by DMA.

Registering 20 GB takes seconds. It is done in the background, before a slot counts as ready, and never at a capture.
It ends before the memory is unmapped: CUDA would otherwise keep the pages for as long as the process lives.
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lazysnap.capture.devices import page_locker
from lazysnap.memory.slots import TrainerSlot

logger = logging.getLogger(__name__)

_PORTABLE = 1
"""``cudaHostRegisterPortable``: the registration holds for every device of this process."""
_tried: "weakref.WeakKeyDictionary[TrainerSlot, bool]" = weakref.WeakKeyDictionary()
"""Slots for which registration was tried, and whether it succeeded."""


def registrar(tensors: Iterable[torch.Tensor]) -> Callable[[TrainerSlot], None]:
    """Return a function that makes a slot ready for captures of ``tensors``: page-locked if one is on a device."""
    device = _first_device(tensors)

    def make_ready(slot: TrainerSlot) -> None:
        if device is not None:
            register(slot, device)

    return make_ready


def _first_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the first device that is not a CPU."""
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return None


def register(slot: TrainerSlot, device: torch.device, runtime: Any = None) -> bool:
    """Page-lock the image of a slot, once; any thread may. ``False`` if that fails: copies then go through a buffer.

    A slot that is a file is never page-locked: a device must not pin pages that the kernel writes to the disk.

    Blocks: for some seconds if the slot is large.
    ``runtime``: the object to call instead of the CUDA runtime of ``device``'s module.
    """
    if slot.is_file:
        return False
    if slot not in _tried:
        _tried[slot] = False
        # A thread starts on device 0: calling the runtime there makes a context of 0.5 GB on another rank's device.
        with torch.accelerator.device_index(device.index):
            _tried[slot] = _register(slot, device, runtime or page_locker(device))
    return _tried[slot]


def _register(slot: TrainerSlot, device: torch.device, cuda: Any) -> bool:
    if cuda is None:
        logger.info("%s cannot page-lock memory: copies go through a buffer, and the gate waits for them", device)
        return False
    view = torch.frombuffer(slot.image, dtype=torch.uint8)  # keeps the memory mapped if the slot is closed now
    pointer = view.data_ptr()
    result = int(cuda.cudaHostRegister(pointer, slot.image_capacity_bytes, _PORTABLE))
    del view
    if result != 0:
        logger.warning(
            "CUDA refused to register a slot of %d bytes (cudaHostRegister returned %d): copies go through a buffer, "
            "and the gate waits for them. `ulimit -l` limits what may be registered",
            slot.image_capacity_bytes,
            result,
        )
        return False
    unregister = weakref.finalize(slot, _unregister, cuda, pointer, device.index)
    unregister.atexit = False  # the driver does it when the process ends
    slot.before_unmap = unregister
    return True


def _unregister(cuda: Any, pointer: int, device_index: int | None) -> None:
    with torch.accelerator.device_index(device_index):
        result = int(cuda.cudaHostUnregister(pointer))
    if result != 0:
        logger.warning("CUDA did not unregister a slot (cudaHostUnregister returned %d)", result)
