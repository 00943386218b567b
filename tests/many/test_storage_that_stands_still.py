"""Storage of one rank that stands still, or a keeper that is frozen, costs snapshots on storage, never steps."""

import os
import re
import signal
import socket

import pytest
from jobs import until
from rank_keepers import keepers

ENDLESS = 1_000_000
STEPS = 200


def check_every_step_was_captured(job, steps):
    assert job.begun(0) == job.begun(1) == set(range(1, steps + 1)), job.output()


@pytest.fixture
def job(make_job, tmp_path):
    return make_job(levels=[{"url": str(tmp_path / "level"), "every_n_steps": 5, "keep_last": 2}])


def stopped_at(job):
    [step] = {int(line[2]) for line in job.events("stopped")}
    return step


def test_a_frozen_keeper_is_named_once_worked_round_and_serves_again(job):
    freeze = {"1": {"freeze_at": 10, "thaw_at": STEPS + 1}}

    codes = job.run(
        "ddp",
        2,
        by_rank=freeze,
        steps=ENDLESS,
        until_heard="does not answer",
        hear_at=STEPS,
        until_stored_after=STEPS + 1,
        io_timeout_s=20,
        silent_after_s=3,
    )

    assert codes == [9, 9], job.output()
    check_every_step_was_captured(job, stopped_at(job))
    output = job.output()
    assert output.count("the keeper of this node (process") == output.count("does not answer: training") == 2, output
    for rank in (0, 1):
        assert output.count(f"nothing of rank {rank} is stored until it answers") == 1, output
    assert output.count("answers again") == 2, output


def test_memory_goes_on_beside_a_frozen_keeper_and_a_restart_finds_the_newest_step(job):
    codes = job.run(
        "ddp",
        2,
        by_rank={"1": {"freeze_at": 10}},
        faults={0: "engine.begun:150:kill"},
        steps=ENDLESS,
        linger_s=200,
        io_timeout_s=20,
        silent_after_s=3,
    )
    assert -9 in codes, job.output()
    assert max(job.begun(1)) >= 149
    frozen = [int(line[3]) for line in job.events("keeper") if line[0] == "1"]
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    until(lambda: len(keepers(job)) == 1, job.output)

    assert set(job.run("ddp", 2, look=True)) == {0}, job.output()

    assert job.resumed() >= 148
    assert {level for _, level, _ in job.origins()} == {"memory"}


def test_all_ranks_resume_from_memory_before_a_level_answers(make_job):
    job = make_job(levels=[])
    assert set(job.run("ddp", 2, stop_at=4)) == {9}, job.output()
    [stopped] = job.stopped()
    with socket.socket() as server:  # takes connections and says nothing
        server.bind(("127.0.0.1", 0))
        server.listen()
        job.levels[:] = [{"url": f"ftp://127.0.0.1:{server.getsockname()[1]}/run", "timeout_s": 600}]

        assert set(job.run("ddp", 2, look=True)) == {0}, job.output()

    assert job.origins() == [["4", "memory", stopped]] * 2, job.output()
    assert job.output().count("is not waited for: memory has a whole snapshot") == 1, job.output()


def test_a_write_that_hangs_costs_snapshots_and_no_step_and_the_level_comes_back(job):
    job.levels[0]["timeout_s"] = 8

    codes = job.run("ddp", 2, faults={1: "level.local.write:5:hang"}, steps=ENDLESS, until_stored_after=STEPS)

    assert codes == [9, 9], job.output()
    check_every_step_was_captured(job, stopped_at(job))
    output = job.output()
    assert len(re.findall(r"cannot store step \d+: .*did not move for 8 s", output)) == 1, output  # once per node
    assert output.count("works again: step") == 1, output
