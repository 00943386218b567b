"""Which level does what next, without processes."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from lazysnap.arena import SlotPhase, SlotStatus
from lazysnap.config import PersistentLevel
from lazysnap.keeper.schedule import (
    Committed,
    LaneState,
    enqueue,
    head,
    is_asked_for,
    most_waiting,
    next_queued,
    queued,
    slot_for,
    stale_pins,
    takes,
)
from lazysnap.resolver import Entry


def slot(sequence, phase=SlotPhase.WHOLE, *, pinned=False):
    return SlotStatus(phase, sequence, sequence, 10, 10, pinned, True)


def lanes(*every, world_size=1, **settings):
    levels = [PersistentLevel(f"/{number}", every_n_steps=n, **settings) for number, n in enumerate(every)]
    return [LaneState(level, world_size) for level in levels]


def item(sequence, level=0):
    entry = Entry(f"/{level}", level, "r", "s", sequence, 0, 1, f"step-{sequence}")
    return Committed(sequence, entry, None, level)


def choose(state, index, statuses, *, force=False, named=()):
    return slot_for(state, index, statuses, force=force, named=named)


def test_pinned_captures_are_persisted_newest_first_and_once():
    state = lanes(1)
    statuses = [slot(3, pinned=True), slot(5, SlotPhase.CAPTURING, pinned=True), slot(6)]

    assert choose(state, 0, statuses) == 1
    state[0].note_tried(5)
    assert choose(state, 0, statuses) == 0
    state[0].note_tried(3)
    assert choose(state, 0, statuses) is None


def test_forced_persistence_takes_the_newest_whole_capture_once():
    state = lanes(1)
    statuses = [slot(3), slot(6), slot(7, SlotPhase.VOID)]

    assert choose(state, 0, statuses, force=True) == 1
    state[0].note_tried(6)
    assert choose(state, 0, statuses, force=True) is None


def test_of_several_ranks_that_died_each_writes_all_that_is_whole_in_order():
    state = [LaneState(PersistentLevel("/0", every_n_steps=100), world_size=2)]
    statuses = [slot(3), slot(6), slot(7, SlotPhase.VOID), slot(5)]

    written = []
    while (chosen := choose(state, 0, statuses, force=4)) is not None:
        written.append(statuses[chosen].sequence)
        state[0].note_tried(written[-1])

    assert written == [3, 5, 6]


def test_slower_levels_leave_the_slots_to_the_fastest_that_works():
    state = lanes(1, 1, 1)
    statuses = [slot(3, pinned=True)]

    assert [choose(state, index, statuses) for index in range(3)] == [0, None, None]
    state[0].failing = True
    # The failed one tries again beside the one that stands in: so it comes back by itself.
    assert [choose(state, index, statuses) for index in range(3)] == [0, 0, None]
    state[1].failing = True
    assert [choose(state, index, statuses) for index in range(3)] == [0, 0, 0]
    state[2].failing = True
    assert [choose(state, index, statuses) for index in range(3)] == [0, 0, 0]


def test_a_level_that_stands_in_keeps_its_own_pace():
    state = lanes(1, 10)
    state[0].failing = True
    state[1].durable = 20

    assert not takes(state, 1, slot(25), force=False, named=())
    assert takes(state, 1, slot(30), force=False, named=())
    assert takes(state, 1, slot(25), force=True, named=())
    assert takes(state, 1, slot(25), force=False, named={25})


def test_what_is_not_begun_is_left_out_for_a_newer_one_but_for_what_retention_asks_for():
    (state,) = lanes(1, keep_every_n_steps=10)

    assert [enqueue(state, item(sequence), set()) for sequence in (9, 10, 11)] == [[], [item(9)], []]
    assert enqueue(state, item(12), {11}) == []  # 11 has a name
    assert [known.sequence for known in state.queue] == [10, 11, 12]
    assert enqueue(state, item(12), {11}) == []
    assert enqueue(state, item(13), {11}) == [item(12)]


def sequences(items):
    return [known.sequence for known in items]


def test_of_several_ranks_little_waits_that_is_not_due():
    (state,) = lanes(1000, world_size=2, keep_every_n_steps=700)
    for sequence in range(10, 2100, 10):
        assert enqueue(state, item(sequence), {50}, spare=3) == []

    assert sequences(queued(state, force=False, named={50})) == [50, 700, 1000, 1400, 2000]
    # If all ranks die now, these are copied as well.
    assert sequences(queued(state, force=True, named={50})) == [50, 700, 1000, 1400, 2000, 2070, 2080, 2090]


def run(copy_takes, *, captures, spare=4, keep_last=1):
    """One rank's slower level: what it brings, while a capture comes each second, and its longest queue.

    ``copy_takes``: seconds, for one copy after the other.
    """
    (state,) = lanes(10, world_size=2, keep_last=keep_last)
    brought, longest, free_at, left_out = [], 0, 0.0, []
    for second in range(1, captures + 1):
        while state.queue and free_at < second:
            work = next_queued(state, force=False, named=())
            state.queue.remove(work)
            brought.append(work.entry.step // 10)
            # It cannot begin before it is there.
            free_at = max(free_at, work.entry.step / 10) + next(copy_takes)
        left_out += enqueue(state, item(10 * second), set(), spare)
        longest = max(longest, len(state.queue))
    return brought, longest, [known.entry.step // 10 for known in left_out]


@settings(max_examples=40, deadline=None)
@given(
    slowest=st.floats(0.1, 6.0),
    keep_last=st.integers(1, 4),
    spare=st.integers(1, 6),
    parts=st.tuples(*[st.lists(st.floats(0.05, 1.0), min_size=1, max_size=9)] * 2),
)
def test_slower_levels_of_ranks_that_lag_differently_still_have_steps_in_common(slowest, keep_last, spare, parts):
    captures, power = 200, 1
    while power < 2 * slowest:
        power *= 2
    for part in parts:
        copies = (slowest * share for share in itertools.cycle(part))
        brought, longest, left_out = run(copies, captures=captures, spare=spare, keep_last=keep_last)

        assert longest <= most_waiting(PersistentLevel("/0", every_n_steps=10, keep_last=keep_last), spare)
        assert brought == sorted(set(brought))
        assert not [second for second in left_out if second % power == 0]
        waiting = captures - 2 * longest * max(power, slowest)
        assert set(range(power, int(waiting), power)) <= set(brought)


def test_a_slower_level_of_several_ranks_that_keeps_up_leaves_nothing_out():
    brought, _, left_out = run(itertools.repeat(0.9), captures=100)

    assert (brought, left_out) == (list(range(1, 100)), [])


def test_a_slower_level_of_several_ranks_leaves_out_what_is_the_smallest_multiple_but_never_the_newest():
    (state,) = lanes(10, world_size=2, keep_every_n_steps=70, keep_last=1)
    left_out = [known.sequence for step in range(10, 170, 10) for known in enqueue(state, item(step), {30}, spare=3)]

    assert sequences(state.queue) == [30, 70, 80, 120, 140, 160]
    assert left_out == [10, 50, 20, 60, 90, 100, 110, 40, 130, 150]


def test_ranks_that_died_at_different_steps_are_left_one_that_all_have():
    ahead, behind = lanes(1000, world_size=2), lanes(1000, world_size=2)
    for (state,), last in ((ahead, 93), (behind, 91)):
        # Of the captures in memory the newest that was due at the faster level is there before the forced ones.
        for sequence in (70, 80, 90, last - 2, last - 1, last):
            enqueue(state, item(sequence), set(), spare=3)

    assert [sequences(state.queue) for (state,) in (ahead, behind)] == [[91, 92, 93], [90, 89, 91]]


def test_what_a_name_or_nothing_newer_asks_for_waits_until_it_is_begun():
    (state,) = lanes(1000, world_size=2)
    for sequence in (10, 20):
        enqueue(state, item(sequence), {10})
    assert sequences(state.queue) == [10, 20]

    enqueue(state, item(30), set())  # the name was taken back

    assert sequences(state.queue) == [30]


def test_the_newest_is_copied_first_then_what_is_asked_for():
    (state,) = lanes(1, keep_every_n_steps=10)
    for sequence in (10, 20, 25):
        enqueue(state, item(sequence), set())
    order = []
    while (work := next_queued(state, force=False, named=())) is not None:
        state.queue.remove(work)
        state.durable = max(state.durable or 0, work.entry.step)
        order.append(work.sequence)

    assert order == [25, 20, 10]


def test_a_slower_level_waits_for_its_steps_unless_forced():
    (state,) = lanes(10)
    state.durable = 20
    enqueue(state, item(25), set())

    assert next_queued(state, force=False, named=()) is None
    assert next_queued(state, force=False, named={25}) == item(25)
    assert next_queued(state, force=True, named=()) == item(25)


def test_what_was_tried_is_not_queued_again():
    (state,) = lanes(1)
    state.note_tried(5)

    assert enqueue(state, item(5), set()) == []
    assert state.queue == []


def test_the_memory_of_tries_is_bounded_and_keeps_the_newest():
    (state,) = lanes(1)
    for sequence in range(1000):
        state.note_tried(sequence)

    assert 999 in state.tried
    assert len(state.tried) <= 256


def test_head_is_the_last_level_if_none_works():
    state = lanes(1, 1)
    assert head(state) == 0
    for lane in state:
        lane.failing = True
    assert head(state) == 1


def test_retention_asks_by_step_or_by_name():
    state = lanes(1, 1, keep_every_n_steps=50)

    assert is_asked_for(state, 100, 7, set())
    assert is_asked_for(state, 101, 7, {7})
    assert not is_asked_for(state, 101, 7, {8})


def test_no_pin_is_left_on_a_capture_that_will_never_be_whole():
    statuses = [slot(1, SlotPhase.VOID, pinned=True), slot(2, pinned=True), slot(3, SlotPhase.CAPTURING, pinned=True)]

    assert stale_pins(statuses) == [0]
