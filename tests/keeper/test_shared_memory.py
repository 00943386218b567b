"""The memory that a keeper and its trainers share."""

import sys
import threading
import time

from lazysnap.memory.arena import Slot

MIB = 1 << 20
TRIES = 20


def test_other_threads_run_while_memory_is_made_ready():
    """A keeper finds memory for minutes, and answers its trainers meanwhile; a trainer trains."""
    counted, is_over = [0], threading.Event()

    def count():
        while not is_over.is_set():
            counted[0] += 1
            time.sleep(0)  # lets the others run

    counter = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # a thread runs when another one lets it, and else not
    try:
        counter.start()
        for _ in range(TRIES):
            slot = Slot.create(4096, 128 * MIB)
            before = counted[0]
            slot.populate()
            found = counted[0]
            slot.close()
            if found > before:
                return
        raise AssertionError("no other thread ran")
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        counter.join()
