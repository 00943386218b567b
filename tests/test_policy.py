"""Which captures a level takes, and which snapshots it may delete."""

from hypothesis import given
from hypothesis import strategies as st

from lazysnap.config import PersistentLevel
from lazysnap.policy import expired, is_due

STEPS = st.lists(st.integers(0, 1000), max_size=30)


def test_one_rank_takes_the_newest_when_enough_steps_have_passed():
    level = PersistentLevel("/x", every_n_steps=10)

    assert [step for step in range(1, 30) if is_due(level, step, None)] == list(range(1, 30))
    assert not is_due(level, 12, 3)
    assert is_due(level, 13, 3)
    assert is_due(level, 2, 3)  # a run that started again


def test_many_ranks_ask_nothing_but_the_step():
    level = PersistentLevel("/x", every_n_steps=10)

    for last in (None, 3, 10, 500):
        assert [step for step in range(1, 31) if is_due(level, step, last, world_size=2)] == [10, 20, 30]


def test_a_step_that_retention_asks_for_is_always_due():
    level = PersistentLevel("/x", every_n_steps=100, keep_every_n_steps=30)

    assert is_due(level, 60, 59)
    assert is_due(level, 60, None, world_size=4)
    assert not is_due(level, 61, 60)


@given(STEPS, st.integers(1, 5), st.none() | st.integers(1, 50), st.sets(st.integers(0, 1000)))
def test_what_is_kept(steps, last, every, protected):
    level = PersistentLevel("/x", keep_last=last, keep_every_n_steps=every)

    gone = expired(steps, level, sound=steps, protected=protected)

    kept = sorted(set(steps) - set(gone))
    assert kept[-last:] == sorted(set(steps))[-last:]
    assert all(step in kept for step in steps if (every and step % every == 0) or step in protected)
    assert set(gone) <= set(steps)
    assert expired(kept, level, sound=kept, protected=protected) == []


@given(STEPS, st.integers(1, 5), st.data())
def test_what_was_not_read_back_whole_does_not_count(steps, last, data):
    level = PersistentLevel("/x", keep_last=last)
    sound = data.draw(st.sets(st.sampled_from(steps))) if steps else set()

    gone = expired(steps, level, sound=sound)

    kept = set(steps) - set(gone)
    assert len(kept & sound) >= min(last, len(sound))
    if len(sound) < last:
        assert gone == []
