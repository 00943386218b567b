"""Several ranks that go back by choice begin one new run, the same on all, and lose nothing of what they leave."""

from support.stored import runs_at
from support.waiting import until


def stored(job):
    """Per run, the newest first: the steps of its complete snapshots."""
    return runs_at(job.levels[0]["url"])


def make(make_job, tmp_path):
    level = {"url": str(tmp_path / "level"), "every_n_steps": 1, "keep_last": 2, "keep_every_n_steps": 4}
    return make_job(levels=[level])


def test_all_ranks_begin_one_run_whose_snapshots_stay_and_count(make_job, tmp_path):
    job = make(make_job, tmp_path)
    assert set(job.run("ddp", 2, lag_s=0.1)) == {0}, job.output()
    # A keeper deletes after close, too. A slow one left steps out.
    until(lambda: [len(steps) in (2, 3) for steps in stored(job).values()] == [True], lambda: f"{stored(job)}")
    [(old, steps)] = stored(job).items()
    assert (steps[0], steps[-1]) == (8, 4)

    assert set(job.run("ddp", 2, which=4, steps=9, stop_at=5, wait_durable=True, wait_s=60)) == {9}, job.output()

    assert job.resumed() == 4
    assert [line[3] for line in job.events("durable")] == ["True", "True"]
    assert list(stored(job).values()) == [[5], steps], job.output()
    assert job.output().count(f"begins at step 4 of run {old[:8]}") == 1
    stopped = job.stopped()
    assert set(job.run("ddp", 2, steps=7)) == {0}, job.output()
    assert job.resumed() == 5
    assert {origin[2] for origin in job.origins()} == stopped
    assert [line[2] for line in job.events("closed")] == ["True", "True"]
    until(lambda: list(stored(job).values()) in ([[7, 5], steps], [[7, 6], steps]), job.output)
    assert set(job.run("ddp", 2, which=f"run:{old}", look=True)) == {0}, job.output()
    assert job.resumed() == 8


def test_what_memory_holds_of_the_run_that_was_left_outlasts_the_way_back(make_job):
    """Nothing is on storage. Until the new run has a snapshot, "latest" is what it was; from then on: see above."""
    job = make_job(levels=[])
    assert set(job.run("ddp", 2, stop_at=8)) == {9}, job.output()
    [last] = job.stopped()
    assert set(job.run("ddp", 2, which=6, look=True)) == {0}, job.output()
    assert job.resumed() == 6
    assert set(job.run("ddp", 2, look=True)) == {0}, job.output()
    assert job.origins() == [["8", "memory", last]] * 2, job.output()
