"""Memory filled from an image: every byte in its place, several blocks at a time."""

import contextlib
import random
import threading

import pytest
import torch

from lazysnap.engine.filling import Wanted, fill

BLOCK = 64
IMAGE = random.Random(7).randbytes(10 * BLOCK + 17)
DEADLINE_S = 30.0


def block(index):
    return contextlib.nullcontext(memoryview(bytearray(IMAGE[index * BLOCK : (index + 1) * BLOCK])))


def room(*spans):
    return [Wanted(start, torch.zeros(stop - start, dtype=torch.uint8)) for start, stop in spans]


def are_filled(wanted):
    return all(one.out.numpy().tobytes() == IMAGE[one.offset : one.end] for one in wanted)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_every_byte_comes_to_its_place_and_each_block_is_asked_for_once(threads):
    asked = []
    wanted = room((0, 1), (BLOCK - 1, BLOCK + 1), (3 * BLOCK, 5 * BLOCK), (200, 500), (5, 5), (600, len(IMAGE)))

    def noted(index):
        asked.append(index)
        return block(index)

    fill(wanted, BLOCK, noted, threads)

    assert are_filled(wanted)
    assert sorted(asked) == [0, 1, 3, 4, 5, 6, 7, 9, 10]  # nothing is wanted of 2 and 8


def test_two_threads_read_at_the_same_time():
    """Each block is there only when another one is being read, too."""
    both = threading.Barrier(2)

    def meeting(index):
        both.wait(DEADLINE_S)
        return block(index)

    wanted = room((0, 8 * BLOCK))

    fill(wanted, BLOCK, meeting, 2)

    assert are_filled(wanted)


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

    wanted = room((0, 2 * BLOCK))

    fill(wanted, BLOCK, held, 2)

    assert are_filled(wanted)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_block_raises_is_raised(threads):
    def broken(index):
        if index == 3:
            raise OSError("block 3")
        return block(index)

    with pytest.raises(OSError, match="block 3"):
        fill(room((0, len(IMAGE))), BLOCK, broken, threads)
