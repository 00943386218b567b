"""Storage of one rank that stands still, or a keeper that is frozen, costs snapshots on storage, never steps."""

import os
import re
import signal

import pytest
from jobs import until
from rank_keepers import keepers

from lazysnap.levels import open_store

ENDLESS = 1_000_000
STEPS = 200


def check_every_step_was_captured(job, steps):
    assert job.begun(0) == job.begun(1) == set(range(1, steps + 1)), job.output()


def check_training_waited_no_more(job, *ranks):
    """By step 50 storage of these ranks has held all slots for long: of 150 steps that follow none waits."""
    waited = {(line[0], int(line[2])): int(line[3]) for line in job.events("waits")}
    before, after = ([waited[rank, step] for rank in ranks] for step in (50, STEPS))
    assert after == before, job.output()
    assert sum(before) > 0, job.output()  # while one of them waits another may hear why


@pytest.fixture
def job(make_job, tmp_path):
    return make_job(levels=[{"url": str(tmp_path / "level"), "every_n_steps": 5, "keep_last": 2}])


def stopped_at(job):
    [step] = {int(line[2]) for line in job.events("stopped")}
    return step


def test_a_frozen_keeper_is_named_once_worked_round_and_serves_again(job):
    freeze = {"1": {"freeze_at": 10, "thaw_at": STEPS}}

    codes = job.run(
        "ddp",
        2,
        by_rank=freeze,
        steps=ENDLESS,
        until_stored_after=STEPS,
        gate_timeout_s=20,
        keeper_timeout_s=3,
    )

    assert codes == [9, 9], job.output()
    check_every_step_was_captured(job, stopped_at(job))
    check_training_waited_no_more(job, "0", "1")
    output = job.output()
    assert output.count("the keeper of this node (process") == output.count("does not answer: training") == 2, output
    for rank in (0, 1):
        assert output.count(f"nothing of rank {rank} is stored until it answers") == 1, output
        assert f"storage of rank {rank} holds all slots" not in output
    assert output.count("answers again") == 2, output


def test_memory_goes_on_beside_a_frozen_keeper_and_a_restart_finds_the_newest_step(job):
    codes = job.run(
        "ddp",
        2,
        by_rank={"1": {"freeze_at": 10}},
        faults={0: "engine.begun:150:kill"},
        steps=ENDLESS,
        gate_timeout_s=20,
        keeper_timeout_s=3,
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


def test_a_write_that_hangs_is_named_once_and_training_goes_on(job):
    codes = job.run("ddp", 2, faults={1: "level.local.write:5:hang"}, steps=ENDLESS, stop_at=STEPS, gate_timeout_s=1)

    assert codes == [9, 9], job.output()
    check_every_step_was_captured(job, STEPS)
    output = job.output()
    [rank] = re.findall(r"storage of rank (\d) holds all slots", output)  # one of the two writes
    check_training_waited_no_more(job, rank)
    assert re.search(rf"{job.levels[0]['url']}: writing step \d+ \(nothing has moved for", output), output


def test_a_level_that_comes_back_gets_snapshots_again(job):
    job.levels[0]["timeout_s"] = 3

    codes = job.run(
        "ddp",
        2,
        faults={1: "level.local.write:5:hang"},
        steps=ENDLESS,
        until_stored_after=STEPS,
        gate_timeout_s=1,
    )

    assert codes == [9, 9], job.output()
    check_every_step_was_captured(job, stopped_at(job))
    output = job.output()
    [rank] = re.findall(r"storage of rank (\d) holds all slots", output)  # one of the two writes
    assert output.count(f"storage of rank {rank} takes snapshots again") == 1, output


def test_a_disk_slower_than_training_gets_fewer_snapshots_and_the_same_ones_as_the_others(job):
    job.levels[0]["every_n_steps"] = 1
    slow = {"levels": [{**job.levels[0], "max_bytes_per_s": 50_000}], "lag_s": 0.04}

    codes = job.run(
        "ddp",
        2,
        by_rank={"1": slow},
        steps=ENDLESS,
        until_stored_after=STEPS,
        gate_timeout_s=1,
    )

    assert codes == [9, 9], (stored_steps(job), job.output()[-3000:])
    check_every_step_was_captured(job, stopped_at(job))


def stored_steps(job):
    store = open_store(job.levels[0]["url"])
    return [(entry.step, entry.rank) for entry in store.inventory().entries]
