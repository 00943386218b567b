"""What is told of a level that fails, and works again: once each."""

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.engine.events import EventLog
from lazysnap.engine.statistics import Statistics
from lazysnap.keeper.protocol import Complete, Durable, LevelFailed


def said(caplog):
    return [" ".join(record.getMessage().split()[:3]) for record in caplog.records if record.levelname == "WARNING"]


def log_of(every=1):
    return EventLog(SnapshotConfig(levels=(PersistentLevel("/disk", every_n_steps=every),)), Statistics())


def complete(*steps):
    return Complete("/disk", list(steps), "s1")


def test_a_level_that_fails_is_told_once_and_once_that_it_works_again(caplog):
    log = log_of()

    log.drain([LevelFailed("/disk", step, "read back damaged") for step in range(1, 6)])
    assert said(caplog) == ["step 1 is"]

    log.drain([Durable("/disk", 6, 100, 0.1), complete(6), complete(7)])
    assert said(caplog) == ["step 1 is", "/disk works again:"]
    assert log.statistics.level_failures == {"/disk": 5}


def test_steps_that_were_due_between_two_that_are_stored_count_as_left_out():
    log = log_of(every=10)

    log.drain([complete(10), complete(30), complete(33), complete(40)])

    assert log.statistics.persisted == {"/disk": 4}
    assert log.statistics.dropped == {"/disk": 1}
    assert log.statistics.last_durable_step == {"/disk": 40}


def test_after_going_back_only_what_comes_behind_that_step_counts():
    log = log_of()
    log.drain([complete(9)])

    log.begin(4)
    log.drain([complete(6)])

    assert log.statistics.dropped == {"/disk": 8 + 1}
    assert log.statistics.last_durable_step == {"/disk": 6}
