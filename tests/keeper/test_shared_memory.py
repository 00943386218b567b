"""The memory that a keeper and its trainers share."""

import os
import stat
import sys
import threading
import time

import pytest

from lazysnap.errors import FormatError
from lazysnap.memory.arena import Slot

MIB = 1 << 20
TRIES = 20


@pytest.mark.slow
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


@pytest.fixture
def spilled(tmp_path):
    slot = Slot.create(4096, MIB, str(tmp_path))
    yield slot
    slot.close()


def test_a_slot_that_is_a_file_has_no_name_and_all_its_space(spilled, tmp_path):
    facts = os.fstat(spilled.fd)

    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(facts.st_mode) == 0o600
    assert facts.st_blocks * 512 >= spilled.size_bytes
    assert (spilled.is_file, spilled.memory_bytes) == (True, 0)


def test_who_may_only_read_a_file_cannot_change_it_for_others(spilled):
    reader = Slot.attach(spilled.reading_fd())
    spilled.begin(7, sequence=1, image_bytes=3, meta=b"{}", pin=False)
    spilled.image[:3] = b"abc"
    spilled.commit()

    assert (reader.status().step, bytes(reader.read(0, 3))) == (7, b"abc")
    reader.image[:3] = b"xyz"
    assert bytes(spilled.image[:3]) == b"abc"
    reader.close()


@pytest.mark.parametrize("kind", ["named", "sparse"])
def test_a_file_that_could_be_opened_by_name_or_run_out_of_space_is_no_slot(kind, spilled, tmp_path):
    path = tmp_path / "slot"
    with open(path, "w+b") as file:
        file.write(bytes(spilled.buffer[:24]))
        file.flush()
        os.truncate(file.fileno(), spilled.size_bytes)
        if kind == "sparse":
            path.unlink()
        with pytest.raises(FormatError, match="has a name, or not all of its blocks"):
            Slot.attach(os.dup(file.fileno()))
