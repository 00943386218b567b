"""Several nodes keep one place tidy, each its own files, and none takes the last snapshot that all of them have."""

import errno
import pathlib
import threading

import pytest
from frozen_damage import flip
from support.catalogue import inventory_of
from support.listing import files_below
from support.names import directory_of
from support.node_rig import RUN, STARTS, check, steps_at
from support.snapshots import Snapshot
from support.waiting import until

from lazysnap.config import PersistentLevel
from lazysnap.levels import open_store
from lazysnap.resolver import candidates

pytestmark = pytest.mark.slow

CREWS = pytest.mark.parametrize("crew", [{"ranks": 2}, {"nodes": 2, "ranks": 2}], ids=str)


def level_at(tmp_path, **settings):
    return PersistentLevel(tmp_path / "run", **{"every_n_steps": 1, "keep_last": 1, **settings})


def files(level, pattern="*.safetensors"):
    """Of each step, how many."""
    found = [path.parent.name for path in files_below(level.url, pattern)]
    return {name: found.count(name) for name in found}


def complete(level):
    return [(plan.step, plan.sources[0][0].start) for plan in candidates([inventory_of(open_store(level.url))])]


def write(level, step, rank, world_size, start):
    Snapshot(step, RUN, rank=rank, world_size=world_size, start=start).write(open_store(level.url))


@CREWS
def test_a_step_goes_when_enough_newer_ones_are_complete(rig, crew, tmp_path):
    level = level_at(tmp_path, keep_last=2)
    trainer = rig(level, **crew)

    assert [trainer.store() for _ in range(2)] == [2, 4]
    assert steps_at(level) == [2, 4]
    assert [trainer.store() for _ in range(2)] == [6, 8]
    assert until(lambda: steps_at(level) == [6, 8])
    for step in (6, 8):
        check(level, step)
    assert until(lambda: set(files(level).values()) == {len(trainer.nodes)})


@pytest.fixture
def at_node(passing):
    """Do something when a thread that works for a level passes a fault point: ``at_node(level, name, work)``."""

    def arm(level, name, work):
        passing(lambda at: at == name and threading.current_thread().name.startswith(level.url) and work())

    return arm


@pytest.fixture
def two_disks(rig, tmp_path):
    """Two nodes, each with a disk of its own: nobody can see how the other one's is. And what they see."""
    here, there = (PersistentLevel(tmp_path / name, every_n_steps=1, keep_last=1) for name in ("here", "there"))
    trainer = rig(here, nodes=2, start=None)
    trainer.levels_of = lambda node: ((here,), (there,))[node]
    return trainer.begin(), here, there


def test_a_node_that_fails_for_long_costs_no_node_the_last_snapshot_that_all_have(two_disks, at_node):
    trainer, here, there = two_disks
    assert trainer.store() == 2
    is_full, seen = threading.Event(), []

    def write():
        seen.append(len(steps_at(here)))
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "injected")

    at_node(there, "level.store.begin", write)
    is_full.set()
    trainer.train_until(lambda: len(trainer.failed(node=1)) > 5)

    assert trainer.complete(here) == trainer.complete(here, 1) == [2]
    assert steps_at(here)[0] == 2
    assert steps_at(there) == [2]
    assert max(seen) <= 3, "what only one of them has is bounded"
    is_full.clear()
    trainer.train_until(lambda: len(trainer.complete(here)) > 1)
    newest = trainer.store()
    assert until(lambda: steps_at(here) == steps_at(there) == [newest])


def names_of(directory):
    return sorted(path.name for path in directory.glob("keep-*"))


def test_what_has_a_name_stays_on_every_disk_after_a_restart_and_goes_from_all_when_it_is_taken_away(two_disks):
    trainer, here, there = two_disks
    assert trainer.store() == 2
    for storage in trainer.storages:
        storage.keep("first", 2)
    named = [trainer.directory(level, 2) for level in (here, there)]
    until(lambda: [names_of(directory) for directory in named] == [["keep-first"]] * 2)

    stored = {level.url: [(STARTS[0], 2)] for level in (here, there)}
    trainer.begin(STARTS[1], stored=stored)
    trainer.capture(3)
    newest = [trainer.store() for _ in range(2)][-1]
    until(lambda: steps_at(here) == steps_at(there) == [2, newest])

    for storage in trainer.storages:
        storage.release("first")
    newest = trainer.store()
    until(lambda: steps_at(here) == steps_at(there) == [newest])


