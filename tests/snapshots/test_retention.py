"""The one rule of what may be deleted at a level."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazysnap.core.messages import LevelSettings, StepKey
from lazysnap.core.retention import is_expired, may_delete, stays_for_ever

KEYS = st.sets(st.builds(StepKey, st.integers(1, 3), st.integers(0, 60)))
LEVELS = st.builds(
    LevelSettings,
    st.just("level"),
    keep_last=st.integers(1, 5),
    keep_every_n_steps=st.none() | st.integers(1, 50),
)


def kept(keys, level, counted):
    """Complete snapshots that stay, oldest first. ``counted``: those that are newer and sound."""

    def goes(key):
        return is_expired(key.step, level, sum(other > key for other in counted))

    return [key for key in sorted(keys) if not goes(key)]


@given(KEYS, LEVELS)
def test_of_the_complete_ones_the_last_and_the_milestones_stay(complete, level):
    stay = kept(complete, level, complete)

    last = sorted(complete)[-level.keep_last :]
    assert set(stay) == {key for key in complete if key in last or stays_for_ever(key.step, level)}
    assert kept(stay, level, stay) == stay


@pytest.mark.slow
@given(KEYS, LEVELS, st.data())
def test_nothing_goes_in_favour_of_what_does_not_count(complete, level, data):
    sound = data.draw(st.sets(st.sampled_from(sorted(complete)))) if complete else set()

    stay = kept(complete, level, sound)

    assert len(sound.intersection(stay)) >= min(level.keep_last, len(sound))
    if len(sound) < level.keep_last:
        assert stay == sorted(complete)


@given(KEYS, KEYS, LEVELS)
def test_what_no_order_lists_stays_until_all_that_are_listed_push_it_out(keys, complete, level):
    """A keeper that does not know all complete ones deletes none of those that may be complete."""
    for key in keys - complete:
        num_newer = sum(other > key for other in complete)
        if may_delete(key, level, complete, cancelled=()):
            assert num_newer >= level.keep_last
            assert not stays_for_ever(key.step, level)
        assert may_delete(key, level, complete, cancelled=[key])
