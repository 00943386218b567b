"""A slot: what any reader sees of it wherever its trainer dies, who writes what, and what memory it takes."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

import pytest
from slot_writer import NUM_PIECES, PIECE_BYTES, START, write

from lazysnap.errors import FormatError
from lazysnap.memory import capture_reader
from lazysnap.memory.capture_reader import CaptureAborted, CaptureReader
from lazysnap.memory.slot_choice import SlotPhase
from lazysnap.memory.slots import KeeperSlot, Slot, TrainerSlot, make_slot
from lazysnap.memory.words import PAGE_BYTES, NodePage, SlotWord, word_bytes

MIB = 1 << 20
IMAGE_BYTES = NUM_PIECES * PIECE_BYTES
STORES_OF_A_CAPTURE = 12 + NUM_PIECES + 3
WRITER = Path(__file__).with_name("slot_writer.py")
KEEPER_WORDS = {SlotWord.HELD, SlotWord.VOID}
TRAINER_WORDS = {*(word for word in SlotWord if SlotWord.END <= word <= SlotWord.REACHED), SlotWord.REPEATABLE}


class Died(Exception):
    """The process was killed before a store."""


class Stores:
    """Words that remember which were stored; after so many stores the process dies."""

    def __init__(self, cells, left=1000):
        self.cells, self.left, self.words = cells, left, []

    def __getitem__(self, index):
        return self.cells[index]

    def __setitem__(self, index, value):
        if len(self.words) == self.left:
            raise Died
        self.words.append(SlotWord(index))
        self.cells[index] = value


@pytest.fixture
def keeper_slot():
    slot = make_slot(4096, IMAGE_BYTES)
    yield slot
    slot.close()


@pytest.fixture
def trainer_slot(keeper_slot):
    slot = TrainerSlot.attach(os.dup(keeper_slot.descriptor))
    yield slot
    slot.close()


def read(slot, sequence, beat=lambda: None):
    """The bytes of a capture."""
    reader = CaptureReader(slot, sequence, beat)
    pieces = [bytes(reader.view(offset, PIECE_BYTES)) for offset in range(0, reader.size_bytes, PIECE_BYTES)]
    reader.finish()
    return b"".join(pieces)


def check_after_death(slot, num_stores):
    """The trainer died after so many stores of its second capture."""
    view = slot.view()
    if num_stores == 0:
        assert (view.phase, view.sequence) == (SlotPhase.WHOLE, 1)
        assert read(slot, 1) == b"\1" * IMAGE_BYTES
    elif num_stores < 12:
        assert view.phase is SlotPhase.EMPTY
    elif num_stores < STORES_OF_A_CAPTURE:
        assert (view.phase, view.step, view.sequence) == (SlotPhase.CAPTURING, 2, 2)
        slot.void(2)
        assert slot.view().phase is SlotPhase.VOID
    else:
        assert (view.phase, view.step, view.start) == (SlotPhase.WHOLE, 2, int(START, 16))
        assert read(slot, 2) == b"\2" * IMAGE_BYTES
    if 0 < num_stores < STORES_OF_A_CAPTURE:
        for sequence in (1, 2):
            with pytest.raises(CaptureAborted):
                CaptureReader(slot, sequence, lambda: None)


@pytest.mark.parametrize("num_stores", range(STORES_OF_A_CAPTURE + 1))
def test_a_trainer_that_dies_between_two_stores_leaves_nothing_that_seems_whole(num_stores, keeper_slot, trainer_slot):
    write(trainer_slot, 1)
    cells = trainer_slot._cells
    trainer_slot._cells = Stores(cells, num_stores)

    with contextlib.suppress(Died):
        write(trainer_slot, 2)

    trainer_slot._cells = cells
    check_after_death(keeper_slot, num_stores)


def start_writer(slot, fault=""):
    """Another process that makes two captures in the slot."""
    command = [sys.executable, str(WRITER), str(slot.descriptor)]
    return subprocess.Popen(command, pass_fds=[slot.descriptor], env={**os.environ, "LAZYSNAP_FAULT": fault})


@pytest.mark.slow
def test_a_trainer_that_is_killed_before_any_store_leaves_nothing_that_seems_whole():
    for num_stores in range(STORES_OF_A_CAPTURE + 1):
        slot = make_slot(4096, IMAGE_BYTES)
        fault = f"memory.store:{STORES_OF_A_CAPTURE + num_stores + 1}:kill"

        code = start_writer(slot, fault).wait(60)

        assert code == (-signal.SIGKILL if num_stores < STORES_OF_A_CAPTURE else 0)
        check_after_death(slot, num_stores)
        slot.close()


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_a_reader_that_was_woken_early_waits_for_a_trainer_in_another_process(dies, keeper_slot):
    """It stops before it publishes the second half. Then it continues, or dies and the keeper voids its capture."""
    writer = start_writer(keeper_slot, f"memory.store:{STORES_OF_A_CAPTURE + 14}:stop")
    os.waitpid(writer.pid, os.WUNTRACED)
    assert keeper_slot.view().watermark_bytes == PIECE_BYTES

    def continue_or_die():
        if not dies:
            os.kill(writer.pid, signal.SIGCONT)
        elif writer.poll() is None:
            writer.kill()
            writer.wait(60)
            keeper_slot.void(2)

    if dies:
        with pytest.raises(CaptureAborted):
            read(keeper_slot, 2, continue_or_die)
    else:
        assert read(keeper_slot, 2, continue_or_die) == b"\2" * IMAGE_BYTES
        assert writer.wait(60) == 0


def test_a_capture_whose_copy_stops_is_given_up(keeper_slot, trainer_slot, monkeypatch):
    monkeypatch.setattr(capture_reader, "STALL_S", 0.0)
    trainer_slot._cells = Stores(trainer_slot._cells, 13)
    with pytest.raises(Died):
        write(trainer_slot, 1)

    with pytest.raises(CaptureAborted, match=f"stopped at byte {PIECE_BYTES}"):
        read(keeper_slot, 1)
    trainer_slot._cells = trainer_slot._cells.cells


def test_each_word_has_one_writer(keeper_slot, trainer_slot):
    stored_by_trainer = trainer_slot._cells = Stores(trainer_slot._cells)
    stored_by_keeper = keeper_slot._cells = Stores(keeper_slot._cells)

    write(trainer_slot, 1)
    keeper_slot.hold(1, [keeper_slot], 1)
    keeper_slot.release()
    trainer_slot.reach(2)
    trainer_slot.discard(1)
    keeper_slot.void(1)

    assert set(stored_by_trainer.words) == TRAINER_WORDS
    assert set(stored_by_keeper.words) == KEEPER_WORDS
    keeper_slot._cells, trainer_slot._cells = stored_by_keeper.cells, stored_by_trainer.cells


def test_a_hold_is_of_one_capture_alone(keeper_slot, trainer_slot):
    write(trainer_slot, 1)
    assert keeper_slot.hold(1, [keeper_slot], 1)
    assert keeper_slot.view().is_held

    write(trainer_slot, 2)

    assert not keeper_slot.view().is_held
    assert not keeper_slot.hold(1, [keeper_slot], 1)


def test_a_discarded_capture_is_gone_and_its_number_is_not(keeper_slot, trainer_slot):
    write(trainer_slot, 1)

    assert not trainer_slot.discard(2)
    assert keeper_slot.view().phase is SlotPhase.WHOLE
    assert trainer_slot.discard(1)
    assert not trainer_slot.discard(1)

    view = keeper_slot.view()
    assert (view.phase, view.step, view.sequence) == (SlotPhase.EMPTY, None, 1)


def test_words_for_people(keeper_slot, trainer_slot):
    write(trainer_slot, 1)
    assert keeper_slot.view().reached_step is None

    trainer_slot.reach(4)

    assert (keeper_slot.view().copied_ns, keeper_slot.view().reached_step) == (1, 4)


def test_a_capture_that_does_not_fit_leaves_the_slot_as_it_was(keeper_slot, trainer_slot):
    write(trainer_slot, 1)

    with pytest.raises(FormatError, match="does not fit"):
        trainer_slot.begin(1, 2, sequence=2, image_bytes=IMAGE_BYTES + 4096, meta=b"")
    with pytest.raises(FormatError, match="does not fit"):
        trainer_slot.begin(1, 2, sequence=2, image_bytes=1, meta=bytes(4097))

    assert read(keeper_slot, 1) == b"\1" * IMAGE_BYTES


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        (SlotWord.META_BYTES, 1, "the metadata in a slot does not agree with its checksum"),
        (SlotWord.META_BYTES, (1 << 64) - 1, "the metadata in a slot does not agree with its checksum"),
        (SlotWord.META_SUM, 1, "the metadata in a slot does not agree with its checksum"),
        (
            SlotWord.START,
            5,
            "its words say step 1 of start 0{15}5 .*, its metadata says step 1 of start 1{16}",
        ),
        (SlotWord.BEGIN, 6, "its words say step 5 of start 1{16} .*, its metadata says step 1 of start 1{16}"),
        (SlotWord.IMAGE_BYTES, IMAGE_BYTES + 1, f"its words say step 1 of start 1{{16}} and {IMAGE_BYTES + 1} bytes"),
        (SlotWord.IMAGE_BYTES, (1 << 64) - 1, "its words say step 1 of start 1{16} and [0-9]{20} bytes"),
    ],
    ids=lambda item: item.name if isinstance(item, SlotWord) else "",
)
def test_words_that_are_damaged_are_not_believed(word, value, said, keeper_slot, trainer_slot):
    write(trainer_slot, 1)
    assert CaptureReader(keeper_slot, 1, lambda: None).meta.step == 1
    trainer_slot.store(word, value)

    with pytest.raises(FormatError, match=said):
        CaptureReader(keeper_slot, 1, lambda: None)


@pytest.mark.parametrize("fields", [b"", b"{}", b"[1]", b"\xff"])
def test_metadata_that_is_none_is_refused(fields, keeper_slot, trainer_slot):
    """Its checksum is right."""
    trainer_slot.begin(1, 2, sequence=1, image_bytes=1, meta=fields)

    with pytest.raises(FormatError, match="a slot: "):
        CaptureReader(keeper_slot, 1, lambda: None)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (SlotWord.MAGIC, 1),
        (SlotWord.META_CAPACITY, 2 * PAGE_BYTES),
        (SlotWord.META_CAPACITY, (1 << 64) - PAGE_BYTES),
        (SlotWord.IMAGE_CAPACITY, IMAGE_BYTES + 1),
        (SlotWord.IMAGE_CAPACITY, 0),
    ],
    ids=lambda item: item.name if isinstance(item, SlotWord) else "",
)
def test_shared_memory_with_another_layout_is_no_slot(word, value, keeper_slot):
    Slot.attach(os.dup(keeper_slot.descriptor)).close()
    os.pwrite(keeper_slot.descriptor, word_bytes(value), 8 * word)

    with pytest.raises(FormatError, match=r"is no slot of this version \(magic 0x[0-9a-f]+, capacities"):
        Slot.attach(os.dup(keeper_slot.descriptor))


def test_an_image_that_does_not_begin_at_a_page_is_no_slot(keeper_slot):
    os.pwrite(keeper_slot.descriptor, word_bytes(PAGE_BYTES + 8, IMAGE_BYTES - 8), 8 * SlotWord.META_CAPACITY)

    with pytest.raises(FormatError, match=f"capacities {PAGE_BYTES + 8} \\+ {IMAGE_BYTES - 8}"):
        Slot.attach(os.dup(keeper_slot.descriptor))


def shared_bytes():
    """Shared memory that counts as this process's own."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem")]
    return 1024 * int(line.split()[1])