@pytest.mark.usefixtures("a_day_later")
def test_what_an_earlier_start_left_on_a_disk_goes_though_its_node_has_another_number_now(two_disks):
    trainer, here, there = two_disks
    assert trainer.store() == 2
    half = [trainer.directory(here, 9) / "node-00000-of-00002.safetensors"]
    half.append(trainer.directory(there, 9) / "node-00001-of-00002.safetensors")
    for path in half:
        path.parent.mkdir()
        path.write_bytes(b"half")

    trainer.levels_of = lambda node: ((there,), (here,))[node]
    trainer.begin(STARTS[1], stored={level.url: [(STARTS[0], 2)] for level in (here, there)})
    trainer.capture(3)
    newest = trainer.store(), trainer.store()

    until(lambda: steps_at(here) == steps_at(there) == [newest[-1]])
    until(lambda: not any(path.exists() for path in half))


def test_what_a_node_with_slow_storage_is_writing_stays_with_the_others_until_it_is_complete(two_disks, at_node):
    trainer, here, there = two_disks
    assert trainer.store() == 2
    goes_on = threading.Event()
    at_node(there, "level.store.publish_shard", lambda: goes_on.wait(60))
    assert trainer.train() == 4
    assert until(lambda: 4 in steps_at(here))
    for step in range(5, 15):
        trainer.capture(step)

    assert steps_at(here) == [2, 4]
    goes_on.set()
    trainer.wait(here, 4)
    assert until(lambda: steps_at(here) == steps_at(there) == [4])


@CREWS
def test_what_a_keeper_did_not_write_itself_goes_as_well(rig, crew, tmp_path):
    """It took the place of one that died."""
    level = level_at(tmp_path, keep_last=3)
    trainer = rig(level, **crew)
    assert [trainer.store() for _ in range(3)] == [2, 4, 6]

    for node in range(len(trainer.nodes)):
        trainer.replace(node)
        assert until(lambda: set(trainer.complete(level)) >= {2, 4, 6}), "all of them were listed"
    for _ in range(3):
        count = len(trainer.complete(level))
        trainer.train_until(lambda count=count: len(trainer.complete(level)) > count)

    assert until(lambda: steps_at(level) == trainer.complete(level)[-3:])
    for step in trainer.complete(level)[-2:]:  # the oldest may be going: one more step may become complete now
        check(level, step)


def test_a_shard_that_is_read_back_damaged_is_no_snapshot_and_goes(rig, tmp_path, passing):
    level = level_at(tmp_path)
    trainer = rig(level, ranks=2)
    path = trainer.directory(level, 2) / "node-00000-of-00001.safetensors"

    def work(name):
        if name == "keeper.persist.committed":
            flip(path)

    passing(work)
    trainer.train()
    assert until(lambda: trainer.failed() == [2])

    assert [entry.rank for entry in inventory_of(open_store(level.url)).entries] == []
    assert not path.exists()


@CREWS
def test_steps_with_a_name_and_milestones_stay(rig, crew, tmp_path):
    level = level_at(tmp_path, keep_every_n_steps=4)
    trainer = rig(level, **crew)
    assert trainer.store() == 2
    trainer.storages[0].keep("first", 2)
    assert until(lambda: any(path.name == "keep-first" for path in trainer.directory(level, 2).iterdir()))
    assert [trainer.store() for _ in range(2)] == [4, 6]
    newest = [trainer.store() for _ in range(4)]
    assert newest == [8, 10, 12, 14]
    assert until(lambda: set(steps_at(level)) == {2, 4, 8, 12, 14})

    trainer.storages[0].release("first")
    assert trainer.store() == 16
    assert until(lambda: steps_at(level) == [4, 8, 12, 16])


