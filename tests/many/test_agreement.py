"""All ranks restore one snapshot or none: damage, deaths and silence of one of them are met by all."""

import pathlib
import subprocess
import sys

import pytest
from jobs import TIMEOUT_S
from rank_keepers import neighbours
from support.catalogue import inventory_of
from support.damage import flip, flip_memory
from support.listing import files_below

from lazysnap.config import SnapshotConfig
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.store import open_storage

LOOK = {"look": True, "collective_timeout_s": 20.0}


def test_a_damaged_shard_of_one_rank_in_memory_makes_all_take_the_next_snapshot(make_job):
    job = make_job(levels=[])
    assert set(job.run("ddp", 2, stop_at=5)) == {9}, job.output()
    with neighbours(job) as found:
        # With no trainer left, each keeper computes checksums of what it holds.
        [item] = [item for item in found[1].inventory.entries if item.step == 5]
        flip_memory(item.slot, item.slot.view().image_bytes - 1)

    assert set(job.run("ddp", 2, **LOOK)) == {0}, job.output()

    assert [line[:2] for line in job.origins()] == [["4", "memory"]] * 2
    assert "step 5" in job.output()


RESUMING = ["ask", "surveyed", "read", "load", "loaded", "discard"]


@pytest.mark.parametrize(
    ("place", "victims"),
    [("memory", (1,)), ("storage", (0, 1))],
)
def test_ranks_that_die_while_all_resume_leave_the_snapshots_as_they_were(make_job, end_keepers, place, victims):
    """One after the other; before and after all agreed on one, and while it is being loaded."""
    job = make_job(**({"levels": []} if place == "memory" else {}))
    assert set(job.run("ddp", 2, stop_at=4, wait_durable=place == "storage")) == {9}, job.output()
    [stopped], owned = job.stopped(), job.own("stopped")
    if place == "storage":
        end_keepers(job)
    before = snapshots(job)
    assert len(before) >= 2

    # From storage there is nothing else in memory to let go.
    for point in RESUMING if place == "memory" else RESUMING[:-1]:
        deaths = dict.fromkeys(victims, f"restore.{point}:1:kill")
        assert -9 in job.run("ddp", 2, faults=deaths), job.output()
        assert job.events("trained") == []
        left = snapshots(job)
        if point in ("loaded", "discard"):
            # All know by then that all have this one: older ones may go, rank by rank.
            assert {(0, 4), (1, 4)} <= left <= before if place == "memory" else left == before, point
        else:
            assert left == before, point
        if point == "load":
            dying = {str(rank): {"odd": "dying"} for rank in victims}
            assert -9 in job.run("ddp", 2, by_rank=dying), job.output()
            assert job.events("resumed") == []
            assert snapshots(job) == before
    assert set(job.run("ddp", 2, **LOOK)) == {0}, job.output()

    assert job.origins() == [["4", "memory" if place == "memory" else job.levels[0]["url"], stopped]] * 2
    assert job.own("resumed") == owned


def snapshots(job):
    """What there is: in memory rank and step, on storage every file that is visible."""
    if job.levels:
        files = files_below(job.root / "level", "step-*/*")
        return {(str(path), path.read_bytes()) for path in files}
    with neighbours(job) as found:
        return {(rank, item.step) for rank, neighbour in found.items() for item in neighbour.inventory.entries}


def test_damage_of_one_rank_here_and_of_another_there_makes_all_take_what_is_whole_on_both(job, end_keepers):
    job.levels[0]["keep_last"] = 3
    assert set(job.run("fsdp", 2, stop_at=3, wait_durable=True)) == {9}, job.output()
    [stopped], owned = job.stopped(), job.own("stopped")
    for last in (4, 5):
        assert set(job.run("fsdp", 2, stop_at=last, wait_durable=True)) == {9}, job.output()
    end_keepers(job)
    storage = open_storage(job.levels[0]["url"])
    entries = {(entry.step, entry.rank): entry for entry in inventory_of(storage).entries}
    assert {step for step, _ in entries} == {3, 4, 5}
    for damaged in ((5, 1), (4, 0)):
        flip(job.root / "level" / FilePlace.of(storage, entries[damaged]).file_path)

    assert set(job.run("fsdp", 2, **LOOK)) == {0}, job.output()

    assert job.origins() == [["3", job.levels[0]["url"], stopped]] * 2, job.output()
    assert all(word in job.output() for word in ("step 5", "step 4", "block"))
    assert job.own("resumed") == owned