def test_memory_counts_as_the_keepers_own_only_while_it_reads():
    before = shared_bytes()
    slot = make_slot(4096, 32 * MIB)
    assert os.fstat(slot.descriptor).st_blocks * 512 >= 32 * MIB
    assert shared_bytes() - before < MIB

    view = slot.read(0, 32 * MIB)
    assert sum(view[::PAGE_BYTES]) == 0
    assert shared_bytes() - before >= 32 * MIB
    view.release()

    assert shared_bytes() - before < MIB
    slot.close()


def test_what_a_reader_writes_into_its_result_stays_in_its_process(keeper_slot, trainer_slot):
    write(trainer_slot, 1)
    reader = Slot.attach(keeper_slot.reading_descriptor())
    view = reader.read(10, 100)

    view[:] = bytes(100)

    assert read(reader, 1) == b"\1" * IMAGE_BYTES
    with pytest.raises(TypeError):
        reader.store(SlotWord.HELD, 1)
    view.release()
    reader.close()


def test_a_range_of_the_image_may_begin_and_end_anywhere(keeper_slot, trainer_slot):
    trainer_slot.image[:] = bytes(range(256)) * (IMAGE_BYTES // 256)

    for offset, length in [(0, 1), (4095, 2), (5000, 10_000), (IMAGE_BYTES - 3, 10), (IMAGE_BYTES, 1)]:
        assert keeper_slot.read(offset, length) == trainer_slot.image[offset : offset + length]


def test_all_pages_of_a_trainer_are_populated(trainer_slot):
    before = shared_bytes()
    trainer_slot.populate()

    assert shared_bytes() - before >= IMAGE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("work", ["make_slot", "populate"])
def test_other_threads_run_while_memory_is_made_ready(work):
    """A keeper finds memory for minutes, and answers its trainers meanwhile; a trainer trains."""
    counted = [0]
    is_over = threading.Event()

    def count():
        while not is_over.is_set():
            counted[0] += 1
            time.sleep(0)  # lets the others run

    counter = threading.Thread(target=count)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # a thread runs when another one lets it, and else not
    try:
        counter.start()
        assert any(is_counted_meanwhile(work, counted) for _ in range(20))
    finally:
        sys.setswitchinterval(interval_s)
        is_over.set()
        counter.join()


def is_counted_meanwhile(work, counted):
    before = counted[0]
    slot = make_slot(4096, 128 * MIB)
    after = counted[0]
    writer = TrainerSlot.attach(os.dup(slot.descriptor))
    if work == "populate":
        before = counted[0]
        writer.populate()
        after = counted[0]
    writer.close()
    slot.close()
    return after > before


def test_a_slot_may_be_a_file_without_a_name_that_has_all_its_space(tmp_path):
    slot = make_slot(4096, IMAGE_BYTES, str(tmp_path))
    writer = TrainerSlot.attach(os.dup(slot.descriptor))
    write(writer, 1)
    facts = os.fstat(slot.descriptor)

    assert read(slot, 1) == b"\1" * IMAGE_BYTES
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(facts.st_mode) == 0o600
    assert facts.st_blocks * 512 >= slot.size_bytes
    assert (slot.is_file, slot.memory_bytes) == (True, 0)
    reader = Slot.attach(slot.reading_descriptor())
    reader.read(0, 3)[:] = b"xyz"
    assert read(reader, 1) == b"\1" * IMAGE_BYTES
    reader.close()
    writer.close()
    slot.close()


@pytest.mark.parametrize("kind", ["named", "sparse"])
def test_a_file_that_could_be_opened_by_name_or_run_out_of_space_is_no_slot(kind, keeper_slot, tmp_path):
    path = tmp_path / "slot"
    with open(path, "w+b") as file:
        file.write(os.pread(keeper_slot.descriptor, 32, 0))
        file.flush()
        os.truncate(file.fileno(), keeper_slot.size_bytes)
        if kind == "sparse":
            path.unlink()
        with pytest.raises(FormatError, match="has a name, or not all of its blocks"):
            Slot.attach(os.dup(file.fileno()))


def test_other_memory_is_no_slot_and_no_node_page(keeper_slot):
    node = NodePage.create()
    resizable = os.memfd_create("slot", os.MFD_ALLOW_SEALING)
    os.write(resizable, os.pread(keeper_slot.descriptor, keeper_slot.size_bytes, 0))
    resizable_page = os.memfd_create("node", os.MFD_ALLOW_SEALING)
    os.write(resizable_page, os.pread(node.descriptor, PAGE_BYTES, 0))

    with pytest.raises(FormatError, match="no slot of this version"):
        KeeperSlot.attach(os.dup(node.descriptor))
    with pytest.raises(FormatError, match="whose size another process could change"):
        KeeperSlot.attach(resizable)
    with pytest.raises(FormatError, match="no node page"):
        NodePage.attach(resizable_page, os.dup(node.event_descriptor))
    os.pwrite(keeper_slot.descriptor, os.pread(node.descriptor, 8, 0), 0)
    with pytest.raises(FormatError, match="no node page"):
        NodePage.attach(os.dup(keeper_slot.descriptor), os.dup(node.event_descriptor))
    os.pwrite(node.descriptor, word_bytes(1), 0)
    with pytest.raises(FormatError, match="no node page"):
        NodePage.attach(*map(os.dup, node.descriptors))
    node.close()


def test_a_refused_descriptor_is_closed():
    descriptor = os.memfd_create("no-slot")

    with pytest.raises(FormatError):
        Slot.attach(descriptor)

    with pytest.raises(OSError, match="Bad file descriptor"):
        fcntl.fcntl(descriptor, fcntl.F_GETFD)


def test_what_refuses_further_memory_ends_the_making_of_a_slot():
    before = os.listdir("/proc/self/fd")
    pieces = []

    def refuse(count):
        pieces.append(count)
        raise MemoryError

    with pytest.raises(MemoryError):
        make_slot(4096, 64 * MIB, progress=refuse)

    assert pieces == [16 * MIB]
    assert os.listdir("/proc/self/fd") == before


def test_a_trainer_wakes_the_keeper_from_the_awaited_step_on():
    keeper_page = NodePage.create()
    page = NodePage.attach(*map(os.dup, keeper_page.descriptors))

    def awaited():
        steps = []
        for step in (0, 6, 7, 8):
            page.wake(step)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(keeper_page.event_descriptor)
                steps.append(step)
        return steps

    assert awaited() == [0, 6, 7, 8]
    keeper_page.set_awaited_step(7)
    assert awaited() == [7, 8]
    keeper_page.set_awaited_step(None)
    assert awaited() == []
    page.close()
    keeper_page.close()


def test_pieces_of_memory_are_gathered_behind_one_another(trainer_slot, keeper_slot):
    rooms = [ctypes.create_string_buffer(bytes([number]) * number, number) for number in range(1, 100)]
    pieces = array("Q")
    for room in rooms:
        pieces.extend((ctypes.addressof(room), len(room)))
    expected = b"".join(room.raw for room in rooms)

    trainer_slot.gather(17, len(expected), pieces)

    assert bytes(trainer_slot.image[17 : 17 + len(expected)]) == expected
    assert bytes(keeper_slot.read(0, 18)) == b"\0" * 17 + b"\1"


@pytest.mark.parametrize("position", [0, 1])
def test_a_piece_that_is_not_mapped_is_an_error(trainer_slot, position):
    room = ctypes.create_string_buffer(16)
    pieces = array("Q", [ctypes.addressof(room), 16, ctypes.addressof(room), 16])
    mapping = mmap.mmap(-1, PAGE_BYTES)
    first = ctypes.c_char.from_buffer(mapping)
    pieces[2 * position] = ctypes.addressof(first)
    del first
    mapping.close()

    with pytest.raises(OSError, match="of 32 bytes"):
        trainer_slot.gather(0, 32, pieces)
