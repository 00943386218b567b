"""The accounting of ``lazysnap report``: classes, sums, interruptions, over made and over random histories."""

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_history import BEGAN, LEVEL, RUN, History, Life

from lazysnap.cli.goodput import CLASSES, account
from lazysnap.events import (
    Complete,
    EventFile,
    KeeperStarted,
    Progress,
    Protected,
    TrainerEnded,
    TrainerStarted,
)


def seconds(times):
    return {name: time / 1e6 for name, time in times.items() if time}


def test_every_class_of_a_run_that_was_killed_and_resumed():
    history = History([Life(20, wait_s=0.5, back=5), Life(10, how="goodbye", partial_s=4.0)])
    result = account([history.file])

    assert seconds(result.classes()) == pytest.approx(
        {
            "setup": 2.0 + 0.5 + 0.5,
            "productive": 15 + 10,
            "waiting": 14 * 0.5,
            "lost": 5 * 1.5 + 0.25,
            "down": 3.0,
            "restarting": 3.0,
            "draining": 4.0,
        },
        abs=0.02,
    )
    assert result.wall / 1e6 == pytest.approx(history.now - BEGAN)
    [died] = result.interruptions
    assert (died.how, died.step, died.resumed_step, died.lost_steps, died.first) == ("died", 20, 15, 5, (0, 0))
    assert died.lost / 1e6 == pytest.approx(7.75, abs=0.02)
    # Steps 16 to 20 are trained again, step 21 is the first new one.
    assert (died.new_at - died.at) / 1e6 == pytest.approx(3 + 3 + 6, abs=0.02)


def test_a_start_that_goes_back_behind_the_one_before_it_costs_both():
    history = History([Life(20, back=5), Life(3, back=10), Life(1, how="goodbye")])
    first, second = account([history.file]).interruptions
    assert (first.lost_steps, second.lost_steps) == (5, 10)
    assert first.lost / 1e6 == pytest.approx(5 + 0.25, abs=0.02)
    assert second.lost / 1e6 == pytest.approx(3 + 7 + 0.25, abs=0.02)
    # The second start reaches step 18, and step 21 comes never.
    assert first.new_at is second.new_at is None


def test_a_death_that_the_keeper_sees_only_after_the_next_process_began():
    history = History([Life(20), Life(5, how="goodbye")])
    late = [
        msgspec.structs.replace(one, t=one.t + 4.0) if isinstance(one, TrainerEnded) and one.how == "died" else one
        for one in history.events
    ]
    result = account([EventFile(RUN, 0, tuple(sorted(late, key=lambda one: one.t)))])
    assert seconds(result.classes())["restarting"] == pytest.approx(3.0, abs=0.02)
    assert result.starts[0].ended == result.starts[1].began


def test_an_unfinished_start_that_named_itself_counts_as_a_first_step():
    history = History([Life(5), Life(0, partial_s=7.0), Life(5, how="goodbye")])
    result = account([history.file])
    assert result.classes()["restarting"] / 1e6 == pytest.approx(2 * 2.5 + 7.0 + 0.5, abs=0.02)
    assert [one.new_at is not None for one in result.interruptions] == [True, True]


def test_a_keeper_that_died_with_its_trainer():
    """Its newest lines are lost with it: the step from which the next start goes on says how far training was."""
    history = History([Life(20, how=None), Life(5, how="goodbye")])
    lost_from = BEGAN + 10
    kept = [one for one in history.events if one.t < lost_from or one.t > BEGAN + 24]
    [lost] = (result := account([EventFile(RUN, 0, tuple(kept))])).interruptions
    assert (lost.how, lost.step, lost.resumed_step) == ("lost with its keeper", 20, 20)
    assert lost.at / 1e6 == pytest.approx(BEGAN + 23, abs=0.1)
    assert result.classes()["productive"] / 1e6 == pytest.approx(25, abs=0.1)


def test_time_without_a_process_is_down_also_where_the_keeper_died_with_its_trainer():
    """The next start goes back, so nothing says how long it lived after its last line."""
    history = History([Life(20, how=None, back=5, down_s=100.0), Life(10, how="goodbye")])
    result = account([history.file])
    assert result.classes()["down"] / 1e6 == pytest.approx(100, abs=1.5)
    assert result.classes()["lost"] / 1e6 == pytest.approx(5.25, abs=1.5)


def test_a_run_that_goes_on_has_no_interruption_and_a_death_without_a_restart_has_one():
    assert account([History([Life(5, how=None)]).file]).interruptions == []
    [died] = account([History([Life(5)]).file]).interruptions
    assert (died.how, died.resumed_step, died.new_at, died.lost_steps) == ("died", None, None, 0)


