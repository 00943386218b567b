"""The one rule of what may be deleted at a level."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazysnap.config import PersistentLevel
from lazysnap.grants.coordinator import LevelGrants
from lazysnap.grants.messages import MAX_TOLD, StepKey
from lazysnap.grants.node import NodeLevel
from lazysnap.grants.retention import Retention, is_milestone, may_go
from lazysnap.resolver import SnapshotKey

KEYS = st.sets(st.builds(SnapshotKey, st.just("run"), st.integers(0, 60), st.sampled_from("ab"), st.just(1)))
LEVELS = st.builds(
    lambda last, every: PersistentLevel("/x", keep_last=last, keep_every_n_steps=every),
    st.integers(1, 5),
    st.none() | st.integers(1, 50),
)
STEPS = st.sets(st.integers(0, 60), max_size=5)


def kept(keys, level, counted, complete, protected=()):
    """Oldest first."""

    def goes(key):
        newer = sum(other > key for other in counted)
        return may_go(level, key.step, newer, is_complete=key in complete, protected=protected)

    return [key for key in sorted(keys) if not goes(key)]


@given(KEYS, LEVELS, STEPS)
def test_of_the_complete_ones_the_last_the_milestones_and_the_protected_stay(complete, level, protected):
    stay = kept(complete, level, complete, complete, protected)

    last = sorted(complete)[-level.keep_last :]
    assert set(stay) == {
        key for key in complete if key in last or is_milestone(level, key.step) or key.step in protected
    }
    assert kept(stay, level, stay, complete, protected) == stay


@given(KEYS, KEYS, LEVELS, STEPS)
def test_an_incomplete_one_stays_until_a_newer_one_is_complete(keys, complete, level, protected):
    incomplete = keys - complete
    newest = max(complete, default=None)

    stay = kept(incomplete, level, complete, complete, protected)

    assert set(stay) == {key for key in incomplete if newest is None or key > newest or key.step in protected}


@pytest.mark.slow
@given(KEYS, LEVELS, st.data())
def test_nothing_goes_in_favour_of_what_does_not_count(complete, level, data):
    sound = data.draw(st.sets(st.sampled_from(sorted(complete)))) if complete else set()

    stay = kept(complete, level, sound, complete)

    assert len(sound.intersection(stay)) >= min(level.keep_last, len(sound))
    if len(sound) < level.keep_last:
        assert stay == sorted(complete)


def test_a_keeper_that_knows_the_newest_steps_and_a_named_one_deletes_none_of_those_between_that_stay():
    """A new keeper: of a level that keeps more than an order lists it does not know all that are complete."""
    settings = PersistentLevel("/x", keep_last=MAX_TOLD + 50)
    coordinator, node = LevelGrants(settings, is_open=True), NodeLevel(is_open=True)
    steps = range(1, 401)
    for step in steps:
        coordinator.publish(step)
    node.learn(coordinator.order("s1", {10}, is_ready=True))

    keys = [StepKey(step, "s1") for step in steps]
    stay = [key.step for key in keys if not Retention(settings, "s1").is_over(key, node, {10})]

    assert {10, *steps[-settings.keep_last :]} <= set(stay)
