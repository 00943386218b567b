"""Eight ranks of one keeper that ask for a slot at the same time: ``asking.py BYTES``. Prints how many got one."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from lazysnap.memory.failures import MemoryBoundExceeded
from lazysnap.memory.slot_pool import SlotPool

RANKS = 8


def main(size_bytes):
    together = threading.Barrier(RANKS)

    def ask(pool):
        together.wait()
        try:
            return pool.provide((4096, size_bytes, 1), None, lambda slot: False)
        except MemoryBoundExceeded:
            return False

    pools = [SlotPool(lambda number, slot: None) for _ in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as threads:
        print(sum(threads.map(ask, pools)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
