"""Which slot is written over, which captures stay, and how many slots that takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazysnap.memory.slot_choice import (
    SlotPhase,
    SlotView,
    choose_slot,
    is_untouchable,
    kept_whole,
    slots_needed,
    surplus_slots,
)

WHOLE, CAPTURING, EMPTY, VOID = SlotPhase.WHOLE, SlotPhase.CAPTURING, SlotPhase.EMPTY, SlotPhase.VOID


def view(sequence, phase=WHOLE, *, is_held=False, capacity_bytes=100):
    step = None if phase is EMPTY else sequence
    return SlotView(sequence, 100, capacity_bytes, phase, step, 1, sequence, 0, 0, 0, None, is_held)


def chosen(views, kept, busy=()):
    choice = choose_slot(views, kept, image_bytes=100, meta_bytes=100, busy=busy)
    return None if choice is None else choice.sequence


SEQUENCES = st.integers(0, 9)
VIEWS = st.builds(view, SEQUENCES, st.sampled_from(SlotPhase), is_held=st.booleans())
RANKS = st.lists(VIEWS, min_size=1, max_size=6, unique_by=lambda view: view.sequence)


@given(RANKS, st.integers(1, 3), st.sets(SEQUENCES))
def test_a_held_a_busy_and_the_newest_whole_slots_are_never_chosen(views, kept, busy):
    newest = sorted(view.sequence for view in views if view.phase is WHOLE)[-kept:]
    allowed = []
    for view in views:
        if not view.is_held and view.sequence not in busy and view.sequence not in newest:
            allowed.append(view)
    incomplete = [view for view in allowed if view.phase is not WHOLE]

    sequence = chosen(views, kept, busy)

    # What is not whole is worth nothing and goes first; then the oldest.
    assert sequence == min((view.sequence for view in incomplete or allowed), default=None)


@given(RANKS, st.integers(1, 3))
def test_what_the_keeper_may_hold_is_not_chosen_before_newer_captures_are_whole(views, kept):
    for view in views:
        if view.phase is WHOLE and is_untouchable(view, views, kept):
            assert chosen([view for view in views if not view.is_held], kept) != view.sequence


def test_what_is_being_copied_may_be_held_and_what_is_torn_or_older_may_not():
    views = [view(7), view(8), view(9, CAPTURING), view(6), view(5, CAPTURING), view(4, VOID), view(3, EMPTY)]

    assert [one.sequence for one in views if is_untouchable(one, views, kept=2)] == [7, 8, 9]
    assert [one.sequence for one in views if is_untouchable(one, views, kept=1)] == [8, 9]


def test_a_slot_that_is_too_small_is_not_chosen_and_its_capture_counts():
    views = [view(7, capacity_bytes=99), view(8), view(6, capacity_bytes=99), view(5)]

    assert chosen(views, kept=2) == 5
    assert chosen(views[:3], kept=1) is None
    assert choose_slot([view(5, EMPTY)], 1, image_bytes=1, meta_bytes=101) is None


def test_slots_are_freed_that_could_be_chosen_and_are_not_needed():
    views = [view(1), view(2), view(3), view(4), view(5), view(6, CAPTURING)]

    def freed(fitting, count, **busy):
        return [one.sequence for one in surplus_slots(views, 2, fitting=fitting, count=count, **busy)]

    assert freed({1, 2, 3, 4, 5, 6}, 4) == [1, 2]
    assert freed({1, 2, 3, 4, 5, 6}, 6) == []
    assert freed({2, 3, 4}, 4) == [1]
    assert freed({2, 3}, 2, busy={1}) == []
    assert freed(set(), 4) == [1, 2, 3]


@pytest.mark.parametrize(
    ("every_n_steps", "world_size", "runs_ahead", "kept"),
    [(1, 1, False, 1), (1, 1, True, 1), (2, 8, False, 1), (1, 8, False, 2), (2, 8, True, 2), (1, 8, True, 3)],
)
def test_one_capture_that_all_ranks_have_stays(every_n_steps, world_size, runs_ahead, kept):
    assert kept_whole(every_n_steps, world_size, runs_ahead=runs_ahead) == kept
    assert slots_needed(kept, is_read=False) == kept + 1
    assert slots_needed(kept, is_read=True) == kept + 2