@CREWS
def test_of_what_was_before_nothing_goes_until_something_new_is_complete(rig, crew, tmp_path, passing):
    level, seen = level_at(tmp_path), []
    trainer = rig(level, **crew)
    assert [trainer.store() for _ in range(2)] == [2, 4]
    assert until(lambda: steps_at(level) == [4])

    def work(name):
        if name == "keeper.persist.committed":
            seen.append((4, STARTS[0]) in complete(level))

    passing(work)
    trainer.begin(STARTS[1], stored={level.url: [(STARTS[0], 4)]})
    assert trainer.store() == 2
    assert trainer.store() == 4

    assert seen[: len(trainer.nodes)] == [True] * len(trainer.nodes)
    assert until(lambda: complete(level) == [(4, STARTS[1])])


@CREWS
def test_what_an_earlier_start_left_stays_until_enough_is_complete_of_this_one(rig, crew, tmp_path):
    level = level_at(tmp_path, keep_last=2)
    trainer = rig(level, **crew)
    assert [trainer.store() for _ in range(2)] == [2, 4]

    trainer.begin(STARTS[1], stored={level.url: [(STARTS[0], 2), (STARTS[0], 4)]})
    trainer.capture(5)  # it goes on from step 4
    first = trainer.store()
    assert until(lambda: complete(level) == [(first, STARTS[1]), (4, STARTS[0])])
    second = trainer.store()
    assert until(lambda: complete(level) == [(second, STARTS[1]), (first, STARTS[1])])


def test_starts_that_never_come_far_leave_no_more_than_one_that_does(rig, tmp_path):
    """A training that dies again and again before there are ``keep_last`` of one start."""
    level = level_at(tmp_path, keep_last=4)
    trainer, known, step = rig(level, start=None, ranks=2), [], 0
    for start in STARTS[:6]:
        trainer.begin(start, stored={level.url: known[-4:]})
        trainer.capture(step + 1)
        for _ in range(2):
            trainer.store()
        known += [(start, each) for each in trainer.complete(level)]
        assert until(lambda known=known: complete(level) == [(step, of) for of, step in known[::-1][:4]])
        step = trainer.step + 1
        write(level, step, 0, 2, start)  # of which the other rank has nothing

    trainer.begin(STARTS[6], stored={level.url: known[-4:]})
    trainer.capture(step + 1)
    for _ in range(4):
        trainer.store()
    assert until(lambda: set(files(level).values()) == {1} and len(files(level)) == 4)


@pytest.mark.usefixtures("a_day_later")
@pytest.mark.parametrize("now", [{"ranks": 1}, {"ranks": 2}, {"nodes": 2}], ids=str)
def test_what_ranks_that_are_no_more_have_left_goes_with_the_rest(rig, tmp_path, now):
    """A training of four ranks goes on with fewer: somebody deletes old snapshots and half-written files."""
    level = level_at(tmp_path)
    for rank in range(4):
        for step in (1, 2):
            write(level, step, rank, 4, STARTS[0])
    write(level, 3, 3, 4, STARTS[0])
    half = pathlib.Path(level.url) / directory_of(4, RUN, STARTS[0]) / "node-00003-of-00004.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"half")

    trainer = rig(level, start=None, **now).begin(STARTS[1], stored={level.url: [(STARTS[0], 1), (STARTS[0], 2)]})
    for _ in range(3):
        newest = trainer.store()

    assert until(lambda: files_below(level.url, "*-of-00004*") == [])
    assert complete(level)[0] == (newest, STARTS[1])


def test_what_a_keeper_could_not_list_stays_and_counts_once_the_level_answers(rig, tmp_path):
    level = level_at(tmp_path, keep_last=3)
    trainer = rig(level)
    assert [trainer.store() for _ in range(3)] == [2, 4, 6]
    path, away = pathlib.Path(level.url), tmp_path / "away"
    path.rename(away)
    path.write_text("not a directory")
    trainer.replace()
    assert until(lambda: trainer.storages[0]._writers[0].health.fails_since is not None)
    path.unlink()
    away.rename(path)

    newest = [trainer.store() for _ in range(2)]

    assert trainer.complete(level) == [2, 4, 6, *newest]
    assert until(lambda: steps_at(level) == [6, *newest])
