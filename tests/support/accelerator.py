"""The device that tests/gpu runs on: CUDA, or the software device if ``LAZYSNAP_TEST_DEVICE=software`` is set."""

import contextlib
import os

import torch

TYPE = os.environ.get("LAZYSNAP_TEST_DEVICE", "cuda")
SOFTWARE = None
"""The software device with its checker; ``None`` on a real one."""
if TYPE == "software":
    from device import software_device

    SOFTWARE = software_device.load()
IS_THERE = torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == TYPE
WHY_NOT = f"needs a device of type {TYPE}"


@contextlib.contextmanager
def busy_stream():
    """Let the current stream do nothing of what is queued meanwhile; on a real device, for about a second."""
    if SOFTWARE is not None:
        with SOFTWARE.holding_stream():
            yield
    else:
        torch.cuda._sleep(2_000_000_000)
        yield


def host_reads(tensor: torch.Tensor, what: str) -> None:
    """Tell the checker, where there is one, that this thread reads page-locked memory now."""
    if SOFTWARE is not None:
        SOFTWARE.host_reads(tensor, what)


@contextlib.contextmanager
def little_memory():
    """Leave the device room for no more than 1 MiB; on the software device, for nothing."""
    if SOFTWARE is not None:
        SOFTWARE.configure(failing_allocation=1)
        try:
            yield
        finally:
            SOFTWARE.configure()
        return
    torch.cuda.empty_cache()
    in_use, whole = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((in_use + (1 << 20)) / whole)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
