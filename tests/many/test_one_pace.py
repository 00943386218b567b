"""``every_n_steps="auto"`` with several ranks: all of them capture the same steps."""

from lazysnap import events

CHEAP = {"step_s": 1000.0, "stall_s": 0.0, "until": 0}
DEAR = {"step_s": 1000.0, "stall_s": 115.0, "until": 30}
"""At 1 %: 12 steps; when nothing is dear any more, 2 of what was measured over the time since."""


def steps(job, word, rank):
    return sorted(int(line[2]) for line in job.events(word) if int(line[0]) == rank)


def test_ranks_capture_the_steps_of_the_one_that_waits_most_and_resume_them(make_job):
    """Figures are given, so nothing here depends on the machine; ranks, gloo, keepers and deaths are real."""
    job = make_job()
    common = {"every": "auto", "steps": 110, "by_rank": {"1": {"times": DEAR}}, "times": CHEAP}
    assert set(job.run("ddp", 2, **common, stop_at=50)) == {9}, job.output()

    captured = [*range(1, 20), 24, 36, 48]
    assert [steps(job, "begun", rank) for rank in (0, 1)] == [captured] * 2
    assert set(job.run("ddp", 2, **common)) == {0}, job.output()

    assert job.resumed() == 48
    assert {line[3] for line in job.events("resumed")} == {"memory"}
    # Decided anew: by the boundaries of this start, 20 of which are passed at step 68.
    assert [steps(job, "begun", rank) for rank in (0, 1)] == [[*range(49, 111)]] * 2


def test_the_interval_goes_up_and_down_together(make_job):
    job = make_job()
    common = {"every": "auto", "steps": 105, "by_rank": {"1": {"times": DEAR}}, "times": CHEAP}
    assert set(job.run("ddp", 2, **common)) == {0}, job.output()

    found = [{line[3] for line in job.events("every") if int(line[2]) == step} for step in (19, 20, 99, 100)]
    assert found == [{"1"}, {"12"}, {"12"}, {"2"}]
    late = [[step for step in steps(job, "begun", rank) if step > 90] for rank in (0, 1)]
    assert late == [[96, 100, 102, 104]] * 2
    assert {line[2] for line in job.events("closed")} == {"True"}


def test_storage_and_other_nodes_take_what_is_captured_at_the_new_interval(make_job):
    """What was granted ahead at the old interval is not waited for: it would be missed, and the next one, too."""
    job = make_job()
    by_rank = {"0": {"node": "a", "lag_s": 0.1}, "1": {"node": "b", "times": {**DEAR, "until": 99}}}
    assert set(job.run("ddp", 2, every="auto", steps=75, by_rank=by_rank, times=CHEAP)) == {0}, job.output()

    captured = [24, 36, 48, 60, 72]
    assert [[step for step in steps(job, "begun", rank) if step > 20][:5] for rank in (0, 1)] == [captured] * 2
    found = [event for file in events.read(job.levels[0]["url"]) for event in file.events]
    protected = {event.step for event in found if isinstance(event, events.Protected)}
    complete = {step for event in found if isinstance(event, events.Complete) for step in event.steps}
    # None is promised, as a level may be busy; at the wrong interval there would be none.
    assert len(protected.intersection(captured)) >= 3, protected
    assert len(complete.intersection(captured)) >= 3, complete