def test_of_several_nodes_rank_0_counts_and_the_first_death_is_named():
    history = History([Life(10), Life(5, how="goodbye")])
    died = next(one for one in history.events if isinstance(one, TrainerEnded))
    name = next(one for one in history.events if isinstance(one, TrainerStarted))
    other = (
        msgspec.structs.replace(name, rank=3, start="zz"),
        TrainerEnded(t=died.t - 0.5, rank=3, start="zz", step=9, how="died"),
    )
    alone = account([history.file])
    both = account([EventFile(RUN, 1, other), history.file])
    assert both.spans == alone.spans
    assert both.interruptions[0].first == (3, 1)
    assert account([EventFile(RUN, 1, other)]).starts[0].trainer_started.rank == 3
    assert account([EventFile(RUN, 1, (other[1],))]) is None


def test_how_far_each_place_is_behind_training():
    result = account([History([Life(20, how="goodbye")], sample_s=5.0).file])
    at = round((BEGAN + 3 + 13.5) * 1e6)  # in the step after 13; 11 was sampled and stored
    assert (result.step_at(at), result.behind(LEVEL, at), result.behind("memory", at)) == (13, 2, 0)
    assert result.behind(LEVEL, round((BEGAN + 1) * 1e6)) is None


# ---------------------------------------------------------------- random histories

lives = st.builds(
    Life,
    steps=st.integers(0, 30),
    step_s=st.floats(0.01, 20),
    wait_s=st.floats(0, 5),
    named_s=st.floats(0, 60),
    first_s=st.floats(0, 30),
    partial_s=st.floats(0, 10),
    how=st.sampled_from(("died", "left", "goodbye", None)),
    back=st.integers(0, 40),
    down_s=st.floats(0.001, 1000),
)


def check(result):
    """The spans follow one another, each second is in one class, and nothing is negative."""
    assert result.began <= result.ended
    edges = [result.began, *(span.end for span in result.spans)]
    assert [span.begin for span in result.spans] == edges[:-1]
    assert edges[-1] == result.ended
    assert all(span.begin < span.end and 0 <= span.waited <= span.end - span.begin for span in result.spans)
    times = result.classes()
    assert set(times) == set(CLASSES)
    assert min(times.values()) >= 0
    assert sum(times.values()) == result.wall
    assert sum(one.lost for one in result.interruptions) == times["lost"]


@given(st.lists(lives, min_size=1, max_size=5), st.floats(0.2, 30))
def test_sums_are_exactly_the_wall_time_and_near_the_truth(planned, sample_s):
    history = History(planned, sample_s=sample_s)
    result = account([history.file])
    check(result)
    assert result.wall <= (history.now - BEGAN) * 1e6 + 1
    if planned[-1].how is not None:
        assert sum(start.kept - start.trainer_started.step for start in result.starts) == len(history.done)
    # What is not sampled is known to a step and a sample for each start.
    bound = sum(2 * (life.step_s + life.wait_s) + sample_s + 0.1 for life in planned)
    bound += sum(life.partial_s + life.steps * (life.step_s + life.wait_s) for life in planned if life.how is None)
    for name, time in result.classes().items():
        assert abs(time / 1e6 - history.seconds[name]) <= bound, name


times = st.floats(BEGAN - 100, BEGAN + 100)
ranks, steps, starts = st.integers(0, 1), st.integers(0, 50), st.sampled_from("abc")
VALUES = {
    **dict.fromkeys(("t", "began", "waited_s", "taken", "copy_s"), times),
    **dict.fromkeys(("rank", "nodes"), ranks),
    **dict.fromkeys(("step", "world_size", "every_n_steps", "captured"), steps),
    "start": starts,
    "source": st.none(),
    "level": st.just(LEVEL),
    "steps": st.lists(steps, max_size=3),
    "how": st.sampled_from(("goodbye", "left", "died")),
}
KINDS = (KeeperStarted, TrainerStarted, Progress, Complete, TrainerEnded)
any_event = st.one_of(
    *(st.builds(kind, **{name: VALUES[name] for name in kind.__struct_fields__}) for kind in KINDS),
    st.builds(Protected, t=times, step=st.none() | steps),
)


@pytest.mark.slow
@given(st.lists(any_event, max_size=40), st.lists(any_event, max_size=10))
def test_sums_hold_for_events_in_any_order_and_of_any_values(first, second):
    files = [
        EventFile(RUN, node, tuple(sorted(events, key=lambda event: event.t)))
        for node, events in enumerate((first, second))
    ]
    result = account(files)
    assert (result is None) == (not any(isinstance(one, TrainerStarted) for one in first + second))
    if result is not None:
        check(result)
        for at in (result.began, result.ended, random.Random(0).randint(result.began, result.ended)):
            for place in result.newest:
                behind = result.behind(place, at)
                assert behind is None or behind >= 0
        assert all(one.ended <= other.began for one, other in pairwise(result.starts))
