"""``StepSet`` beside a set of numbers."""

import pickle
import random

from lazysnap.grants.steps import StepSet


def test_it_holds_what_a_set_holds_in_whatever_order_steps_come():
    drawn = random.Random(3)
    for most in (10, 3000, 10**6, 1 << 62):
        steps, expected = StepSet(), set()
        for _ in range(300):
            step = drawn.randint(0, most)
            steps.add(step)
            expected.add(step)

            assert steps.newest == max(expected)
            assert len(steps) == len(expected)
        asked = {*drawn.sample(sorted(expected), 10), *(drawn.randint(0, most) for _ in range(10))}

        assert list(steps) == sorted(expected, reverse=True)
        assert steps == expected
        assert steps & asked == expected & asked
        assert asked - steps == asked - expected


def test_an_empty_one_has_no_newest_step():
    assert (StepSet().newest, list(StepSet()), 0 in StepSet()) == (-1, [], False)


def test_a_step_takes_a_bit_or_two():
    """A month of a step per second is 2.6 million steps: half a megabyte, where a set of numbers takes 180."""
    assert len(pickle.dumps(StepSet(range(100_000)))) < 2 * 100_000 / 8
