"""Several trainers and the one keeper of their node: nothing of a rank is lost for another one's death."""

import contextlib
import os
import pathlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.catalogue import inventory_of
from support.stored import steps_at
from support.waiting import until

from lazysnap.keeper.node_part import read_index
from lazysnap.levels.store import open_storage
from lazysnap.peers.messages import PartOf, SlotOf
from lazysnap.peers.reader import PeerReader
from lazysnap.peers.secret import draw_secret
from lazysnap.shard.names import new_id

RANKS, START = 3, new_id()


def ranks(job, count=RANKS, **settings):
    """Connected trainers with slots, all started at the same time."""
    started = [job.start(rank=(rank, count), start=START, **settings) for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda trainer: trainer.connect(), started))
        assert list(pool.map(lambda trainer: trainer.reserve(count=3), started)) == [3] * count
    return started


def processes(job):
    """All that are a keeper of this job, or are about to be."""
    word = job.identity.arguments[-1].encode()
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        found += [int(path.parent.name)] if word in words else []
    return found


def slots_of(pid):
    """Shared memory that a process maps: one name in /proc for each slot."""
    lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "lazysnap-slot" in line}


def steps(trainer):
    """Of the captures that the keeper holds for it; ``None`` if there is no keeper just now."""
    found = trainer.inventory()
    return [step for step, *_ in found] if isinstance(found, list) else None


@pytest.mark.slow
def test_ranks_that_start_together_have_one_keeper_and_each_its_own_memory(job):
    trainers = ranks(job)
    for number, trainer in enumerate(trainers):
        trainer.capture(step=10 + number)

    assert until(lambda: processes(job) == [job.keeper_pid()])
    assert [steps(trainer) for trainer in trainers] == [[10], [11], [12]]
    assert len(slots_of(job.keeper_pid())) == 3 * RANKS


def test_a_killed_keeper_gets_a_successor_that_has_the_memory_of_all_ranks(job):
    trainers = ranks(job)
    for number, trainer in enumerate(trainers):
        trainer.capture(step=10 + number)
    keeper = job.keeper_pid()
    os.kill(keeper, signal.SIGKILL)

    assert until(lambda: job.keeper_pid() not in (None, keeper))
    for number, trainer in enumerate(trainers):
        assert until(lambda trainer=trainer, number=number: steps(trainer) == [10 + number])
    assert until(lambda: processes(job) == [job.keeper_pid()])
    for trainer in trainers:
        trainer.kill()
    assert steps(job.trainer(rank=(1, RANKS), reserve=0)) == [11]


@pytest.mark.slow
def test_what_a_dead_rank_left_stays_while_another_one_trains_and_lingers_from_then_on(job):
    first, second, third = ranks(job, linger_s=1.0)
    for trainer in (first, second, third):
        trainer.capture(step=1)
    second.kill()
    third.kill()
    killed = time.monotonic()
    step = 1
    while time.monotonic() < killed + 3.0:  # thrice as long as it would linger alone
        first.capture(step=(step := step + 1))

    assert steps(job.trainer(rank=(1, RANKS), reserve=0, linger_s=1.0)) == [1]
    job.trainers[-1].kill()
    first.kill()
    assert until(job.is_gone)
    assert until(lambda: processes(job) == [])


@pytest.mark.slow
def test_a_second_trainer_of_one_rank_is_refused_and_those_of_others_are_not(job):
    pids = sorted(trainer.process.pid for trainer in ranks(job))

    refused = job.start(rank=(0, RANKS)).connect()

    assert refused["error"] == "JobBusy"
    assert f"`kill {' '.join(map(str, pids))}` ends them" in refused["text"]
    assert job.trainer(rank=(RANKS, RANKS + 1)).capture(step=1)


@pytest.mark.slow
@pytest.mark.parametrize("victims", [(0,), (0, 1), (0, 1, 2)])
def test_a_keeper_and_trainers_that_die_together_leave_the_others_what_they_had(job, victims):
    trainers = ranks(job)
    for trainer in trainers:
        trainer.capture(step=7)
    keeper = job.keeper_pid()
    for pid in (keeper, *(trainers[number].process.pid for number in victims)):
        os.kill(pid, signal.SIGKILL)
    for number in victims:
        trainers[number].kill()

    for number, trainer in enumerate(trainers):
        if number not in victims:
            assert until(lambda trainer=trainer: steps(trainer) == [7])
            trainer.kill()
    for trainer in trainers:
        trainer.close()
    if len(victims) == RANKS:
        assert until(job.is_dead)


