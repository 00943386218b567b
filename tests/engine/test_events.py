"""What is new in a keeper's state is counted once, and trouble is told once until it is over."""

import pytest
from msgspec import structs

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.core.messages import KeeperAlert, KeeperState, LevelState, StepKey
from lazysnap.engine.keeper_events import KeeperEvents
from lazysnap.engine.messages import MessageKind, Messages
from lazysnap.engine.statistics import Statistics

START = 7


def said(caplog):
    return [" ".join(record.getMessage().split()[:3]) for record in caplog.records if record.levelname == "WARNING"]


class Follower:
    """Takes one state after the other of a keeper with one level."""

    def __init__(self, *, speaks_for_node=True, pid=1, **interval):
        config = SnapshotConfig(levels=(PersistentLevel("/disk", **interval),))
        self.statistics = Statistics()
        self.now_s = 0.0
        messages = Messages(self.statistics, speaks_for_node=speaks_for_node, clock=lambda: self.now_s)
        self.events = KeeperEvents(config, messages)
        self.events.begin(START)
        self.level = LevelState()
        self.state = KeeperState(pid=pid, levels=(self.level,))
        self.pid = pid
        self.is_silent = False

    def look(self):
        self.events.compare(self.state, self.pid, is_silent=self.is_silent)

    def level_says(self, **changes):
        self.level = structs.replace(self.level, **changes)
        self.says(levels=(self.level,))

    def says(self, **changes):
        self.state = structs.replace(self.state, **changes)
        self.look()

    def completes(self, *steps, start=START):
        keys = tuple(StepKey(start, step) for step in steps)
        self.level_says(complete=(*self.level.complete, *keys), failure="", failed_step=None)

    def fails(self, step, text):
        self.level_says(failure=text, failed_step=step, num_failures=self.level.num_failures + 1)

    def next_keeper(self, **state):
        self.pid = None
        self.look()
        self.pid = self.state.pid + 1
        self.level = LevelState()
        self.state = KeeperState(pid=self.pid, levels=(self.level,), **state)
        self.look()


def test_a_level_that_fails_is_told_once_and_once_that_it_works_again(caplog):
    follower = Follower(every_n_steps=1)

    for step in range(1, 6):
        follower.fails(step, "read back damaged")
    assert said(caplog) == ["/disk cannot store"]

    follower.completes(6)
    follower.completes(7)
    assert said(caplog) == ["/disk cannot store", "/disk works again:"]
    assert follower.statistics.level_failures == {"/disk": 5}


def test_failures_between_two_looks_are_all_counted():
    follower = Follower()

    follower.level_says(failure="full", failed_step=9, num_failures=4)
    follower.level_says(failure="no answer", failed_step=None, num_failures=6)

    assert follower.statistics.level_failures == {"/disk": 6}


def test_a_level_that_cannot_even_be_listed_is_told_without_a_step(caplog):
    follower = Follower()

    follower.level_says(failure="/disk: no answer")
    follower.level_says(failure="/disk: still no answer")
    follower.completes(1)

    assert said(caplog) == ["/disk cannot store", "/disk works again:"]
    assert follower.statistics.level_failures == {}


def test_of_what_all_ranks_of_a_node_hear_alike_one_warns(caplog):
    caplog.set_level("INFO")
    ranks = [Follower(speaks_for_node=rank == 0) for rank in range(3)]
    for follower in ranks:
        follower.fails(1, "full")
        alerts = (KeeperAlert("links", "no link"), KeeperAlert("protection", "alone"))
        follower.says(alerts=alerts)
        follower.says(alerts=())
        follower.completes(2)

    assert len(said(caplog)) == 6
    assert len([record for record in caplog.records if record.levelname == "INFO"]) == 12
    assert all(follower.statistics.level_failures == {"/disk": 1} for follower in ranks)


def test_of_stored_steps_all_are_counted_and_the_newest_is_the_newest_in_any_order():
    follower = Follower(every_n_steps=10)

    for step in (10, 30, 40, 33):
        follower.completes(step)

    assert follower.statistics.persisted == {"/disk": 4}
    assert follower.statistics.last_durable_step == {"/disk": 40}


def test_after_going_back_only_what_comes_behind_that_step_counts():
    follower = Follower(every_n_steps=1)
    follower.completes(9)

    follower.events.begin(START + 1)
    follower.completes(6, start=START + 1)

    assert follower.statistics.persisted == {"/disk": 2}
    assert follower.statistics.last_durable_step == {"/disk": 6}


def test_snapshots_of_earlier_starts_are_not_of_this_one():
    follower = Follower()

    follower.completes(8, start=START - 1)

    assert follower.statistics.persisted == {}
    assert follower.statistics.last_durable_step == {}


