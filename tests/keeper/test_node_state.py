"""What people get to know of a keeper, from a core that is fed by hand."""

import os
import time

import pytest
from msgspec.structs import replace
from support.fed_keeper import IMAGE_BYTES, META_BYTES, FedKeeper, trainer_state

from lazysnap.core.messages import JobSettings, LevelSettings
from lazysnap.memory.slots import slot_bytes

RUN = "ab" * 8
START = 0x5000
LEVEL = LevelSettings("/level", every_n_steps=1, storage_options={"secret": "hunter2hunter2"})
JOB = JobSettings(RUN, (LEVEL,), ranks=(4,), world_size=8, node=0, num_nodes=1)


@pytest.fixture
def keeper():
    fed = FedKeeper()
    yield fed
    fed.close()


@pytest.fixture
def trainer(keeper):
    state = trainer_state(JOB, START)
    keeper.report(state)
    return state


def test_before_the_first_start_there_is_no_state(keeper):
    keeper.report(replace(trainer_state(JOB, 0), job=None))

    assert keeper.state() is None


def test_what_a_trainer_captured_and_a_level_stored_is_told(keeper, trainer):
    before_ns = time.time_ns()
    keeper.capture(trainer, 1)
    keeper.capture(trainer, 2)

    state = keeper.state()

    assert (state.run_id, state.node, state.nodes, state.common_step) == (RUN, 0, 1, 2)
    [rank] = state.ranks
    assert (rank.rank, rank.is_training, rank.pid, rank.reached, rank.waited_s) == (4, True, os.getpid(), 2, 0.25)
    assert [capture.step for capture in rank.captures] == [1, 2]
    assert before_ns <= rank.captures[0].taken_ns < rank.captures[1].taken_ns <= time.time_ns()
    assert rank.captures[0].copied_ns == 1_000_000
    assert (rank.slots, rank.memory_bytes, rank.file_bytes) == (3, 3 * slot_bytes(META_BYTES, IMAGE_BYTES), 0)
    assert 0 <= time.time() - rank.since_s < 60
    assert rank.lingers_s is None
    [level] = state.levels
    assert (level.url, level.newest, level.storing, level.is_failing, level.failure) == ("/level", 2, None, False, "")
    assert level.bytes_per_s == IMAGE_BYTES / 0.5
    assert before_ns <= level.complete_ns <= time.time_ns()
    assert state.problems == []


def test_what_is_being_stored_is_told_with_its_size(keeper, trainer):
    keeper.is_writing_held = True
    keeper.capture(trainer, 1)

    [level] = keeper.state().levels

    assert (level.storing, level.total_bytes, level.newest) == (1, IMAGE_BYTES, None)


def test_a_level_that_fails_is_told_without_its_secrets(keeper, trainer):
    keeper.failing[0] = "no access with hunter2hunter2"
    keeper.report(replace(trainer, required=(1,)))
    keeper.capture(trainer, 1)

    [level] = keeper.state().levels

    assert level.is_failing
    assert level.failure == "no access with ***"
    assert time.time_ns() - level.failed_ns < 60e9
    assert level.waiting == 1


def test_after_the_death_of_its_trainer_memory_waits(keeper, trainer):
    keeper.capture(trainer, 1)
    keeper.capture(trainer, 2, is_whole=False)
    keeper.die()

    state = keeper.state()

    [rank] = state.ranks
    assert not rank.is_training
    assert 0 < rank.lingers_s <= 60
    assert (rank.end.run_id, rank.end.step) == (RUN, 2)
    assert rank.reached == 2
    assert [capture.step for capture in rank.captures] == [1]
    assert state.common_step == 1


def test_a_capture_that_is_gone_again_has_no_time(keeper, trainer):
    """Its trainer began another one in the slot after the keeper had read the words."""
    keeper.capture(trainer, 1)
    slot = max(keeper.trainer_slots, key=lambda slot: slot.view().sequence)
    slot.begin(START, 9, sequence=100, image_bytes=1, meta=b"{}")

    assert keeper.state().ranks[0].captures == []
