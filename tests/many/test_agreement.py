"""All ranks restore one snapshot or none: damage, deaths and silence of one of them are met by all."""

import pytest
from rank_keepers import visits

from lazysnap.levels import open_store

LOOK = {"look": True, "collective_timeout_s": 20.0}


def test_a_damaged_shard_of_one_rank_on_storage_makes_all_take_the_next_snapshot(job, end_keepers):
    assert set(job.run("ddp", 2, stop_at=5, wait_durable=True)) == {9}, job.output()
    end_keepers(job)
    store = open_store(job.levels[0]["url"])
    [entry] = [e for e in store.inventory().entries if (e.step, e.rank) == (5, 1)]
    flip_last_byte(job.root / "level" / store.place(entry).shard_path)

    assert set(job.run("ddp", 2, **LOOK)) == {0}, job.output()

    level = job.levels[0]["url"]
    assert [line[:2] for line in job.origins()] == [["4", level]] * 2
    assert "step 5" in job.output()
    assert "block" in job.output()


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_shard_of_one_rank_in_memory_makes_all_take_the_next_snapshot(make_job):
    job = make_job(levels=[])
    assert set(job.run("ddp", 2, stop_at=5)) == {9}, job.output()
    with visits(job) as found:
        # With no trainer left, each keeper computes checksums of what it holds.
        [item] = [item for item in found[1].holdings.entries if item.step == 5]
        item.slot.image[item.slot.status().image_bytes - 1] ^= 1

    assert set(job.run("ddp", 2, **LOOK)) == {0}, job.output()

    assert [line[:2] for line in job.origins()] == [["4", "memory"]] * 2
    assert "step 5" in job.output()


@pytest.mark.parametrize("point", ["engine.restart.ask", "engine.restart.told", "engine.restart.read"])
def test_a_rank_that_dies_while_all_resume_leaves_the_snapshots_as_they_were(make_job, point):
    job = make_job(levels=[])
    assert set(job.run("ddp", 2, stop_at=4)) == {9}, job.output()
    stopped = job.stopped()

    assert -9 in job.run("ddp", 2, faults={1: f"{point}:1:kill"}), job.output()
    assert job.events("resumed") == []
    assert set(job.run("ddp", 2, **LOOK)) == {0}, job.output()

    assert [line[:2] for line in job.origins()] == [["4", "memory"]] * 2
    assert {line[2] for line in job.origins()} == stopped


def test_a_rank_that_is_silent_at_the_restart_ends_it_at_the_deadline_with_one_clear_error(make_job):
    job = make_job(levels=[])

    codes = job.run("ddp", 2, faults={1: "engine.restart.ask:1:hang"}, collective_timeout_s=1.0)

    assert codes[0] == 1
    assert "WaitTimeout: rank 0 of 2, what is in memory: the other ranks did not answer within 1 s" in job.output()
    assert "is a rank dead" in job.output()


def test_a_rank_that_works_for_longer_than_the_deadline_is_waited_for(make_job):
    """Its shard may come from far away, where the others have theirs in memory."""
    job = make_job(levels=[])

    codes = job.run("beat", 2, collective_timeout_s=1.0)

    assert codes == [0, 0], job.output()
    assert [line[2:] for line in job.events("told")] == [["[0,", "10]"]] * 2


def test_a_rank_that_makes_no_engine_is_missed_at_the_deadline(make_job):
    job = make_job(levels=[])

    codes = job.run("plain", 2, by_rank={"1": {"absent": True}}, collective_timeout_s=1.0)

    assert codes[0] == 1
    assert "WaitTimeout: rank 0 of 2, making the engine: the other ranks did not answer within 1 s" in job.output()


def test_ranks_that_do_different_things_are_told_so_once_and_train_on(make_job):
    """One rank takes no snapshots: the first boundary of the other one meets its end."""
    job = make_job(levels=[])

    codes = job.run("plain", 2, by_rank={"1": {"silent": True}})

    assert codes == [0, 0], job.output()
    assert len(job.events("skipped")) == 8
    text = "rank 0 of 2 is at 'the first boundary', but {1: 'closing'}"
    assert job.output().count(f"step 1 is not captured: WaitTimeout: {text}") == 1
    assert len({line[2] for line in job.events("collectives")}) == 1


def test_answers_of_any_length_come_to_all(job):
    assert set(job.run("talk", 3, collective_timeout_s=20.0)) == {0}, job.output()

    assert [line[2:] for line in job.events("told")] == [["0:0", "1:300000", "2:2"]] * 3
