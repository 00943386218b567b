"""Blocks that are read: every byte in its place, several blocks at a time."""

import contextlib
import random
import threading

import pytest

from lazysnap.errors import FormatError
from lazysnap.levels.blocks import MemoryBlocks, WantedBytes, fill
from lazysnap.levels.source import header_of
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import PAGE
from lazysnap.shard.limits import MAX_HEADER_BYTES

BLOCK = 64
IMAGE = random.Random(7).randbytes(10 * BLOCK + 17)
DEADLINE_S = 30.0


def block(index):
    return contextlib.nullcontext(memoryview(bytearray(IMAGE[index * BLOCK : (index + 1) * BLOCK])))


class Blocks:
    """``IMAGE``, its blocks given by a function."""

    where = "image"
    size_bytes = len(IMAGE)
    block_bytes = BLOCK

    def __init__(self, block, threads):
        self._block = block
        self.threads = threads
        self.is_closed = False

    def block(self, index, buffers):
        return self._block(index)

    def release(self):
        self.is_closed = True


class Room:
    """Takes the bytes of one span."""

    def __init__(self, start, stop):
        self.expected = IMAGE[start:stop]
        self.found = bytearray(stop - start)
        self.wanted = WantedBytes(start, stop, self.put)

    def put(self, at, data):
        assert not any(self.found[at : at + len(data)])
        self.found[at : at + len(data)] = data


def filled(block, threads, *spans):
    """Whether all of these spans are filled by one ``fill``."""
    rooms = [Room(*span) for span in spans]
    blocks = Blocks(block, threads)
    fill({blocks: [room.wanted for room in rooms]})
    assert blocks.is_closed
    assert [bytes(room.found) for room in rooms] == [room.expected for room in rooms]


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_every_byte_comes_to_its_place_and_each_block_is_asked_for_once(threads):
    asked = []
    spans = [(0, 1), (BLOCK - 1, BLOCK + 1), (3 * BLOCK, 5 * BLOCK), (200, 500), (135, 135), (600, len(IMAGE))]

    def noted(index):
        asked.append(index)
        return block(index)

    filled(noted, threads, *spans)

    assert sorted(asked) == [0, 1, 3, 4, 5, 6, 7, 9, 10]  # nothing is wanted of 2 and 8


def test_two_threads_read_at_the_same_time():
    """Each block is there only when another one is being read, too."""
    both = threading.Barrier(2)

    def meeting(index):
        both.wait(DEADLINE_S)
        return block(index)

    filled(meeting, 2, (0, 8 * BLOCK))


def test_one_thread_copies_while_another_reads():
    """Whoever has block 0 keeps it until block 1 was asked for, and that comes when 0 is let go."""
    asked, let_go = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def held(index):
        if index == 1:
            asked.set()
            assert let_go.wait(DEADLINE_S)
        with block(index) as data:
            yield data
        if index == 0:
            assert asked.wait(DEADLINE_S)
            let_go.set()

    filled(held, 2, (0, 2 * BLOCK))


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_block_raises_is_raised(threads):
    def broken(index):
        if index == 3:
            raise OSError("block 3")
        return block(index)

    with pytest.raises(OSError, match="block 3"):
        filled(broken, threads, (0, len(IMAGE)))


def test_what_is_read_to_be_written_elsewhere_is_verified_whatever_the_blocks_there():
    checksums = Checksums.of(memoryview(IMAGE), BLOCK)
    for length in (BLOCK, 3 * BLOCK, BLOCK // 2, 50):
        source = MemoryBlocks(memoryview(IMAGE), checksums, "image")
        padded = b"".join(source.view(at, length) for at in range(0, len(IMAGE), length))
        assert padded.rstrip(b"\0") == IMAGE.rstrip(b"\0")
        assert len(padded) % length == 0
    damaged = bytearray(IMAGE)
    damaged[3 * BLOCK] ^= 1
    source = MemoryBlocks(memoryview(damaged), checksums, "image")
    source.view(0, 3 * BLOCK)
    with pytest.raises(FormatError, match="image: block 3"):
        source.view(3 * BLOCK, 10)


class Damaged:
    """A shard of a terabyte whose header claims to fill it."""

    size_bytes = 1 << 40

    def __init__(self):
        self.longest = 0

    def view(self, offset, length):
        self.longest = max(self.longest, length)
        return memoryview(b"\xff" * PAGE)

    def finish(self):
        raise AssertionError("its header is read alone")


def test_no_more_is_read_of_a_header_than_the_format_allows():
    damaged = Damaged()
    header_of(damaged, 0, damaged.size_bytes)
    assert damaged.longest <= MAX_HEADER_BYTES + 2 * PAGE