@pytest.mark.slow
def test_sigterm_makes_the_newest_capture_of_every_rank_durable(job):
    level = job.level(every_n_steps=100)
    trainers = ranks(job, levels=[level])
    for trainer in trainers:
        trainer.capture(step=3)
    assert [steps(trainer) for trainer in trainers] == [[3]] * RANKS  # the keeper heard of the start by now
    for trainer in trainers:
        trainer.kill()
    os.kill(job.keeper_pid(), signal.SIGTERM)

    assert until(job.is_gone)
    names = [path.name for path in pathlib.Path(level["url"]).glob("step-00000003-*/*.json")]
    assert names == ["node-00000-of-00001.json"]


@pytest.mark.slow
def test_what_an_earlier_start_left_is_stored_as_of_the_ranks_and_nodes_that_it_had(job):
    level = job.level(every_n_steps=100)
    for trainer in ranks(job, 2, levels=[level]):
        trainer.capture(step=3)
        assert steps(trainer) == [3]  # its keeper heard of the start by now
        trainer.kill()
    later = [job.start(rank=(rank, 2), levels=[level], elsewhere=True) for rank in range(2)]
    for trainer in later:
        assert isinstance(trainer.connect(), float)
    for trainer in later:
        trainer.begin_start()
        assert steps(trainer) == [3]  # its keeper heard of the later start by now
    for trainer in later:
        trainer.kill()
    os.kill(job.keeper_pid(), signal.SIGTERM)

    assert until(job.is_gone)
    found = inventory_of(open_storage(level["url"])).entries
    assert [(entry.step, entry.start, entry.file) for entry in found] == [(3, START, "node-00000-of-00001")] * 2
    assert [(entry.rank, entry.world_size) for entry in found] == [(0, 2), (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)], ids=["fewer", "more"])
def test_other_nodes_read_what_an_earlier_start_left_as_of_the_ranks_that_it_had(job, before, now):
    for trainer in ranks(job, before):
        trainer.capture(step=3)
        assert steps(trainer) == [3]  # its keeper heard of the start by now
        trainer.kill()
    later = [job.start(rank=(rank, now)) for rank in range(now)]
    for trainer in later:
        assert isinstance(trainer.connect(), float)
    for trainer in later:
        trainer.begin_start()
        assert 3 in steps(trainer) or before == 1  # its keeper heard of the later start by now
    secret = draw_secret()
    port = later[0].serve_peers(secret=secret)

    with contextlib.closing(PeerReader(secret, ("127.0.0.1", port))) as reader:
        what = PartOf(START, 3, 1)
        part = memoryview(bytearray(reader.size(what)))
        reader.read_into(what, 0, part)
        found = [rank for rank, *_ in read_index(lambda at, length: part[at : at + length], len(part))]
        assert found == [*range(before)]
        for number in range(before):
            assert reader.size(SlotOf(number, 1, "image")) > 0


@pytest.mark.slow
def test_what_ranks_left_that_the_next_start_does_not_have_stays_until_a_snapshot_of_it_is_durable(job):
    level = job.level()
    pathlib.Path(level["url"]).write_text("in the way of the level's directory")
    for trainer in ranks(job, 2, levels=[level]):
        trainer.capture(step=1)
        assert steps(trainer) == [1]  # its keeper heard of the start by now
        trainer.kill()
    keeper = job.keeper_pid()

    alone = job.start(rank=(0, 1), start=new_id(), levels=[level])
    alone.connect()
    assert alone.reserve(count=3) == 3
    alone.capture(step=2, must=True)
    until(lambda: any(text for _, text in alone.failures()))
    assert len(slots_of(keeper)) == 6
    pathlib.Path(level["url"]).unlink()

    until(lambda: len(slots_of(keeper)) == 3)
    assert steps_at(level["url"]) == [2]
