"""What a trainer makes of what its keeper says is durable."""

import pytest

from lazysnap.keeper.events import DurableSteps
from lazysnap.keeper.protocol import Complete

START, OTHER = "0" * 15 + "1", "0" * 15 + "2"


@pytest.fixture
def known():
    known = DurableSteps()
    known.begin(START)
    return known


def test_each_step_is_news_once(known):
    assert known.add(Complete("/a", [10, 20], START)) == [10, 20]
    assert known.add(Complete("/a", [20, 30, 10], START)) == [30]
    assert known.add(Complete("/b", [20], START)) == [20]


def test_older_steps_that_come_later_do_not_hide_newer_ones(known):
    known.add(Complete("/a", [30], START))
    known.add(Complete("/a", [20], START))

    assert known.newest("/a") == 30
    assert known.newest("/b") == -1


def test_steps_of_another_start_do_not_count(known):
    assert known.add(Complete("/a", [50], OTHER)) == []
    assert known.newest("/a") == -1

    known.add(Complete("/a", [50], START))
    known.begin(OTHER)
    assert known.newest("/a") == -1
    assert known.add(Complete("/a", [10], OTHER)) == [10]


def test_of_a_long_run_no_step_is_news_twice(known):
    for step in range(5000):
        known.add(Complete("/a", [step], START))

    assert known.newest("/a") == 4999
    assert known.add(Complete("/a", [4500, 0], START)) == []
    assert known.has("/a", 0)
    assert not known.has("/a", 5000)
    assert not known.has("/b", 0)
    assert sum(map(len, known._steps.values())) <= 2048, "months of training"
