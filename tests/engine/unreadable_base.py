"""A fine-tuning whose frozen base cannot be read any more when training ends.

usage: unreadable_base.py abandon|close     prints "left" once the engine is closed
"""

import ctypes
import mmap
import os
import sys

from tuning import TIMEOUT_S, Tuning

from lazysnap import MemoryLevel, SnapshotConfig

_PROT_NONE = 0


def make_unreadable(tensor):
    """Take the rights from all pages that hold nothing but this tensor."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    library = ctypes.CDLL(None, use_errno=True)
    assert size > 0
    assert library.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(size), _PROT_NONE) == 0, ctypes.get_errno()


def main():
    tuning = Tuning(SnapshotConfig(memory=MemoryLevel(linger_s=0)))
    assert tuning.engine._wait_ready(TIMEOUT_S)
    tuning.run_until_captured(1)
    for layer in list(tuning.model)[:-1]:
        make_unreadable(layer.base.weight)

    getattr(tuning.engine, sys.argv[1])()

    print("left", flush=True)
    os._exit(0)  # the end of the interpreter would free what it may not touch


if __name__ == "__main__":
    main()
