"""What is told of a level that fails, and works again: once each."""

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.engine.events import KeeperEvents
from lazysnap.engine.messages import Messages
from lazysnap.engine.protection import Protection
from lazysnap.engine.statistics import Statistics
from lazysnap.events import Alert, Complete, LevelFailed, NameFailed, Protected, Stored
from lazysnap.keeper.events import KeeperLost


def said(caplog):
    return [" ".join(record.getMessage().split()[:3]) for record in caplog.records if record.levelname == "WARNING"]


def events_of(every=1, *, speaks_for_node=True):
    config = SnapshotConfig(levels=(PersistentLevel("/disk", every_n_steps=every),))
    statistics = Statistics()
    messages = Messages(statistics, speaks_for_node=speaks_for_node)
    return KeeperEvents(config, messages, Protection(config, messages)), statistics


def complete(*steps):
    return Complete(t=0.0, level="/disk", steps=list(steps), start="s1")


def failed(step, text):
    return LevelFailed(t=0.0, level="/disk", step=step, text=text)


def alert(about, text):
    return Alert(t=0.0, about=about, text=text)


def test_a_level_that_fails_is_told_once_and_once_that_it_works_again(caplog):
    events, statistics = events_of()

    events.take([failed(step, "read back damaged") for step in range(1, 6)])
    assert said(caplog) == ["step 1 is"]

    times = {"seconds": 0.1, "checksum_s": 0.0, "read_back_s": 0.0}
    events.take([Stored(t=0.0, level="/disk", step=6, bytes=100, **times), complete(6), complete(7)])
    assert said(caplog) == ["step 1 is", "/disk works again:"]
    assert statistics.level_failures == {"/disk": 5}


def test_of_what_all_ranks_of_a_node_hear_alike_one_warns(caplog):
    caplog.set_level("INFO")
    alerts = [alert("links", "no link"), alert("protection", "alone")]
    told = [failed(1, "full"), *alerts, NameFailed(t=0.0, level="/disk", name="x", text="-")]
    ranks = [events_of(speaks_for_node=rank == 0) for rank in range(3)]
    for events, _ in ranks:
        events.take([*told, alert("links", ""), alert("protection", ""), complete(2)])

    assert len(said(caplog)) == 7
    assert len([record for record in caplog.records if record.levelname == "INFO"]) == 14
    assert all(statistics.level_failures == {"/disk": 1} for _, statistics in ranks)


def test_steps_that_were_due_between_two_that_are_stored_count_as_left_out():
    events, statistics = events_of(every=10)

    events.take([complete(10), complete(30), complete(33), complete(40)])

    assert statistics.persisted == {"/disk": 4}
    assert statistics.dropped == {"/disk": 1}
    assert statistics.last_durable_step == {"/disk": 40}


def test_after_going_back_only_what_comes_behind_that_step_counts():
    events, statistics = events_of()
    events.take([complete(9)])

    events.begin(4)
    events.take([complete(6)])

    assert statistics.dropped == {"/disk": 8 + 1}
    assert statistics.last_durable_step == {"/disk": 6}


def test_a_step_is_not_protected_any_more_once_the_keeper_with_its_parity_is_gone():
    events, statistics = events_of()
    events.take([Protected(t=0.0, step=6, start="s1")])
    assert statistics.last_protected_step == 6

    events.take([KeeperLost()])
    assert statistics.last_protected_step is None


def test_a_level_that_fails_after_training_does_not_say_that_training_goes_on(caplog):
    events, _ = events_of()
    events.is_training = False

    events.take([failed(3, "full")])

    assert [record.getMessage() for record in caplog.records] == ["step 3 is not persisted: full"]


def test_an_alert_of_a_kind_that_nobody_foresaw_warns_and_ends_no_training(caplog):
    events, _ = events_of()

    events.take([alert("weather", "it rains")])

    assert "it rains" in caplog.text
