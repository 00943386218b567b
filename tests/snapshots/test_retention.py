"""The one rule of what may be deleted at a level."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazysnap.core.messages import StepKey
from lazysnap.core.retention import Retention

KEYS = st.sets(st.builds(StepKey, st.integers(1, 3), st.integers(0, 60)))
RULES = st.builds(Retention, st.integers(1, 5), st.none() | st.integers(1, 50))


def kept(keys, rule, counted):
    """Complete snapshots that stay, oldest first. ``counted``: those that are newer and sound."""

    def goes(key):
        return rule.is_expired(key.step, sum(other > key for other in counted))

    return [key for key in sorted(keys) if not goes(key)]


@given(KEYS, RULES)
def test_of_the_complete_ones_the_last_and_the_milestones_stay(complete, rule):
    stay = kept(complete, rule, complete)

    last = sorted(complete)[-rule.keep_last :]
    assert set(stay) == {key for key in complete if key in last or rule.stays_for_ever(key.step)}
    assert kept(stay, rule, stay) == stay


@pytest.mark.slow
@given(KEYS, RULES, st.data())
def test_nothing_goes_in_favour_of_what_does_not_count(complete, rule, data):
    sound = data.draw(st.sets(st.sampled_from(sorted(complete)))) if complete else set()

    stay = kept(complete, rule, sound)

    assert len(sound.intersection(stay)) >= min(rule.keep_last, len(sound))
    if len(sound) < rule.keep_last:
        assert stay == sorted(complete)


@given(KEYS, KEYS, RULES)
def test_what_no_order_lists_stays_until_all_that_are_listed_push_it_out(keys, complete, rule):
    """A keeper that does not know all complete ones deletes none of those that may be complete."""
    for key in keys - complete:
        num_newer = sum(other > key for other in complete)
        if rule.may_delete(key, complete, cancelled=()):
            assert num_newer >= rule.keep_last
            assert not rule.stays_for_ever(key.step)
        assert rule.may_delete(key, complete, cancelled=[key])