DEADLINE_S = 3.0
DEADLINE = {"collective_timeout_s": DEADLINE_S, "timeout_s": 1000}
"""The training's own collectives may take much longer."""


def missed(job):
    """How long rank 0 waited for the other one, by its own account."""
    [[_, _, seconds]] = [line for line in job.events("missed") if line[0] == "0"]
    return float(seconds)


@pytest.mark.parametrize(
    ("kind", "settings", "where"),
    [
        ("ddp", {"faults": {1: "restore.ask:1:hang"}}, "what is in memory"),
        ("plain", {"by_rank": {"1": {"absent": True}}}, "making the engine"),
    ],
    ids=["silent at the restart", "makes no engine"],
)
def test_a_rank_that_is_silent_ends_the_start_at_the_deadline_with_one_clear_error(make_job, kind, settings, where):
    job = make_job(levels=[])

    codes = job.run(kind, 2, **settings, **DEADLINE)

    assert codes[0] == 1
    assert f"WaitTimeout: rank 0 of 2, {where}: the other ranks did not answer within 3 s" in job.output()
    assert "is a rank dead" in job.output()
    assert DEADLINE_S <= missed(job) < SnapshotConfig().collective_timeout_s / 10


def test_a_rank_that_works_for_longer_than_the_deadline_is_waited_for(make_job):
    """Its shard may come from far away, where the others have theirs in memory."""
    job = make_job(levels=[])

    codes = job.run("beat", 2, collective_timeout_s=DEADLINE_S)

    assert codes == [0, 0], job.output()
    assert [line[2:] for line in job.events("told")] == [["[0,", "4]"]] * 2


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


def test_ranks_with_other_settings_are_all_told_when_they_begin(make_job):
    job = make_job()

    codes = job.run("plain", 2, by_rank={"1": {"every": 2}})

    assert 0 not in codes
    assert job.output().count("ConfigError: ranks 0 and 1 have different settings: every_n_steps is 1 and 2") == 2


def test_ranks_of_one_node_with_different_directories_are_all_told_when_they_begin(make_job):
    """A time in the name, made on each rank, is enough; each would have a keeper of its own, and nothing complete."""
    job = make_job()
    places = [str(job.root / f"2026-11-24-12000{rank}") for rank in range(2)]
    by_rank = {str(rank): {"levels": [{"url": place, "every_n_steps": 1}]} for rank, place in enumerate(places)}

    codes = job.run("plain", 2, by_rank=by_rank)

    assert 0 not in codes
    text = f"level 0 is '{places[0]}' on rank 0 and '{places[1]}' on rank 1"
    said = f"ConfigError: ranks 0 and 1 of one node have different places for snapshots: {text}"
    assert job.output().count(said) == 2
    assert not any(path.name.startswith("2026") for path in job.root.iterdir())


def test_ranks_in_a_python_without_numpy_capture_and_resume(tmp_path):
    """And a mistake in what one rank says is no silence of the others."""
    without = "import runpy, sys; sys.modules['numpy'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    script = pathlib.Path(__file__).parent / "without_numpy.py"
    program = [sys.executable, "-c", without, str(script), str(tmp_path)]

    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert done.returncode == 0, done.stderr
    told = [f"{rank} {word}" for rank in (0, 1) for word in ("mistake TypeError", "resumed 1 8")]
    assert sorted(done.stdout.splitlines()) == told, done.stderr
