"""A restart reads manifests of the newest snapshots first. It finds older ones all the same."""

import pytest
from small_training import TIMEOUT_S
from support.damage import flip

from lazysnap import PersistentLevel
from lazysnap.errors import SnapshotNotFound
from lazysnap.levels.node_file import FilePlace
from lazysnap.restore import survey

STEPS = 6
FIRST_READ = 2


@pytest.fixture
def stored(job, tmp_path, monkeypatch):
    """Steps 1 to 6 at a level, and nothing in memory. Returns: a function that makes an engine there."""
    monkeypatch.setattr(survey, "NEWEST", FIRST_READ)
    monkeypatch.setattr(job, "config", keeping_all(job.config))
    training = job.start(tmp_path)
    for step in range(1, STEPS + 1):
        training.run(step, step)
        assert training.engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
    assert training.engine.close()
    return lambda: job.start(tmp_path, ready=False).engine


def keeping_all(config):
    def with_levels(*levels, **settings):
        made = config(**settings)
        kept = tuple(PersistentLevel(str(path), every_n_steps=1, keep_last=STEPS) for path in levels)
        object.__setattr__(made, "levels", kept)
        return made

    return with_levels


@pytest.fixture
def read_steps(monkeypatch):
    """The steps whose manifests were read."""
    steps = []
    read_manifest = FilePlace.read_manifest

    def noted(place):
        steps.append(int(place.directory.split("-")[1]))
        return read_manifest(place)

    monkeypatch.setattr(FilePlace, "read_manifest", noted)
    return steps


def damage(level, *steps):
    for step in steps:
        flip(next(level.glob(f"step-{step:08d}-*/*.json")))


@pytest.mark.slow
def test_older_manifests_are_not_read(stored, read_steps):
    assert stored()._fetch("latest").step == STEPS
    assert set(read_steps) == {STEPS - 1, STEPS}


@pytest.mark.slow
def test_where_none_of_the_newest_is_whole_an_older_one_is_found(stored, tmp_path):
    damage(tmp_path, 4, 5, 6)

    snapshot = stored()._fetch("latest")

    assert snapshot.step == 3
    assert {reason.split()[1] for reason in snapshot.skipped} == {"4", "5", "6"}


@pytest.mark.slow
def test_where_none_of_the_newest_can_be_read_an_older_one_is_found(stored, tmp_path):
    for step in (5, 6):
        flip(next(tmp_path.glob(f"step-{step:08d}-*/*.safetensors")))

    snapshot = stored()._fetch("latest")

    assert snapshot.step == 4
    assert len(snapshot.skipped) == 2


@pytest.mark.slow
def test_an_older_one_that_is_asked_for_is_found_and_begins_a_new_run(stored, read_steps):
    snapshot = stored()._fetch(2)

    assert snapshot.step == 2
    assert snapshot.new_run.newest.step == STEPS
    assert set(read_steps) == {2, STEPS - 1, STEPS}


@pytest.mark.slow
def test_what_is_not_there_is_refused_with_all_that_is(stored):
    with pytest.raises(SnapshotNotFound, match=r"there are the steps 1, 2, 3, 4, 5, 6"):
        stored()._fetch(9)
    with pytest.raises(SnapshotNotFound, match="newest step 6"):
        stored()._fetch("run:ffff")
