"""Accelerators: checks for supported devices, and calls whose names differ between devices."""

import functools
from typing import Any

import torch

_WITHOUT_STREAMS = ("mps",)
"""Device types whose copies cannot be ordered by streams and events."""


@functools.cache
def has_copier(device: torch.device) -> bool:
    """True if lazy and eager tensors on ``device`` can be captured: on a CPU, or on an accelerator with streams."""
    if device.type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type or device.type in _WITHOUT_STREAMS:
        return False
    try:
        torch.Stream(device)
        torch.Event(device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def page_locker(device: torch.device) -> Any:
    """Return the runtime that page-locks host memory for ``device`` (CUDA and ROCm); ``None`` if there is none."""
    cudart = getattr(torch.get_device_module(device), "cudart", None)
    if cudart is None:
        return None
    return cudart()


def event_for_thread(device: torch.device, *, enable_timing: bool = False) -> torch.Event:
    """Return an event, recorded on the current stream, whose ``synchronize`` takes no processor time while it waits.

    ``torch.Event`` ignores ``blocking``, so this is an event of the device's own module. No stream may wait for it, and
    it may only be compared with events of the same kind.
    """
    make = getattr(torch.get_device_module(device), "Event", torch.Event)
    try:
        event: torch.Event = make(enable_timing=enable_timing, blocking=True)
    except TypeError:  # torch.xpu's events know no ``blocking``
        event = make(enable_timing=enable_timing)
    event.record()
    return event


def is_capturing_graph() -> bool:
    """True while this thread records a graph on the accelerator. Hot."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    module = torch.get_device_module(accelerator)
    if not module.is_initialized():
        return False
    is_capturing = getattr(module, "is_current_stream_capturing", None)
    return is_capturing is not None and bool(is_capturing())
