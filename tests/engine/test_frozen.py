"""Frozen tensors are stored once; whoever changes them all the same gets right snapshots, too."""

import os
import signal

import pytest
import torch
from frozen_damage import FLIPPED, damage, restorable
from small_training import Starter
from support.waiting import until
from tuning import TIMEOUT_S, Tuning, digest

from lazysnap import MemoryLevel
from lazysnap.memory.arena import SlotPhase

SMALL = 1 << 20


class FrozenStarter(Starter):
    def start(self, *levels, ready=True, width=512, layers=2, extra=None, **settings):
        tuning = Tuning(self.config(*levels, **settings), width, layers, extra)
        self.trainings.append(tuning)
        if ready:
            assert tuning.engine._wait_ready(TIMEOUT_S)
        return tuning


@pytest.fixture
def job():
    starter = FrozenStarter()
    yield starter
    starter.clean_up()


def image_of(tuning):
    """The slot of the frozen tensors."""
    return tuning.engine._client.frozen_slot(tuning.engine._recorder.frozen.reference().digest)


def images_of(tuning):
    client = tuning.engine._client
    return sorted(client.inventory(TIMEOUT_S).frozen)


def bare(job, steps):
    """As it would have gone without any snapshot."""
    tuning = Tuning(job.config())
    for _ in range(steps):
        tuning.train()
    return tuning


def memory_of(pid):
    """Bytes of shared memory that a process holds."""
    folder = f"/proc/{pid}/fd"
    held = {}
    for name in os.listdir(folder):
        try:
            if "lazysnap-slot" in os.readlink(f"{folder}/{name}"):
                status = os.stat(f"{folder}/{name}")
                held[status.st_ino] = status.st_size
        except FileNotFoundError:
            continue
    return sum(held.values())


def keeper_pid(tuning):
    return tuning.engine._client.keeper_pid


def matches(tuning, snapshot):
    """Whether a snapshot holds what the live objects held at its step."""
    fresh = {}
    modules = [name for name, value in tuning.state.items() if isinstance(value, torch.nn.Module)]
    for index, name in enumerate(modules):
        fresh |= {f"{index} {key}": digest(value) for key, value in snapshot.state[name].items()}
    for index, state in snapshot.state["optimizer"]["state"].items():
        fresh |= {f"{index}.{key}": digest(value) for key, value in state.items()}
    return fresh == tuning.held[snapshot.step]


@pytest.mark.slow
def test_a_snapshot_costs_the_adapters_only_and_memory_holds_the_base_once(job):
    tuning = job.start(width=1024, layers=12)
    base = sum(p.nbytes for p in tuning.model.parameters() if not p.requires_grad)
    tuning.run(1, 3)

    statistics = tuning.engine.statistics()
    assert tuning.began == [True] * 3
    assert base > 50e6
    assert statistics.shard_bytes < 2e6
    assert base < statistics.frozen_bytes < base + SMALL
    assert len(images_of(tuning)) == 1
    assert memory_of(keeper_pid(tuning)) < base + 2 * (statistics.shard_bytes + 12 * SMALL)
    assert matches(tuning, tuning.engine._fetch("latest"))


def test_a_restart_goes_on_bit_for_bit_and_nothing_is_copied_again(job):
    straight = bare(job, 6)
    first = job.start()
    first.run(1, 4)
    inode = os.fstat(image_of(first).fd).st_ino
    job.crash(first)

    second = job.start(ready=False)
    snapshot = second.engine.restore("latest")
    assert second.engine._wait_ready(TIMEOUT_S)
    second.run(5, 6)

    assert (snapshot.step, snapshot.level) == (4, "memory")
    assert second.began == [True] * 2
    assert second.facts() == straight.facts()
    # Filling counts the sequence number up.
    assert (os.fstat(image_of(second).fd).st_ino, image_of(second).status().sequence) == (inode, 1)
    assert len(images_of(second)) == 1


