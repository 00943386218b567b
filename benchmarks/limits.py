"""What this machine can do at best: warm memory copy, and direct writes to its disk."""

import mmap
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

BLOCK = 16 << 20


def memcpy_rate(size: int, threads: int) -> float:
    """Bytes per second of copying ``size`` bytes between two warm buffers; median of five."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.ones(size, dtype=torch.uint8)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return size / statistics.median(seconds[1:])


def direct_rate(directory: Path, size: int, threads: int = 2) -> float | None:
    """Bytes per second of O_DIRECT writes of 16 MiB from warm memory, with fsync; None if not supported."""
    buffer = mmap.mmap(-1, BLOCK)
    buffer.write(os.urandom(1 << 20) * (BLOCK >> 20))
    path = directory / "direct.bin"
    seconds = []
    try:
        for _ in range(4):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
            start = time.perf_counter()
            os.posix_fallocate(handle, 0, size)
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(partial(os.pwrite, handle, buffer), range(0, size, BLOCK)))
            os.fsync(handle)
            seconds.append(time.perf_counter() - start)
            os.close(handle)
    except OSError:
        return None
    finally:
        path.unlink(missing_ok=True)
    return size / statistics.median(seconds[1:])


def measure(directory: Path, *, large: bool) -> dict[str, object]:
    """All rates of this machine, in bytes per second."""
    size = 1 << 30 if large else 1 << 26
    return {
        "method": "limits",
        "memcpy_1_thread": memcpy_rate(size, 1),
        "memcpy_all_threads": memcpy_rate(size, torch.get_num_threads()),
        "o_direct": direct_rate(directory, size),
    }
