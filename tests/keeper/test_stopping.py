"""``lazysnap stop``, and what lists of processes show of a keeper."""

import json
import pathlib

import pytest
from keeper_jobs import Job
from support.keepers import stopped
from support.stored import steps_at
from support.waiting import until

from lazysnap.cli import main


def stop(capsys, job, *more):
    capsys.readouterr()
    code = main(["stop", job, "--json", *more])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_lingering_keeper_stores_its_newest_capture_and_ends(job, capsys):
    level = job.level(every_n_steps=1000)
    first = job.trainer(levels=[level])
    for step in (1, 2, 3):
        first.capture(step=step)
    keeper = job.keeper_pid()
    first.kill()

    code, said = stop(capsys, job.job_id)

    assert code == 0
    assert said["ended"] == [{"pid": keeper, "durable": {level["url"]: 3}}]
    assert job.is_gone()
    assert max(steps_at(level["url"])) == 3


@pytest.mark.slow
def test_a_keeper_that_stored_its_capture_while_somebody_looked_ends_at_once(job, capsys):
    """While a trainer chooses what to go on with nothing is deleted; one that left without choosing is over that."""
    level = job.level(max_bytes_per_s=1_000_000)
    first = job.trainer(levels=[level], size=4_000_000)
    first.capture(step=7)
    first.kill()
    visitor = job.trainer(reserve=0, levels=[level])
    until(lambda: list(pathlib.Path(level["url"]).rglob("*.json")))
    keeper = job.keeper_pid()
    visitor.abandon()

    code, said = stop(capsys, job.job_id, "--timeout", "60")

    assert (code, [ended["pid"] for ended in said["ended"]]) == (0, [keeper])


@pytest.mark.slow
def test_the_keeper_of_a_training_that_runs_stays(job, capsys):
    trainer = job.trainer()
    keeper = job.keeper_pid()

    code, said = stop(capsys, job.job_id)

    assert code == 1
    [staying] = said["staying"]
    assert staying["pid"] == keeper
    assert str(trainer.process.pid) in staying["reason"]
    assert job.keeper_pid() == keeper
    assert trainer.capture(step=1)


@pytest.mark.slow
def test_what_cannot_be_stored_keeps_the_keeper_until_force(job, capsys):
    """The level is a file: nothing can be written there."""
    level = job.level()
    pathlib.Path(level["url"]).write_text("in the way")
    first = job.trainer(levels=[level])
    first.capture(step=7)
    keeper = job.keeper_pid()
    first.kill()

    code, said = stop(capsys, job.job_id)

    assert code == 1
    [staying] = said["staying"]
    assert "step 7" in staying["reason"]
    assert "--force" in staying["reason"]
    assert job.keeper_pid() == keeper
    assert [step for step, *_ in job.trainer(reserve=0, levels=[level]).inventory()] == [7]
    job.trainers[-1].kill()

    code, said = stop(capsys, job.job_id, "--force")

    assert (code, job.is_gone()) == (0, True)


@pytest.mark.slow
@pytest.mark.timeout(50)  # without --timeout the command would wait for a minute
def test_a_keeper_that_hangs_is_waited_for_no_longer_than_asked(job, capsys):
    job.trainer()
    keeper = job.keeper_pid()
    with stopped(keeper):
        code, said = stop(capsys, job.job_id, "--timeout", "0.5")

    assert (code, [staying["pid"] for staying in said["staying"]]) == (1, [keeper])


def test_no_keeper_is_said_to_be_none(job, capsys):
    assert main(["stop", job.job_id]) == 0
    assert "no keeper of job" in capsys.readouterr().out


@pytest.mark.slow
def test_lists_of_processes_show_job_and_node(make_job):
    job = make_job("s3://bucket/run")
    job.trainer()
    keeper = job.keeper_pid()

    words = pathlib.Path(f"/proc/{keeper}/cmdline").read_text().split("\0")

    facts = [f"--job={job.job_id}", f"--node={job.identity.node}"]
    assert words[words.index(facts[0]) :][: len(facts)] == facts
    assert pathlib.Path(f"/proc/{keeper}/comm").read_text().strip() == "lazysnap-keeper"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["path", "relative"])
def test_a_job_is_named_by_the_path_of_its_first_level(make_job, capsys, tmp_path, monkeypatch, how):
    job = make_job("level")
    trainer = job.trainer()
    trainer.capture(step=1)
    trainer.kill()
    monkeypatch.chdir(tmp_path)

    code, said = stop(capsys, str(tmp_path / "level") if how == "path" else "level")

    assert code == 0, said
    assert job.is_gone()


@pytest.mark.slow
def test_a_job_whose_name_begins_with_a_dash_has_a_keeper(tmp_path):
    job = Job("-a", tmp_path)
    try:
        assert job.trainer().capture(step=1)
    finally:
        job.close()