@pytest.mark.slow
def test_a_killed_keeper_is_replaced_and_gets_the_image_from_its_trainer(job):
    tuning = job.start()
    tuning.run(1, 2)
    inode = os.fstat(image_of(tuning).fd).st_ino
    os.kill(keeper_pid(tuning), signal.SIGKILL)
    until(lambda: tuning.engine.statistics().keepers_lost == 1)

    step = tuning.run_until_captured(3)

    assert os.fstat(image_of(tuning).fd).st_ino == inode
    assert image_of(tuning).status().sequence == 1
    assert len(images_of(tuning)) == 1
    job.crash(tuning)
    snapshot = job.start(ready=False).engine._fetch("latest")
    assert snapshot.step == step
    assert matches(tuning, snapshot)


@pytest.mark.slow
def test_a_frozen_teacher_that_is_averaged_in_place_is_noticed_and_every_snapshot_is_right(job, caplog):
    teacher = torch.nn.Linear(512, 512).requires_grad_(False)
    tuning = job.start(extra={"teacher": teacher})
    both = tuning.engine._recorder.frozen.reference()

    @torch.no_grad()
    def average():
        for kept, new in zip(teacher.parameters(), tuning.model[0].base.parameters(), strict=True):
            kept.mul_(0.9).add_(new, alpha=0.1)

    tuning.run(1, 2)
    assert tuning.began == [True, True]
    assert matches(tuning, tuning.engine._fetch("latest"))
    tuning.after_step = average
    for step in range(3, 40):
        tuning.run(step, step)
        tuning.engine._wait_ready(TIMEOUT_S)
        snapshot = tuning.engine._fetch("latest")
        assert matches(tuning, snapshot)
        if sum(tuning.began[2:]) >= 4:
            break

    statistics = tuning.engine.statistics()
    assert snapshot.step == step
    assert statistics.frozen_changed >= 2
    assert len([record for record in caplog.records if "need no gradient" in record.message]) == 1
    # What does not change is still stored apart.
    smaller = tuning.engine._recorder.frozen.reference()
    assert SMALL < smaller.size_bytes < both.size_bytes
    assert not any(name.startswith("teacher") for name in tuning.engine._recorder.frozen.names)


@pytest.mark.slow
def test_a_base_that_is_unfrozen_in_the_middle_is_captured_from_then_on(job):
    tuning = job.start()
    tuning.run(1, 2)
    small = tuning.engine.statistics().shard_bytes
    for parameter in tuning.model[0].base.parameters():
        parameter.requires_grad_(True)
    tuning.optimizer.add_param_group({"params": list(tuning.model[0].base.parameters()), "lr": 1e-3})

    step = tuning.run_until_captured(3)
    last = tuning.run_until_captured(step + 1)

    statistics = tuning.engine.statistics()
    assert statistics.frozen_changed == 0
    assert statistics.shard_bytes > small + 3 * 512 * 512 * 4
    assert statistics.frozen_bytes < 1.5 * 512 * 512 * 4
    tuning.run(last + 1, last + 3)
    last += 3
    until(lambda: len(images_of(tuning)) == 1)  # what no capture in memory refers to any more is let go
    snapshot = tuning.engine._fetch("latest")
    assert snapshot.step == last
    assert matches(tuning, snapshot)
    job.crash(tuning)
    other = job.start(ready=False)
    other.optimizer.add_param_group({"params": list(other.model[0].base.parameters()), "lr": 1e-3})
    other.engine.restore("latest")
    assert other.facts() == tuning.held[last]


@pytest.mark.slow
def test_a_damaged_image_in_memory_gives_way_to_the_one_on_storage_and_is_replaced(job, tmp_path):
    tuning = job.start(tmp_path)
    tuning.run(1, 3)
    assert tuning.engine.wait(3, until="durable", timeout_s=TIMEOUT_S)
    image = image_of(tuning).image
    image[100_000] ^= 1
    del image
    job.crash(tuning)

    second = job.start(tmp_path, ready=False)
    snapshot = second.engine.restore("latest")
    assert (snapshot.step, snapshot.level) == (3, "memory")
    assert any("frozen tensors" in problem and "memory" in problem for problem in snapshot.skipped)
    assert matches(tuning, snapshot)

    assert second.engine._wait_ready(TIMEOUT_S)
    second.run(4, 4)

    assert second.began == [True]
    assert image_of(second).status().phase is SlotPhase.WHOLE
    assert matches(second, second.engine._fetch("latest"))


