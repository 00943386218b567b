"""Killed by SIGKILL in the middle of a step, a training under Accelerate goes on as if nothing had happened."""

import signal
from pathlib import Path

import pytest
from accelerated import CASES, STEPS_AT_MOST
from support.cuts import check_one_line_says_how_it_began, merged, start

SCRIPT = str(Path(__file__).with_name("accelerated.py"))
MOST_STARTS = 60
FIRST_STEPS = [(case, 1 + number % 2) for number, case in enumerate(CASES)]
"""Cases, and the steps of the first start."""


def arguments(directory, case, dies_after, seed):
    return [SCRIPT, str(directory), case, str(dies_after), str(seed)]


@pytest.mark.parametrize(
    ("case", "first"),
    [
        pytest.param(case, first, marks=pytest.mark.quick if case == "Accumulated" else ())
        for case, first in FIRST_STEPS
    ],
)
def test_killed_in_steps_of_a_training_of_any_kind_it_ends_bit_for_bit_as_uninterrupted(zygote, tmp_path, case, first):
    uncut, cut = tmp_path / "whole", tmp_path / "cut"
    begun = start(zygote, arguments(uncut, case, 0, 1), uncut)
    assert begun.status == 0, begun.text
    whole = begun.lines

    trace, cuts = [], set()
    # At least two steps each: the capture of one that ended just before the death may be lost. The plain loop dies in
    # every second step; the others differ in how they load, and die less often.
    steps = 2 if case == "Plain" else 6
    for number in range(MOST_STARTS):
        # Without a capture the next start begins anew, from the same seed.
        begun = start(zygote, arguments(cut, case, steps if number else first, number + 1 if number > 1 else 1), cut)
        resumed, lines, text = begun.head["resumed"], begun.lines, begun.text
        check_one_line_says_how_it_began(begun)
        assert resumed is not None or number < 2, text
        if resumed is not None:
            assert begun.head["level"] == "memory"
            done = max((line["step"] for line in trace if "step" in line), default=0)
            # The second slot may still be made right after a start.
            assert resumed >= done - 2, text
        trace = merged(trace, resumed or 0, lines)
        assert trace == whole[: len(trace)], text
        if begun.status == 0:
            break
        assert begun.status == -signal.SIGKILL, text
        cuts.add(lines[-1]["step"] if lines and "step" in lines[-1] else 0)
    assert trace == whole
    assert len(cuts) >= (STEPS_AT_MOST // 3 if case == "Plain" else 2)
