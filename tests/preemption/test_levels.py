"""Which level a preempted training waits for, and which one its last line names."""

import json
import os
import signal

import pytest
from support.listing import files_below
from support.ports import silent_server
from support.waiting import until

RARELY = {"every_n_steps": 1000}
"""A level that is not due in a test stores nothing but what preemption requires."""
AMPLE = {"LAZYSNAP_TEST_PREEMPTION_S": "200"}
"""A training that waits for what need not be waited for is still there after ``EXIT_S``."""
EXIT_S = 60


def with_levels(*levels):
    return {"LAZYSNAP_TEST_LEVELS": json.dumps(levels)}


def preempted(run):
    """Preempt a training that stays in step 6, and return its last line."""
    os.kill(run.pid(), signal.SIGTERM)
    assert run.process.wait(EXIT_S) == 143
    run.end()
    [line] = [line for line in run.lines if "ended this training" in line]
    return line


@pytest.fixture
def silent():
    with silent_server() as url:
        yield url


@pytest.mark.parametrize("first", ["a file", "a silent server"])
def test_where_the_first_level_fails_the_fastest_one_that_works_is_enough(trainings, tmp_path, silent, first):
    url = silent
    if first == "a file":
        broken = tmp_path / "broken"
        broken.write_text("a file where the level's directory would be")
        url = str(broken)
    works = str(tmp_path / "works")
    levels = with_levels({"url": url, "timeout_s": 0.5, **RARELY}, {"url": works, **RARELY})
    run = trainings.start("plain", "step", "6", **levels, **AMPLE)
    run.await_line("step 6")
    assert preempted(run).endswith(f"in step 6; step 5 is durable at {works}")


def test_a_first_level_that_fails_from_the_signal_on_is_replaced_by_the_next_one(trainings, tmp_path):
    lost, works = tmp_path / "lost", tmp_path / "works"
    levels = with_levels({"url": str(lost), "every_n_steps": 1}, {"url": str(works), **RARELY})
    run = trainings.start("plain", "step", "6", **levels, **AMPLE)
    run.await_line("step 6")
    until(lambda: lost.exists() and files_below(lost, "*.json"))
    lost.rename(tmp_path / "moved")
    lost.write_text("a file where the level's directory was")
    assert preempted(run).endswith(f"in step 6; step 5 is durable at {works}")


def test_a_second_level_whose_writes_do_not_end_holds_up_nothing(trainings, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    # Its first write is not slowed down, the next one takes hours.
    slow = {"url": str(second), "max_bytes_per_s": 1, "every_n_steps": 1}
    run = trainings.start("plain", "step", "6", **with_levels({"url": str(first), "every_n_steps": 1}, slow), **AMPLE)
    run.await_line("step 6")
    until(lambda: second.exists() and files_below(second, "*.json"))
    assert preempted(run).endswith(f"in step 6; step 5 is durable at {first}")


def test_while_the_first_level_works_no_faster_one_counts_instead(trainings, tmp_path):
    """Each node stores its own copy at the second level. It does not copy from the first, which takes seconds."""
    slow, quick = tmp_path / "slow", tmp_path / "quick-{rank}"
    levels = with_levels(
        {"url": str(slow), "max_bytes_per_s": 8000, "every_n_steps": 1},
        {"url": str(quick), **RARELY},
    )
    run = trainings.start_ranks("collective", "6", LAZYSNAP_TEST_NODES="1", **levels, **AMPLE)
    run.await_line("collective 6")
    # The first write is not slowed down, those behind it are.
    until(lambda: slow.exists() and files_below(slow, "*.json"))
    os.kill(run.worker("rank 0"), signal.SIGTERM)
    run.end()
    lines = [line for line in run.lines if "ended this training" in line]
    assert len(lines) == 2, run.lines
    assert all(line.endswith(f"; step 5 is durable at {slow}") for line in lines)
