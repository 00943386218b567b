"""A keeper ends, and begins with another start, when names are given and old snapshots are gone."""

import threading

import pytest
from support.node_rig import STARTS, check, names_at, steps_at
from support.waiting import until

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.events import NameFailed
from lazysnap.keeper import node_storage


@pytest.fixture
def level(tmp_path):
    return PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=1)


@pytest.fixture
def rig(rig, level):
    return rig(level)


@pytest.fixture
def held(monkeypatch):
    """``held(place)``: whoever passes there stands still until ``let_go``."""

    class Held:
        def __init__(self):
            self.place, self.is_there, self.let_go = "", threading.Event(), threading.Event()

        def __call__(self, place):
            self.place = place

        def point(self, name):
            if name == self.place:
                self.is_there.set()
                assert self.let_go.wait(60)

    held = Held()
    monkeypatch.setattr(faults, "point", held.point)
    monkeypatch.setattr(node_storage, "_MOVING_S", 600.0)  # on a busy machine it stands longer than a slot is held
    yield held
    held.let_go.set()


def test_a_keeper_is_idle_when_names_are_given(rig, level, held):
    assert rig.store() == 2
    assert until(rig.storages[0].is_idle)

    held("level.local.rename")
    rig.storages[0].keep("mine", 2)
    assert not rig.storages[0].is_idle()
    assert held.is_there.wait(60)
    assert not rig.storages[0].is_idle()

    held.let_go.set()
    assert until(rig.storages[0].is_idle)
    assert names_at(level) == {2: ("mine",)}


def test_a_keeper_is_idle_when_old_snapshots_are_gone(rig, level, held):
    assert rig.store() == 2
    held("level.store.uncommitted")
    assert rig.store() == 4
    assert held.is_there.wait(60)
    assert not rig.storages[0].is_idle()

    held.let_go.set()
    assert until(rig.storages[0].is_idle)
    assert steps_at(level) == [4]


@pytest.fixture
def named(rig, held):
    """Step 2 has a name, and stands still before it is stored until ``let_go``."""
    held("level.store.begin")
    assert rig.train() == 2
    rig.storages[0].keep("mine", 2)
    assert held.is_there.wait(60)
    return held.let_go


def stored(rig, level):
    """Train until a step of the new start is complete. The words in the slots may be of the start before at first."""
    rig.train_until(lambda: rig.complete(level))


def test_a_snapshot_that_was_named_just_before_a_start_is_stored_and_named_before_others_are(rig, level, named):
    rig.begin(STARTS[1], follows=True)
    for step in (1, 3, 5):
        rig.capture(step)
    named.set()

    assert until(lambda: names_at(level).get(2) == ("mine",))
    stored(rig, level)
    assert until(lambda: steps_at(level) == sorted({2, rig.complete(level)[-1]}))
    check(level, 2)


def test_names_that_come_too_late_for_a_start_are_said_to_be_lost_and_no_others(rig, level, held, monkeypatch):
    monkeypatch.setattr(node_storage, "_NAMES_S", 0.0)
    assert rig.store() == 2
    rig.storages[0].keep("given", 2)
    assert until(lambda: names_at(level) == {2: ("given",)})
    held("level.store.begin")
    assert rig.train() == 4
    first = rig.told_to[0]
    rig.storages[0].keep("mine", 4)
    assert held.is_there.wait(60)

    rig.begin(STARTS[1], follows=True)

    assert until(lambda: any(isinstance(event, NameFailed) for event in list(first)))
    held.let_go.set()
    stored(rig, level)
    assert [event.name for event in first if isinstance(event, NameFailed)] == ["mine"]
    assert 2 in steps_at(level)


def test_the_name_of_a_start_outlives_two_more_starts_and_no_capture_is_left_out_meanwhile(rig, level, named):
    for start in STARTS[1:3]:
        rig.begin(start, follows=True)
        for step in range(1, 8):
            rig.capture(step)  # waits for a slot, and fails if none is free
    named.set()

    assert until(lambda: names_at(level).get(2) == ("mine",))
    stored(rig, level)
    assert until(lambda: steps_at(level) == sorted({2, rig.complete(level)[-1]}))


def test_a_name_that_is_taken_away_is_not_given_by_the_start_before(rig, level, named):
    rig.begin(STARTS[1], follows=True)
    rig.storages[0].release("mine")
    named.set()

    stored(rig, level)
    assert until(lambda: rig.storages[0].is_idle())
    assert not any(names_at(level).values())
    assert until(lambda: steps_at(level) == rig.complete(level)[-1:])


def test_a_name_whose_capture_is_gone_holds_up_no_start(rig, level, named):
    """Of two that must be stored memory keeps one; the other is overwritten by the next start."""
    rig.capture(3)
    rig.storages[0].keep("second", 3)

    rig.begin(STARTS[1], follows=True)
    for step in range(1, 8):
        rig.capture(step)
    named.set()

    stored(rig, level)
    assert "second" not in {name for names in names_at(level).values() for name in names}


def test_a_name_whose_capture_was_overwritten_is_said_to_be_lost_once(rig, level, named):
    rig.capture(3)
    rig.storages[0].keep("second", 3)
    for step in range(4, 8):
        rig.capture(step)
    named.set()

    assert until(lambda: rig.told(NameFailed))
    stored(rig, level)
    assert [(event.name, event.is_lost) for event in rig.told(NameFailed)] == [("second", True)]
    assert until(lambda: names_at(level).get(2) == ("mine",))
