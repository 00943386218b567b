"""Eight threads that make a slot at the same time: ``asking.py BYTES``. Prints how many got one."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from lazysnap.memory.budget import NODE, MemoryBoundExceeded
from lazysnap.memory.slots import make_slot

RANKS = 8


def main(size_bytes):
    together = threading.Barrier(RANKS)
    slots = []

    def ask(_):
        together.wait()
        try:
            with NODE.reserved(size_bytes, "a slot") as populated:
                slots.append(make_slot(4096, size_bytes, progress=populated))
        except MemoryBoundExceeded:
            return False
        return True

    with ThreadPoolExecutor(RANKS) as threads:
        print(sum(threads.map(ask, range(RANKS))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
