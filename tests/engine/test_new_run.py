"""Going back by choice begins a new run: nothing is lost on either side, and what is reported is true."""

import os
import signal
import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from small_training import TIMEOUT_S, Training, end
from support.stored import newest_directory, runs_at, snapshots_at
from support.waiting import stop, until

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError, SnapshotNotFound

pytestmark = pytest.mark.slow


def steps_of_runs(path):
    """Per run, the newest first: the steps of its complete snapshots, the greatest first."""
    return list(runs_at(path).values())


def train(training, first, last):
    """One step at a time, so that storage has each of them."""
    for step in range(first, last + 1):
        training.run(step, step)
        assert training.engine.wait(step, timeout_s=TIMEOUT_S)


def start_with_a_named_step(job, path):
    """Step 4 is called x, and 5 to 8 follow; storage keeps two and x."""
    training = job.start(path)
    train(training, 1, 4)
    training.engine.keep("x")
    train(training, 5, 8)
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    until(lambda: steps_of_runs(path) == [[8, 7, 4]])  # deletions may follow
    return training


@pytest.mark.parametrize("ends", ["same process", "crashed"])
def test_the_branch_is_neither_deleted_for_nor_overshadowed_by_what_was_left_behind(job, tmp_path, caplog, ends):
    training = start_with_a_named_step(job, tmp_path)
    if ends == "crashed":
        job.crash(training)
        training = job.start(tmp_path, ready=False)

    snapshot = training.engine.restore("x")

    assert snapshot.step == 4
    assert f"begins at step 4 of run {snapshot.run_id[:8]}" in caplog.text
    assert f'restore("run:{snapshot.run_id[:8]}' in caplog.text
    assert training.engine._wait_ready(TIMEOUT_S)
    train(training, 5, 5)
    assert training.engine.statistics().last_durable_step == {str(tmp_path): 5}
    assert steps_of_runs(tmp_path) == [[5], [8, 7, 4]]
    train(training, 6, 7)
    assert training.engine.close()
    until(lambda: steps_of_runs(tmp_path) == [[7, 6], [8, 7, 4]])  # a keeper deletes after close, too
    assert f"/step-00000007-{newest_run(tmp_path)}-" in newest_directory(tmp_path)

    last = job.start(tmp_path, ready=False).engine
    assert last.restore("latest").step == 7
    # Named in both runs or in one: the newest run that has it is meant.
    assert last._fetch("x").step == 4
    assert last._fetch(8).run_id == snapshot.run_id


def newest_run(path):
    return snapshots_at(path)[0].run_id


def test_until_the_branch_has_a_snapshot_latest_is_what_it_was_and_the_branch_point_stays(job, tmp_path):
    """The trainer dies right after it went back; what memory held beyond storage is not lost either."""
    training = start_with_a_named_step(job, tmp_path)
    old = training.facts()
    job.crash(training)
    second = job.start(tmp_path, ready=False)
    assert second.engine.restore("x").step == 4
    assert second.engine._wait_ready(TIMEOUT_S)
    job.crash(second)

    third = job.start(tmp_path, ready=False)

    assert third.engine.restore("latest").step == 8
    assert third.facts() == old
    assert third.engine._fetch("x").step == 4


def test_memory_of_what_was_left_behind_outlasts_the_way_back_but_not_the_branch(job):
    """Without storage: the newest capture is the restart point until the branch has one, and never afterwards."""
    training = job.start()
    training.run(1, 6)
    assert training.engine.wait(6, until="captured", timeout_s=TIMEOUT_S)
    [back] = {entry.step for entry in training.engine._client.memory(TIMEOUT_S).entries} - {6}

    assert training.engine.restore(back).step == back
    job.crash(training)
    second = job.start(ready=False)
    assert second.engine._fetch("latest").step == 6
    assert second.engine.restore(back).step == back
    assert second.engine._wait_ready(TIMEOUT_S)
    second.run(2, 2)
    job.crash(second)

    assert job.start(ready=False).engine.restore("latest").step == 2


def test_a_capture_of_the_run_that_was_left_deletes_no_branch_point_when_storage_is_back(job, tmp_path):
    """Storage was away when step 2 was captured, and when the training went back to step 1."""
    path, away = tmp_path / "level", tmp_path / "away"
    level = PersistentLevel(str(path), every_n_steps=1, keep_last=1)

    def start():
        training = Training(SnapshotConfig(levels=(level,), job_id=job.job_id, memory=job.config().memory))
        job.trainings.append(training)
        return training

    training = start()
    assert training.engine._wait_ready(TIMEOUT_S)
    train(training, 1, 1)
    path.rename(away)
    path.write_text("not a directory")
    training.run(2, 2)
    assert not training.engine.wait(timeout_s=5)
    job.crash(training)
    second = start()

    assert second.engine.restore(1).new_run is not None
    path.unlink()
    away.rename(path)
    assert second.engine._wait_ready(TIMEOUT_S)
    train(second, 2, 3)
    end(second)  # the keeper deletes old snapshots behind ``close``, too
    assert steps_of_runs(path) == [[3], [1]]


