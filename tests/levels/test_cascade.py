"""A training over memory, local disk and a real S3: each gets its own, the next one stands in for what is lost."""

import pathlib
import sys
import uuid

import pytest

pytest.importorskip("obstore")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "engine"))

import seaweed
from small_training import TIMEOUT_S, Training
from support.catalogue import inventory_of
from support.waiting import until

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.engine.stored import store_everywhere
from lazysnap.levels.store import open_storage


@pytest.fixture
def levels(s3_server, s3_url, tmp_path):
    return (
        PersistentLevel(tmp_path / "local", every_n_steps=1),
        PersistentLevel(s3_url, every_n_steps=1, keep_last=3, storage_options=s3_server.options(), timeout_s=10),
    )


@pytest.fixture
def start(levels):
    job_id = uuid.uuid4().hex
    trainings = []

    def make():
        config = SnapshotConfig(levels=levels, job_id=job_id, memory=MemoryLevel(linger_s=0))
        trainings.append(Training(config))
        assert trainings[-1].engine._wait_ready(TIMEOUT_S)
        return trainings[-1]

    yield make
    for training in trainings:
        training.engine.close(drain=False)


def steps_at(level):
    storage = open_storage(level.url, options=level.storage_options)
    return sorted(entry.step for entry in inventory_of(storage).entries)


def test_what_the_disk_lost_comes_back_from_s3(start, levels, tmp_path):
    local, remote = levels
    first = start()
    first.run(1, 3)
    assert first.engine.close()
    assert steps_at(local)[-1] == steps_at(remote)[-1] == 3
    facts = first.facts()
    (tmp_path / "local").rename(tmp_path / "lost")  # its keeper may still write the last events

    second = start()
    snapshot = second.engine.restore("latest")

    assert (snapshot.step, snapshot.level) == (3, remote.url)
    assert second.facts() == facts


@pytest.mark.slow
def test_a_dead_server_costs_s3_its_snapshots_and_nothing_else(start, levels, s3_server):
    local, remote = levels
    training = start()
    training.run(1, 2)
    assert store_everywhere(training.engine._run, 2, TIMEOUT_S)
    s3_server.kill()
    try:
        training.run(3, 4)
        # What was under way there (deleting, naming) has a deadline of its own, and then the copy has one.
        until(lambda: training.engine.statistics().level_failures[remote.url], timeout_s=4 * remote.timeout_s)
        assert not store_everywhere(training.engine._run, 4, 1)
        statistics = training.engine.statistics()
        assert statistics.level_failures[remote.url] >= 1
        assert statistics.last_durable_step[local.url] == 4
        assert training.began == [True] * 4
    finally:
        s3_server.start()

    training.run(5, 5)

    # A copy that began while the server was dead may need its deadline first.
    assert store_everywhere(training.engine._run, 5, 4 * remote.timeout_s)
    assert steps_at(remote)[-1] == 5


def test_no_secret_is_shown(levels):
    secrets = seaweed._SECRETS.values()

    assert not any(secret in repr(levels) for secret in secrets)
