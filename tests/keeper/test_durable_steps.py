"""What a trainer makes of what its keeper says is durable."""

from lazysnap.keeper.durable import DurableSteps
from lazysnap.keeper.protocol import Durable, LevelFailed

RUN = "ab" * 8


def heard(*told, known=None):
    known = known or DurableSteps()
    for sequence, step in told:
        known.hear(Durable("/a", step, 1, 1.0, sequence, RUN))
    return known


def damaged(*told, known):
    for sequence, step in told:
        known.hear(LevelFailed("/a", step, "damaged", sequence))
    return known


def test_a_level_that_takes_the_newest_first_has_it_still_when_it_came_to_older_ones():
    assert heard((3, 30), (2, 20)).newest("/a") == 30


def test_a_step_that_is_passed_again_counts_by_its_capture():
    assert heard((3, 30), (4, 10)).newest("/a") == 10


def test_what_is_read_back_damaged_leaves_the_one_before():
    known = heard((3, 30), (4, 40))

    assert damaged((4, 40), known=known).newest("/a") == 30
    assert known.newest("/b") == -1


def test_captures_of_before_a_run_was_adopted_do_not_count_nor_those_of_another_run():
    known = DurableSteps()
    known.adopt(RUN, 5)

    assert heard((4, 40), (5, 50), known=known).newest("/a") == -1
    assert heard((6, 10), known=known).newest("/a") == 10
    known.adopt("cd" * 8, 0)
    assert heard((7, 70), known=known).newest("/a") == -1


def test_only_the_last_few_are_remembered():
    known = heard(*((sequence, sequence) for sequence in range(1, 100)))

    damaged(*((sequence, sequence) for sequence in range(91, 100)), known=known)

    assert known.newest("/a") == -1