@pytest.mark.slow
def test_a_fresh_run_in_the_same_memory_uses_the_image_of_the_last_one(job, tmp_path):
    first = job.start(tmp_path)
    first.run(1, 2)
    job.crash(first)

    second = job.start(tmp_path)
    second.run(1, 3)
    assert image_of(second).status().sequence == 1
    assert second.engine.close()

    reader = job.start(tmp_path, ready=False)
    snapshot = reader.engine._fetch("latest")
    assert snapshot.step == 3
    assert matches(second, snapshot)


@pytest.mark.slow
def test_parts_that_survive_at_different_levels_make_one_snapshot(job, tmp_path):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    first = job.start(fast, slow)
    first.run(1, 2)
    assert first.engine.close()
    for gone in [*fast.glob("frozen-*/*"), *slow.glob("step-*/*")]:
        gone.unlink()

    snapshot = job.start(fast, slow, ready=False).engine._fetch("latest")

    assert (snapshot.step, snapshot.level) == (2, str(fast))
    assert matches(first, snapshot)


@pytest.mark.slow
def test_too_little_memory_for_the_image_is_said_once_and_training_goes_on(job, caplog):
    tuning = job.start(ready=False, width=1024, memory=MemoryLevel(max_bytes=10 << 20, linger_s=60))
    tuning.engine._prepare()
    tuning.run(1, 1)

    def is_said():
        tuning.run(1, 1)
        return [record for record in caplog.records if "the frozen tensors need" in record.message]

    until(is_said)

    tuning.run(2, 4)
    assert tuning.began[-3:] == [False] * 3
    warnings = [record for record in is_said() if record.levelname == "WARNING"]
    assert len(warnings) == 1


@pytest.mark.slow
def test_weights_that_are_loaded_before_the_first_capture_are_stored_apart_all_the_same(job):
    tuning = job.start()
    other = torch.nn.Linear(512, 512)
    with torch.no_grad():
        tuning.model[0].base.weight.copy_(other.weight)
    tuning.model[1].base.weight.data = other.weight.detach().clone()

    tuning.run_until_captured(1)

    statistics = tuning.engine.statistics()
    assert statistics.frozen_changed == 0
    assert statistics.shard_bytes < SMALL < statistics.frozen_bytes
    assert matches(tuning, tuning.engine._fetch("latest"))


@pytest.mark.slow
def test_a_teacher_that_is_averaged_from_the_first_step_on_is_part_of_every_snapshot(job):
    teacher = torch.nn.Linear(512, 512).requires_grad_(False)
    tuning = job.start(extra={"teacher": teacher})

    @torch.no_grad()
    def average():
        teacher.weight.mul_(0.9)

    tuning.after_step = average

    step = tuning.run_until_captured(1)
    last = tuning.run_until_captured(step + 1)

    assert matches(tuning, tuning.engine._fetch("latest"))
    assert tuning.engine._fetch("latest").step == last
    assert tuning.engine._recorder.frozen.names >= {"model.0.base.weight", "teacher.bias"}
    assert "teacher.weight" not in tuning.engine._recorder.frozen.names


@pytest.mark.slow
@pytest.mark.parametrize("restores", [False, True])
def test_a_flipped_bit_of_the_base_on_storage_is_mended_by_the_next_start(job, tmp_path, restores):
    """Memory still has the base; snapshots that are stored from then on can be restored from storage alone."""
    first = job.start(tmp_path)
    first.run(1, 2)
    assert first.engine.wait(2, until="durable", timeout_s=TIMEOUT_S)
    job.crash(first)
    damage(tmp_path, FLIPPED)
    assert restorable(str(tmp_path)) == []

    second = job.start(tmp_path, ready=False)
    if restores:
        assert second.engine.restore("latest").step == 2
    assert second.engine._wait_ready(TIMEOUT_S)
    second.run(3, 3)

    assert second.engine.wait(3, until="durable", timeout_s=TIMEOUT_S)
    assert 3 in restorable(str(tmp_path))
