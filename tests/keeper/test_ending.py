"""A keeper ends when names are given and old snapshots are gone; a start does not wait for names of the one before."""

import threading

import pytest
from support.node_rig import STARTS, names_at, steps_at
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
    """Train until a step of the start is complete. The words in the slots may be of the start before at first."""
    rig.train_until(lambda: rig.complete(level))


def test_a_name_whose_snapshot_was_not_stored_before_the_next_start_is_on_none(rig, level, named):
    rig.begin(STARTS[1], follows=True)
    for step in range(1, 8):
        rig.capture(step)  # waits for a slot, and fails if none is free
    named.set()

    stored(rig, level)
    assert until(lambda: rig.storages[0].is_idle())
    assert not any(names_at(level).values())


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