def test_what_one_keeper_counted_is_not_counted_again_from_the_next(caplog):
    follower = Follower()
    follower.completes(1, 2)
    follower.fails(3, "full")

    follower.next_keeper()
    follower.completes(1, 2)
    follower.completes(4)
    follower.fails(5, "full")

    assert follower.statistics.persisted == {"/disk": 3}
    assert follower.statistics.level_failures == {"/disk": 2}
    assert follower.statistics.keepers_lost == 1


def test_a_lost_keeper_is_told_once_also_if_the_next_one_is_there_already(caplog):
    follower = Follower()
    follower.look()

    follower.state = KeeperState(pid=2)
    follower.pid = 2
    follower.look()
    follower.look()

    assert said(caplog) == ["the keeper is"]
    assert follower.statistics.keepers_lost == 1


def test_a_keeper_that_does_not_answer_is_told_and_that_it_answers_again(caplog):
    follower = Follower()

    for is_silent in (False, True, True, False):
        follower.is_silent = is_silent
        follower.look()

    assert said(caplog) == ["the keeper of", "the keeper (process"]


def test_an_alert_that_the_next_keeper_does_not_know_is_not_told_as_over(caplog):
    follower = Follower()
    follower.says(alerts=(KeeperAlert("links", "no link"),))

    follower.next_keeper()
    follower.says(alerts=(KeeperAlert("links", "no link"),))
    follower.says(alerts=())

    assert said(caplog) == ["nothing new is", "the keeper is", "nothing new is", "the keepers of"]


@pytest.mark.parametrize("about", ["links", "protection"])
def test_an_alert_that_lasts_is_told_again_after_a_minute_and_every_ten_and_no_more_once_it_is_over(about, caplog):
    follower = Follower()
    follower.says(alerts=(KeeperAlert(about, "no link"), KeeperAlert("keeper", "a log is full")))
    counts = []

    for now_s in (1.0, 59.0, 60.0, 61.0, 659.0, 660.0):
        follower.now_s = now_s
        follower.look()
        counts.append(len(caplog.messages))
    assert counts == [2, 2, 3, 3, 3, 4]

    follower.says(alerts=())
    assert len(caplog.messages) == 5  # it is over
    follower.now_s = 3000.0
    follower.look()
    assert len(caplog.messages) == 5


def test_an_alert_whose_text_changes_is_told_at_once_and_again_after_ten_minutes(caplog):
    follower = Follower()
    follower.says(alerts=(KeeperAlert("links", "no link to node 1"),))

    follower.now_s = 500.0
    follower.says(alerts=(KeeperAlert("links", "no link to node 2"),))
    follower.now_s = 1099.0
    follower.look()
    assert len(caplog.messages) == 2

    follower.now_s = 1100.0
    follower.look()
    assert "no link to node 2" in caplog.messages[2]


def test_protected_steps_are_counted_and_forgotten_with_the_keeper_that_has_the_parity():
    follower = Follower()
    follower.says(protected=StepKey(START, 6))
    follower.says(protected=StepKey(START, 9))
    assert follower.statistics.last_protected_step == 9
    assert follower.statistics.protected == 2

    follower.pid = None
    follower.look()
    assert follower.statistics.last_protected_step is None

    follower.pid = 1  # the same keeper: only the connection was lost
    follower.look()
    assert follower.statistics.last_protected_step == 9


def test_what_was_protected_of_an_earlier_start_does_not_count():
    follower = Follower()

    follower.says(protected=StepKey(START - 1, 6))

    assert follower.statistics.last_protected_step is None
    assert follower.statistics.protected == 0


def test_an_alert_of_a_kind_that_nobody_foresaw_warns_and_ends_no_training(caplog):
    follower = Follower()

    follower.says(alerts=(KeeperAlert("weather", "it rains"),))
    follower.says(alerts=())

    assert caplog.messages == ["it rains"]


@pytest.mark.parametrize(
    ("event", "kind"), [(MessageKind.TORN, None), (MessageKind.FAILED, None), (MessageKind.NOT_CAPTURED, ValueError)]
)
def test_captures_that_fail_again_and_again_are_told_again_after_a_minute_and_every_ten(event, kind, caplog):
    """What failed first may be harmless, and what comes hours later may be the end of all captures."""
    now_s = 0.0
    messages = Messages(Statistics(), clock=lambda: now_s)
    told = []
    for now_s in (0.0, 59.0, 60.0, 61.0, 659.0, 660.0, 9000.0):
        caplog.clear()
        messages.tell(event, step=int(now_s), kind=kind, text="no answer")
        told.append(len(caplog.messages))

    assert told == [1, 0, 1, 0, 0, 1, 1]