def test_a_name_given_on_the_branch_just_before_the_keeper_dies_is_not_taken_for_one_that_is_stored(job, tmp_path):
    """Step 5 of the branch is not durable because step 8 of the run that was left is."""
    training = start_with_a_named_step(job, tmp_path)
    engine = training.engine
    engine.restore("x")
    assert engine.statistics().last_durable_step == {}
    keeper = engine._client.keeper_pid
    stop(keeper)
    training.run(5, 5)
    assert training.began[-1]
    assert engine.keep("y") == 5
    os.kill(keeper, signal.SIGKILL)
    until(lambda: engine.statistics().keepers_lost == 1)
    assert engine._wait_ready(TIMEOUT_S)

    train(training, 6, 9)

    assert engine.close()
    until(lambda: steps_of_runs(tmp_path) == [[9, 8, 5], [8, 7, 4]])  # a keeper deletes after close, too
    assert job.start(tmp_path, ready=False).engine._fetch("y").step == 5


def test_a_run_can_be_chosen_by_the_first_digits_of_its_id(job, tmp_path):
    training = start_with_a_named_step(job, tmp_path)
    assert training.engine.close()
    other = job.start(tmp_path)
    train(other, 1, 2)
    assert other.engine.close()
    third = job.start(tmp_path, ready=False).engine
    new, old = (found.run_id for found in snapshots_at(tmp_path) if found.step in (2, 8))

    assert third._fetch("latest").step == 2
    assert third._fetch(f"run:{old}").step == 8
    assert third._fetch(f"run:{old.upper()}@4").step == 4
    assert third._fetch(f"run:{new}").new_run is None
    message = rf"no complete snapshot of step 3 of run {old}; .* steps 4, .*8, and the names x; the runs there.*step 8"
    with pytest.raises(SnapshotNotFound, match=message):
        third._fetch(f"run:{old}@3")
    unknown = next(digit for digit in "0123456789abcdef" if digit not in (new[0], old[0]))
    with pytest.raises(
        SnapshotNotFound, match=rf"no run begins with '{unknown}'; .*{new[:8]}[0-9a-f]* \(newest step 2\), {old[:8]}"
    ):
        third._fetch(f"run:{unknown}")
    for odd in ("run:", "run:wxyz", "run:1f3a@", "run:1f3a@x", "run:1f3a@-1", "run:@3", "run:" + "1" * 17):
        with pytest.raises(ConfigError, match="the first digits of a run id"):
            third._fetch(odd)
    with pytest.raises(ConfigError):
        third.keep(f"run:{old}")


def test_a_fresh_start_in_a_used_directory_leaves_the_run_that_is_there(job, tmp_path):
    training = start_with_a_named_step(job, tmp_path)
    assert training.engine.close()
    [old] = runs_at(tmp_path)

    fresh = job.start(tmp_path)
    train(fresh, 1, 3)
    assert fresh.engine.close()

    back = job.start(tmp_path, ready=False).engine
    assert back.restore(f"run:{old}").step == 8


def test_after_a_clock_was_set_back_latest_is_still_the_run_that_began_last(job, tmp_path, monkeypatch):
    now = time.time_ns
    with monkeypatch.context() as patched:
        patched.setattr(time, "time_ns", lambda: now() + 86_400 * 10**9)
        ahead = job.start(tmp_path)
        train(ahead, 1, 2)
        assert ahead.engine.close()
    for manifest in tmp_path.glob("step-*/*.json"):  # nothing of that run can be read
        manifest.unlink()

    fresh = job.start(tmp_path, ready=False)
    assert fresh.engine.restore("latest") is None
    assert fresh.engine._wait_ready(TIMEOUT_S)
    train(fresh, 1, 1)
    assert fresh.engine.close()

    assert job.start(tmp_path, ready=False).engine.restore("latest").step == 1
    assert max(path.name.split("-")[2] for path in tmp_path.glob("step-*")) == newest_run(tmp_path)


class Shattered(MemoryFileSystem):
    """A storage whose package raises an error of its own at each listing."""

    protocol = ("webhdfs",)

    def ls(self, path, detail=True, **settings):
        raise FileExistsError("the endpoint speaks another protocol")


@pytest.fixture
def shattered():
    fsspec.register_implementation("webhdfs", Shattered, clobber=True)
    yield "webhdfs://host/run"
    fsspec.register_implementation("webhdfs", "fsspec.implementations.webhdfs.WebHDFS", clobber=True)


def test_all_steps_leaves_out_a_level_whose_package_raises_anything(job, tmp_path, shattered):
    training = job.start(tmp_path)
    train(training, 1, 2)
    assert training.engine.close()

    both = job.start(shattered, tmp_path, ready=False)

    assert both.engine.all_steps() == [1, 2]
