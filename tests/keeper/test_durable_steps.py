"""What a trainer makes of what its keeper says is durable."""

import pytest

from lazysnap.keeper.events import DurableSteps


@pytest.fixture
def known():
    return DurableSteps()


def test_each_step_is_news_once(known):
    assert known.add("/a", [10, 20]) == [10, 20]
    assert known.add("/a", [20, 30, 10]) == [30]
    assert known.add("/b", [20]) == [20]


def test_older_steps_that_come_later_do_not_hide_newer_ones(known):
    known.add("/a", [30])
    known.add("/a", [20])

    assert known.newest("/a") == 30
    assert known.newest("/b") == -1


def test_of_a_long_run_no_step_is_news_twice(known):
    for step in range(5000):
        known.add("/a", [step])

    assert known.newest("/a") == 4999
    assert known.add("/a", [4500, 0]) == []
    assert sum(map(len, known._steps.values())) <= 2048, "months of training"
