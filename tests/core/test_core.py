"""Single decisions of the core that the model shows too rarely, or not at all."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct, structs
from support.core_world import slot_view

from lazysnap.config import SnapshotConfig
from lazysnap.core import actions
from lazysnap.core.actions import Hold, Listed, ListLevel, SlotsSeen, TrainerReported, WriteLevel
from lazysnap.core.core import Core
from lazysnap.core.job import SILENCE_S, UNPROTECTED_S, UNREACHED_S, JobCore
from lazysnap.core.level_grants import LevelGrants
from lazysnap.core.lifecycle import START_GRACE_S, Phase
from lazysnap.core.messages import (
    Farewell,
    GrantProgress,
    JobSettings,
    LevelOrder,
    LevelReport,
    LevelSettings,
    MemoryWish,
    NamedStep,
    Order,
    RedundancySettings,
    Report,
    StepKey,
    TrainerState,
)
from lazysnap.core.node import NodeLevel
from lazysnap.core.ranks import AWAY_GRACE_S, MEMORY_RETRY_S, MEMORY_WAIT_S, Presence
from lazysnap.memory.slot_choice import SlotPhase, SlotView

START = 7
LEVEL = LevelSettings("level", every_n_steps=1)
SETTINGS = JobSettings("run", (LEVEL,))
PAIR = structs.replace(SETTINGS, redundancy=RedundancySettings(members=(0, 1, 2), parity=1), world_size=3, num_nodes=3)
PARITY = RedundancySettings(members=(0, 1, 2), parity=2)
STATE = TrainerState(local_rank=0, start=START, step=-1, job=SETTINGS, memory=MemoryWish(3, 0, 1))


def digest_of(settings: JobSettings) -> int:
    """Return the hash by which keepers recognize the settings of their job."""
    return JobCore(settings, itertools.count(1), {}, 0.0).digest


def each_changed(settings: Struct) -> Iterator[tuple[str, Any]]:
    """Yield the name of each field, and the settings with another value there."""
    for field in structs.fields(settings):
        value = getattr(settings, field.name)
        match value:
            case bool():
                other: object = not value
            case int() | float():
                other = value + 1
            case str():
                other = f"{value}x"
            case dict():
                other = {}
            case tuple():
                other = value[:-1]
            case RedundancySettings():
                other = None
            case None:
                other = 5
        yield field.name, structs.replace(settings, **{field.name: other})


def slot(slot_id: int, step: int, *, is_whole: bool = True, is_held: bool = False) -> SlotView:
    return slot_view(slot_id, StepKey(START, step), step + 1, is_whole=is_whole, is_held=is_held)


def empty(slot_id: int) -> SlotView:
    return slot_view(slot_id, None, 0)


THREE_EMPTY = (empty(0), empty(1), empty(2))


class Driver:
    """A core, its clock, and the trainers that report to it."""

    def __init__(self) -> None:
        self.core = Core(1, 0.0)
        self.now = 0.0

    def step(self, event: actions.Event) -> list[actions.Action]:
        return self.core.step(event, self.now)

    def report(self, state: TrainerState, pid: int = 100, connection: int = 1) -> list[actions.Action]:
        return self.step(TrainerReported(connection, pid, state))

    def see(self, *ranks: tuple[SlotView, ...]) -> list[actions.Action]:
        return self.step(SlotsSeen(dict(enumerate(ranks))))

    def sent(self, done: list[actions.Action], rank: int = 0):
        """Return the last state that was sent to a rank."""
        states = [action.state for action in done if isinstance(action, actions.SendToTrainer) and action.rank == rank]
        return states[-1]

    def pass_time(self, seconds: float) -> list[actions.Action]:
        self.now += seconds
        return self.step(actions.PlainEvent.TIME_PASSED)


def of_kind(done: list[actions.Action], kind: type) -> list:
    return [action for action in done if isinstance(action, kind)]


def driver_with_a_grant() -> tuple[Driver, int]:
    """A core that granted a step; that step."""
    driver = Driver()
    done = driver.report(STATE)
    driver.see(THREE_EMPTY)
    [task] = of_kind(done, ListLevel)
    driver.step(Listed(task.number, ()))
    grant = driver.core.job.node.levels[0].grant
    assert grant is not None
    return driver, grant.step


def test_a_capture_that_is_being_written_is_held_and_then_stored():
    driver, step = driver_with_a_grant()

    done = driver.see((slot(0, step, is_whole=False), empty(1), empty(2)))
    assert Hold(0, 0, sequence=step + 1, num_kept=1) in done

    held = slot(0, step, is_whole=False, is_held=True)
    done = driver.see((held, empty(1), empty(2)))
    assert of_kind(done, WriteLevel)


def test_a_capture_is_never_held_once_its_slot_may_be_chosen():
    """The trainer may have read HELD before, and begin to write there now."""
    driver, step = driver_with_a_grant()

    done = driver.see((slot(0, step), slot(1, step + 1), slot(2, step + 2)))

    level = driver.core.job.node.levels[0]
    assert not of_kind(done, Hold)
    assert level.progress is not GrantProgress.WRITING
    assert level.grant is None or level.grant.step > step


class TestTrainers:
    def test_another_process_is_refused_while_the_first_one_lives(self):
        driver, _ = driver_with_a_grant()

        done = driver.report(STATE, pid=200, connection=2)

        assert "process 100" in driver.sent(done).refusal
        assert actions.CloseConnection(2) in done
        assert driver.core.ranks.all[0].pid == 100

    def test_a_process_that_lost_its_connection_has_a_moment_to_come_back(self):
        driver, _ = driver_with_a_grant()
        driver.step(actions.ConnectionLost(1))

        refused = driver.report(STATE, pid=200, connection=2)
        driver.now += AWAY_GRACE_S
        accepted = driver.report(STATE, pid=200, connection=3)

        assert driver.sent(refused).refusal
        assert not driver.sent(accepted).refusal

    def test_a_process_that_still_writes_is_not_replaced(self):
        driver, step = driver_with_a_grant()
        driver.see((slot(0, step, is_whole=False), empty(1), empty(2)))
        driver.step(actions.ConnectionLost(1))
        driver.now += AWAY_GRACE_S

        assert driver.sent(driver.report(STATE, pid=200, connection=2)).refusal

    def test_what_a_dead_trainer_left_half_done_is_voided(self):
        driver, step = driver_with_a_grant()
        driver.see((slot(0, step, is_whole=False), empty(1), empty(2)))

        done = driver.step(actions.ProcessDied(100))

        assert actions.VoidSlot(0, 0, step + 1) in done

    def test_the_last_trainer_of_a_training_that_is_over_is_told_by_the_end_of_the_keeper(self):
        driver, step = driver_with_a_grant()
        driver.see((slot(0, step), empty(1), empty(2)))

        done = driver.report(structs.replace(STATE, is_sealed=True, farewell=Farewell.OVER))

        assert not of_kind(done, actions.CloseConnection)
        assert driver.core.ranks.all[0].presence is Presence.ENDED
        assert driver.core.phase is Phase.DRAINING


class TestMemory:
    def test_a_refusal_is_reported_and_tried_again(self):
        driver = Driver()
        assert of_kind(driver.report(STATE), actions.MakeSlot)

        done = driver.step(actions.MemoryRefused(0, "too little"))
        assert driver.sent(done).memory_refusal == "too little"
        assert not of_kind(driver.pass_time(MEMORY_RETRY_S / 2), actions.MakeSlot)
        assert of_kind(driver.pass_time(MEMORY_RETRY_S / 2), actions.MakeSlot)
        # Until the answer comes there is nothing to wake for: a time in the past would keep the loop busy.
        assert driver.core.wake_at is None or driver.core.wake_at > driver.now

    def test_slots_that_are_about_to_be_returned_are_waited_for_without_a_word(self):
        driver = Driver()
        driver.report(STATE)

        done = driver.step(actions.MemoryRefused(0, ""))

        assert not of_kind(done, actions.SendToTrainer)
        assert of_kind(driver.pass_time(MEMORY_WAIT_S), actions.MakeSlot)

    def test_a_returned_slot_goes_unless_it_is_held(self):
        driver, step = driver_with_a_grant()
        driver.see((slot(0, step, is_held=True), slot(1, step - 1), empty(2)))

        done = driver.report(structs.replace(STATE, returned=(0, 1)))

        assert of_kind(done, actions.FreeSlot) == [actions.FreeSlot(0, 1)]

    def test_slots_of_another_size_do_not_count(self):
        driver = Driver()
        driver.report(STATE)
        small = structs.replace(empty(3), image_capacity_bytes=1)
        driver.see((small,))

        wish = MemoryWish(1, 0, 2)

        assert of_kind(driver.report(structs.replace(STATE, memory=wish)), actions.MakeSlot) == []
        assert of_kind(driver.step(actions.SlotMade(0)), actions.MakeSlot) == [actions.MakeSlot(0, wish)]

    def test_a_trainer_that_restores_gets_what_is_there_and_nothing_is_stored(self):
        driver = Driver()

        done = driver.report(TrainerState(local_rank=0, slots=(5,)))

        assert actions.AdoptSlots(0) in done
        assert driver.core.job is None


class TestStarts:
    def test_a_start_with_the_same_settings_goes_on_with_the_same_job(self):
        driver, _ = driver_with_a_grant()
        job = driver.core.job

        driver.step(actions.ProcessDied(100))
        done = driver.report(structs.replace(STATE, start=START + 1), pid=200, connection=2)

        assert driver.core.job is job
        assert not of_kind(done, actions.BeginJob)

    def test_a_start_with_other_settings_begins_another_job_and_its_jobs_have_new_numbers(self):
        driver = Driver()
        [before] = of_kind(driver.report(STATE), ListLevel)
        driver.step(actions.ProcessDied(100))
        other = structs.replace(SETTINGS, levels=(structs.replace(LEVEL, keep_last=5),))

        done = driver.report(structs.replace(STATE, start=START + 1, job=other), pid=200, connection=2)

        assert actions.CancelTask(before.number) in done
        assert actions.BeginJob(other) in done
        [after] = of_kind(done, ListLevel)
        assert after.number > before.number
        driver.step(Listed(before.number, (StepKey(1, 1),)))
        assert driver.core.job.node.levels[0].stored == set()

    def test_a_thread_that_returns_is_no_more_waited_for_though_its_level_is_gone(self):
        driver = Driver()
        [hanging] = of_kind(driver.report(STATE), ListLevel)
        other = structs.replace(SETTINGS, levels=(structs.replace(LEVEL, url="other"),))
        driver.report(structs.replace(STATE, start=START + 1, job=other), pid=100, connection=1)

        driver.step(Listed(hanging.number, ()))

        assert not driver.core._abandoned[LEVEL.url]

    @pytest.mark.parametrize("url", [LEVEL.url, "other"])
    def test_a_file_that_a_thread_of_an_earlier_job_stored_does_not_count(self, url):
        """It was written for other settings, perhaps for other ranks."""
        driver, step, hanging = self.driver_whose_job_was_replaced(url)

        done = driver.step(actions.StepStored(hanging.number))

        level = driver.core.job.node.levels[0]
        key = StepKey(START, step)
        assert key not in level.stored
        assert (key in level.unusable) == (url == LEVEL.url)
        assert not of_kind(done, actions.DeleteFiles)

    @pytest.mark.parametrize("end", [actions.Missed, actions.Failed])
    def test_what_a_thread_of_an_earlier_job_left_half_done_is_deleted(self, end):
        driver, step, hanging = self.driver_whose_job_was_replaced(LEVEL.url)

        done = driver.step(end(hanging.number, "cancelled"))

        [delete] = of_kind(done, actions.DeleteFiles)
        assert delete.keys == (StepKey(START, step),)

    def driver_whose_job_was_replaced(self, url: str) -> tuple[Driver, int, WriteLevel]:
        """A core whose next start has other settings, and listed the level; the step and task of the start before."""
        driver, step = driver_with_a_grant()
        driver.see((slot(0, step, is_held=True), empty(1), empty(2)))
        [hanging] = [tasks.task for tasks in driver.core.job.level_tasks]
        assert isinstance(hanging, WriteLevel)
        driver.step(actions.ProcessDied(100))
        other = structs.replace(SETTINGS, levels=(structs.replace(LEVEL, url=url, keep_last=5),))
        next_state = structs.replace(STATE, start=START + 1, job=other)
        [listing] = of_kind(driver.report(next_state, pid=200, connection=2), ListLevel)
        driver.step(Listed(listing.number, ()))
        return driver, step, hanging

    def test_what_a_dead_trainer_required_is_stored_also_if_the_next_one_comes_first(self):
        """Its first state, while it restores, required nothing, and the name was never given."""
        driver, step = driver_with_a_grant()
        named = NamedStep("mine", StepKey(START, step))
        driver.report(structs.replace(STATE, names=(named,), required=(step,)))
        whole = (slot(0, step, is_held=True), empty(1), empty(2))
        driver.see(whole)
        [write] = [tasks.task for tasks in driver.core.job.level_tasks]
        driver.step(actions.ProcessDied(100))

        driver.report(TrainerState(local_rank=0, slots=(0,)), pid=200, connection=2)
        driver.see(whole)
        assert driver.core.ranks.wants.required == {StepKey(START, step)}
        driver.report(structs.replace(STATE, start=START + 1), pid=200, connection=2)
        done = driver.step(actions.StepStored(write.number))

        [task] = of_kind(done, actions.SetNames)
        assert task.added == (named,)
        driver.step(actions.TaskEnded(task.number))
        assert driver.core.ranks.wants.required == set()
        assert driver.core.ranks.wants.names == set()

    def test_a_name_of_a_dead_trainer_that_the_next_one_removes_is_not_given(self):
        driver, step = driver_with_a_grant()
        named = NamedStep("mine", StepKey(START, step))
        driver.report(structs.replace(STATE, names=(named,)))
        driver.step(actions.ProcessDied(100))

        removal = NamedStep("mine", StepKey(START + 1, 0))
        driver.report(TrainerState(local_rank=0, slots=(0,), released=(removal,)), pid=200, connection=2)

        assert driver.core.ranks.wants.names == set()

    def test_a_start_that_is_older_does_not_change_the_job(self):
        """One rank of a node may begin the next start before another one."""
        two = structs.replace(SETTINGS, ranks=(0, 1))
        driver = Driver()
        driver.report(structs.replace(STATE, start=START + 1, job=structs.replace(two, run="new")))

        driver.report(structs.replace(STATE, local_rank=1, job=two), pid=200, connection=2)

        assert driver.core.job.settings.run == "new"

    def test_ranks_of_a_node_with_different_settings_do_not_replace_each_others_job(self):
        """They did so with each message: levels were listed for ever, and nothing was stored."""
        two = structs.replace(SETTINGS, ranks=(0, 1), world_size=2)
        level = structs.replace(LEVEL, storage_options={"key": "secret"}, timeout_s=9.0)
        others = structs.replace(two, levels=(level,))
        first = structs.replace(STATE, job=two)
        second = structs.replace(STATE, local_rank=1, job=others)
        driver = Driver()
        driver.report(first)
        job = driver.core.job

        done = driver.report(second, pid=200, connection=2)
        driver.report(structs.replace(first, waited_s=1.0))

        assert driver.core.job is job
        assert not of_kind(done, actions.BeginJob)
        for rank in (0, 1):
            [alert] = driver.sent(done, rank).alerts
            assert "timeout_s of level, storage_options of level" in alert.text
            assert "secret" not in alert.text
        second = structs.replace(second, start=START + 1, job=two)
        assert not driver.sent(driver.report(second, pid=200, connection=2)).alerts

    def test_nothing_is_deleted_while_a_trainer_restores(self):
        driver, _ = driver_with_a_grant()
        level = driver.core.job.node.levels[0]
        driver.step(actions.ProcessDied(100))
        level.leftovers.add(StepKey(1, 1))

        restoring = driver.report(TrainerState(local_rank=0), pid=200, connection=2)
        training = driver.report(structs.replace(STATE, start=START + 1), pid=200, connection=2)

        assert not of_kind(restoring, actions.DeleteFiles)
        assert of_kind(training, actions.DeleteFiles)

    def test_memory_of_ranks_that_are_no_more_goes_when_this_start_has_a_snapshot(self):
        driver, step = driver_with_a_grant()
        old = slot_view(9, StepKey(1, 3), 1)
        done = driver.see((slot(0, step), empty(1), empty(2)), (old,))
        assert not of_kind(done, actions.FreeSlot)

        driver.see((slot(0, step, is_held=True), empty(1), empty(2)), (old,))
        task = driver.core.job.level_tasks[0].task
        assert isinstance(task, WriteLevel)
        done = driver.step(actions.StepStored(task.number))

        assert actions.FreeSlot(1, 9) in done


class TestNames:
    def test_a_name_is_given_once_the_level_has_the_step(self):
        driver, step = driver_with_a_grant()
        named = NamedStep("mine", StepKey(START, step))

        done = driver.report(structs.replace(STATE, names=(named,)))
        assert not of_kind(done, actions.SetNames)
        driver.see((slot(0, step, is_held=True), empty(1), empty(2)))
        done = driver.step(actions.StepStored(driver.core.job.level_tasks[0].task.number))
        [task] = of_kind(done, actions.SetNames)
        done = driver.step(actions.TaskEnded(task.number))

        assert driver.sent(done).names == (named,)
        assert not of_kind(done, actions.SetNames)

    def test_a_name_is_not_given_before_the_fastest_level_that_has_the_step_gave_it(self):
        two_levels = structs.replace(SETTINGS, levels=(LEVEL, structs.replace(LEVEL, url="slower")))
        key = StepKey(START, 5)
        named = NamedStep("mine", key)
        driver = Driver()
        listing = of_kind(driver.report(structs.replace(STATE, job=two_levels, names=(named,))), ListLevel)
        driver.see(THREE_EMPTY)
        done = driver.step(Listed(listing[1].number, (key,)))
        [slower] = of_kind(done, actions.SetNames)
        driver.step(actions.TaskEnded(slower.number))
        assert driver.core.common_state().names == ()

        done = driver.step(Listed(listing[0].number, (key,)))
        [faster] = of_kind(done, actions.SetNames)
        done = driver.step(actions.TaskEnded(faster.number))

        assert driver.sent(done).names == (named,)


class TestTheEnd:
    def test_a_keeper_that_nobody_comes_to_ends(self):
        driver = Driver()
        assert driver.core.wake_at == START_GRACE_S
        assert actions.Finish() in driver.pass_time(START_GRACE_S)

    def test_a_trainer_that_comes_only_to_say_that_training_is_over_ends_the_keeper(self):
        over = TrainerState(local_rank=0, farewell=Farewell.OVER)
        assert actions.Finish() in Driver().report(over)

    def test_a_restart_that_comes_only_to_say_that_training_is_over_ends_the_wait_for_another_one(self):
        driver, step = driver_with_a_grant()
        driver.see((slot(0, step), empty(1), empty(2)))
        driver.report(structs.replace(STATE, linger_s=60.0))
        driver.step(actions.ProcessDied(100))
        assert driver.core.phase is Phase.LINGERING

        driver.report(structs.replace(STATE, farewell=Farewell.OVER), pid=200, connection=2)

        assert driver.core.phase is Phase.DRAINING

    def test_a_trainer_that_comes_only_to_say_that_it_left_leaves_memory_to_a_restart(self):
        left = structs.replace(STATE, slots=(0,), linger_s=600.0, is_sealed=True, farewell=Farewell.LEFT)
        driver = Driver()
        driver.report(left)
        driver.see((slot(0, 4), empty(1), empty(2)))

        driver.pass_time(START_GRACE_S)

        assert driver.core.phase is Phase.LINGERING
        driver.pass_time(600.0)
        assert driver.core.phase is not Phase.LINGERING

    def test_a_new_keeper_stores_what_is_handed_over_by_a_training_that_is_over(self):
        over = structs.replace(STATE, slots=(0,), required=(4,), is_sealed=True, farewell=Farewell.OVER)
        driver = Driver()
        [listing] = of_kind(driver.report(over), ListLevel)
        driver.step(Listed(listing.number, ()))
        driver.see((slot(0, 4), empty(1), empty(2)))
        done = driver.see((slot(0, 4, is_held=True), empty(1), empty(2)))
        [write] = of_kind(done, WriteLevel)
        driver.step(actions.TaskMoved(write.number))

        driver.now += START_GRACE_S
        assert not of_kind(driver.step(actions.TaskMoved(write.number)), actions.Finish)
        assert not of_kind(driver.pass_time(1.0), actions.Finish)
        assert actions.Finish() in driver.step(actions.StepStored(write.number))

    def test_a_new_keeper_waits_for_each_rank_of_a_training_that_is_over(self):
        over = structs.replace(STATE, job=JobSettings("run", (), ranks=(0, 1), world_size=2), farewell=Farewell.OVER)
        driver = Driver()

        assert not of_kind(driver.report(over), actions.Finish)
        done = driver.report(structs.replace(over, local_rank=1), pid=101, connection=2)

        assert actions.Finish() in done

    def test_a_preempted_training_has_its_newest_capture_stored(self):
        every_100 = structs.replace(SETTINGS, levels=(structs.replace(LEVEL, every_n_steps=100),))
        state = structs.replace(STATE, job=every_100)
        driver = Driver()
        [task] = of_kind(driver.report(state), ListLevel)
        driver.see((slot(0, 5), empty(1), empty(2)))
        driver.step(Listed(task.number, ()))

        done = driver.report(structs.replace(state, is_preempted=True))

        assert driver.sent(done).is_preempted
        assert Hold(0, 0, sequence=6, num_kept=1) in done

    @pytest.mark.parametrize("phase", [SlotPhase.CAPTURING, SlotPhase.WHOLE])
    def test_a_trainer_that_died_leaves_memory_to_a_restart_if_a_capture_is_whole(self, phase):
        driver, step = driver_with_a_grant()
        driver.see((structs.replace(slot(0, step), phase=phase), empty(1), empty(2)))
        driver.report(structs.replace(STATE, linger_s=60.0))

        driver.step(actions.ProcessDied(100))

        assert (driver.core.phase is Phase.LINGERING) == (phase is SlotPhase.WHOLE)

    def test_a_new_keeper_gives_nothing_up_before_it_knows_slots_and_files(self):
        sealed = structs.replace(STATE, slots=(0,), required=(4,), is_sealed=True)
        driver = Driver()
        done = driver.report(sealed)
        assert driver.sent(done).lost == ()
        [task] = of_kind(done, ListLevel)
        done = driver.step(Listed(task.number, ()))
        assert not of_kind(done, WriteLevel)
        assert not driver.core.job.node.order.lost

        driver.see((slot(0, 4), empty(1), empty(2)))
        done = driver.see((slot(0, 4, is_held=True), empty(1), empty(2)))

        assert [task.key.step for task in of_kind(done, WriteLevel)] == [4]

    def test_a_step_that_memory_lacks_is_not_lost_before_all_levels_are_listed(self):
        driver = Driver()
        [task] = of_kind(driver.report(structs.replace(STATE, required=(4,), is_sealed=True)), ListLevel)
        driver.see((slot(0, 7), empty(1), empty(2)))
        assert not driver.core.job.node.order.lost

        driver.step(Listed(task.number, (StepKey(START, 4),)))

        assert not driver.core.job.node.order.lost

    def test_a_step_that_a_faster_level_may_have_is_not_given_up_before_it_is_listed(self):
        slow = LevelSettings("slow", every_n_steps=100)
        driver = Driver()
        sealed = structs.replace(STATE, job=JobSettings("run", (LEVEL, slow)), required=(4,), is_sealed=True)
        _, second = of_kind(driver.report(sealed), ListLevel)
        driver.see((slot(0, 7), empty(1), empty(2)))

        done = driver.step(Listed(second.number, ()))

        assert driver.sent(done).levels[1].given_up == ()

    def test_a_required_step_that_only_a_faster_level_has_is_copied_before_the_end(self):
        slow = LevelSettings("slow", every_n_steps=100)
        state = structs.replace(STATE, job=JobSettings("run", (LEVEL, slow)), required=(4,))
        driver = Driver()
        first, second = of_kind(driver.report(state), ListLevel)
        driver.step(Listed(first.number, (StepKey(START, 4),)))
        driver.report(structs.replace(state, is_sealed=True))
        driver.see((slot(0, 7), empty(1), empty(2)))
        done = driver.see((slot(0, 7, is_held=True), empty(1), empty(2)))
        [write] = of_kind(done, WriteLevel)
        driver.step(actions.StepStored(write.number))

        done = driver.step(Listed(second.number, ()))
        copied = []
        while writes := of_kind(done, WriteLevel):
            [write] = writes
            copied.append((write.key.step, write.source))
            done = driver.step(actions.StepStored(write.number))

        assert sorted(copied) == [(4, 0), (7, 0)]


class TestSeveralLevels:
    @pytest.mark.parametrize(("is_shared", "copies"), [(True, True), (False, False)])
    def test_a_level_of_one_node_is_not_copied_from_a_shared_one(self, is_shared, copies):
        """A shared level has, of each node, only its share of what several nodes hold."""
        slow = structs.replace(LEVEL, url="slow", is_shared=is_shared)
        state = structs.replace(STATE, job=structs.replace(SETTINGS, levels=(LEVEL, slow)))
        driver = Driver()
        for task in of_kind(driver.report(state), ListLevel):
            driver.step(Listed(task.number, ()))
        driver.see((slot(0, 1, is_held=True), empty(1), empty(2)))
        [write] = [level.task for level in driver.core.job.level_tasks[:1]]

        done = driver.step(actions.StepStored(write.number))

        assert [task.source for task in of_kind(done, WriteLevel) if task.level == 1] == ([0] if copies else [])
        if not copies:
            assert driver.core.job.node.levels[1].order.source is None

    def test_a_required_step_that_no_level_can_take_does_not_stop_redundancy(self):
        """Its grant lies ahead, and nothing is gained by giving it up: it was given up again and again."""
        settings = structs.replace(SETTINGS, redundancy=RedundancySettings(every_n_steps=3))
        state = structs.replace(STATE, job=settings, memory=MemoryWish(4, 0, 1), required=(1,))
        driver = Driver()
        for task in of_kind(driver.report(state), ListLevel):
            driver.step(Listed(task.number, ()))
        driver.see((slot(0, 1, is_held=True), empty(1), empty(2), empty(3)))
        write, parity = [level.task for level in driver.core.job.level_tasks]
        driver.step(actions.StepStored(parity.number))
        driver.step(actions.Failed(write.number, "the disk is away"))
        redundancy = driver.core.job.node.levels[1]
        version = redundancy.order.version
        assert redundancy.grant == StepKey(START, 3)

        driver.pass_time(0.1)

        assert redundancy.order.version == version
        assert redundancy.grant == StepKey(START, 3)

    def test_a_level_that_still_reads_an_older_step_crowds_out_the_next_one(self):
        """Else a level that hangs takes two slots of three, and nothing is captured."""
        first = LevelSettings("first", every_n_steps=3)
        second = LevelSettings("second", every_n_steps=5, is_shared=False)  # it is not copied from a shared one
        driver = Driver()
        state = structs.replace(STATE, step=0, job=JobSettings("run", (first, second)))
        lists = of_kind(driver.report(state), ListLevel)
        driver.see(THREE_EMPTY)
        driver.step(Listed(lists[1].number, ()))
        driver.step(Listed(lists[0].number, ()))
        levels = driver.core.job.node.levels
        assert [level.grant.step for level in levels] == [3, 5]
        driver.see((slot(0, 3), empty(1), empty(2)))
        assert of_kind(driver.see((slot(0, 3, is_held=True), empty(1), empty(2))), WriteLevel)

        done = driver.see((slot(0, 3, is_held=True), slot(1, 4), slot(2, 5, is_whole=False)))

        assert not of_kind(done, Hold)
        assert levels[0].progress is GrantProgress.WRITING
        assert levels[1].grant is None or levels[1].grant.step > 5


class TestManySnapshots:
    def test_as_many_complete_ones_are_remembered_and_reported_as_a_level_keeps(self):
        """Else none would ever be old enough to be deleted."""
        settings = structs.replace(LEVEL, keep_last=600)
        grants = LevelGrants(settings)
        node_level = NodeLevel(settings)
        for step in range(2000):
            grants.become_complete(StepKey(START, step))
            node_level.become_stored(StepKey(START, step))

        assert len(grants.complete) > settings.keep_last
        assert len(node_level.report().stored) > settings.keep_last


class TestRequiredSteps:
    FOUR_SLOTS = MemoryWish(4, 0, 1)
    EMPTY = (empty(1), empty(2), empty(3))

    def driver_that_stored(self, settings: JobSettings) -> tuple[Driver, TrainerState, list[actions.Action]]:
        """A core with step 4 at the first level, and the next grant ahead; what it did last."""
        driver = Driver()
        state = structs.replace(STATE, step=3, job=settings, memory=self.FOUR_SLOTS)
        done = driver.report(state)
        driver.see((empty(0), *self.EMPTY))
        for task in of_kind(done, ListLevel):
            driver.step(Listed(task.number, ()))
        driver.see((slot(0, 4), *self.EMPTY))
        done = driver.see((slot(0, 4, is_held=True), *self.EMPTY))
        [write] = [task for task in of_kind(done, WriteLevel) if task.level == 0]
        return driver, state, driver.step(actions.StepStored(write.number))

    def test_one_that_is_gone_is_given_up_also_while_a_step_ahead_is_granted(self):
        """Training may wait for it, and then never begins the step ahead."""
        rare = structs.replace(LEVEL, every_n_steps=10)
        state = structs.replace(STATE, job=structs.replace(SETTINGS, levels=(rare,)))
        driver = Driver()
        [task] = of_kind(driver.report(state), ListLevel)
        driver.step(Listed(task.number, ()))
        driver.see((slot(0, 3), slot(1, 4), slot(2, 5)))
        assert driver.core.job.node.levels[0].grant == StepKey(START, 10)

        done = driver.report(structs.replace(state, required=(2,)))

        assert driver.sent(done).lost == (StepKey(START, 2),)
        assert driver.core.job.node.levels[0].grant == StepKey(START, 10)

    def test_one_that_a_faster_level_has_is_not_given_up_while_that_one_does_not_work(self):
        """The slower one, which is busy with another step, copies it once the faster one works again."""
        driver, state, _ = self.driver_that_stored(JobSettings("run", (LEVEL, LevelSettings("slow"))))
        for step in (5, 6):
            driver.see((slot(0, step), *self.EMPTY))
            done = driver.see((slot(0, step, is_held=True), *self.EMPTY))
            [write] = of_kind(done, WriteLevel)
            if step == 5:
                driver.step(actions.StepStored(write.number))
        driver.step(actions.Failed(write.number, "the disk is away"))
        first, second = driver.core.job.node.levels
        assert not first.is_ready
        assert second.grant == StepKey(START, 4)
        driver.see((slot(0, 6), slot(1, 7), slot(2, 8), slot(3, 9)))

        driver.report(structs.replace(state, required=(5,)))

        [_, slow] = driver.core.common_state().levels
        assert slow.given_up == ()

    @pytest.mark.parametrize("last", [0, 1])
    def test_one_that_a_level_may_have_is_not_lost_before_that_one_is_listed(self, last):
        """A new keeper: memory has newer steps only, and one level is not listed yet."""
        settings = JobSettings("run", (LEVEL, LevelSettings("slow", every_n_steps=100)))
        driver = Driver()
        listings = of_kind(driver.report(structs.replace(STATE, job=settings, required=(2,))), ListLevel)
        driver.see((slot(0, 7), slot(1, 8), slot(2, 9)))

        done = driver.step(Listed(listings[1 - last].number, ()))

        assert driver.core.job.node.order.lost == ()
        assert (StepKey(START, 2) in driver.sent(done).levels[1 - last].given_up) == (last == 1)

        done = driver.step(Listed(listings[last].number, (StepKey(START, 2),)))

        assert driver.core.job.node.order.lost == ()
        assert [task.key.step for task in of_kind(done, WriteLevel) if task.source == 0] == [2] * (last == 0)

    def test_one_that_a_slow_level_copies_takes_no_grant_from_a_faster_one(self):
        slow = LevelSettings("slow", every_n_steps=5)
        driver, state, done = self.driver_that_stored(JobSettings("run", (LEVEL, slow)))
        assert [task.source for task in of_kind(done, WriteLevel)] == [0]

        driver.report(structs.replace(state, required=(4,)))

        first, second = driver.core.job.node.levels
        assert (first.grant, first.progress) == (StepKey(START, 5), GrantProgress.WAITING)
        assert second.progress is GrantProgress.WRITING

    def test_one_that_is_to_be_protected_takes_the_place_of_a_grant_ahead(self):
        """Training waits for it, so the granted step would never be begun."""
        driver, state, _ = self.driver_that_stored(JobSettings("run", (), RedundancySettings(every_n_steps=4)))
        [redundancy] = driver.core.job.node.levels
        assert redundancy.grant == StepKey(START, 8)
        driver.see((slot(0, 4, is_held=True), slot(1, 5), empty(2), empty(3)))

        driver.report(structs.replace(state, protect=(5,)))

        assert redundancy.grant == StepKey(START, 5)

    def test_a_trainer_that_has_no_slot_to_spare_captures_on_and_nothing_is_protected(self):
        """With K + 1 slots one that is held for redundancy would leave none for captures, for ever."""
        driver, state, done = self.driver_that_stored(JobSettings("run", (), RedundancySettings(every_n_steps=4)))
        assert driver.sent(done).protected == StepKey(START, 4)
        [redundancy] = driver.core.job.node.levels

        done = driver.report(structs.replace(state, memory=MemoryWish(2, 0, 1)))

        assert actions.Release(0, 0) in done
        assert driver.sent(done).protected is None
        for step in (5, 6, 7, 8, 9):
            done = driver.see((slot(0, step), slot(1, step - 1), empty(2), empty(3)))
            assert not of_kind(done, Hold)
        assert redundancy.grant is None

    def test_what_is_protected_stays_while_a_trainer_with_fewer_slots_restores(self):
        """The next start keeps fewer captures, and reads what this one protected first."""
        driver, _, done = self.driver_that_stored(JobSettings("run", (), RedundancySettings(every_n_steps=4)))
        assert driver.sent(done).protected == StepKey(START, 4)
        driver.step(actions.ProcessDied(100))

        done = driver.report(TrainerState(local_rank=0, memory=MemoryWish(2, 0, 1)), pid=200, connection=2)

        assert not of_kind(done, actions.Release)
        assert driver.core.job.node.last_protected == StepKey(START, 4)
        assert driver.core.job.node.levels[0].stored == {StepKey(START, 4)}


def test_parity_that_hangs_is_given_up_before_a_last_boundary_gives_up():
    """Both hold slots: the last capture of a training would find none."""
    assert RedundancySettings().timeout_s < SnapshotConfig().io_timeout_s


class TestLevelsByTime:
    LEVEL = LevelSettings("level", every_s=60.0)

    def test_the_first_capture_is_stored_at_once_and_the_next_one_a_minute_later(self):
        """With steps of half a minute nothing would be on storage for a long time else."""
        driver = Driver()
        [task] = of_kind(driver.report(structs.replace(STATE, job=JobSettings("run", (self.LEVEL,)))), ListLevel)
        driver.see((slot(0, 1), empty(1), empty(2)))

        done = driver.step(Listed(task.number, ()))
        assert Hold(0, 0, sequence=2, num_kept=1) in done
        done = driver.see((slot(0, 1, is_held=True), empty(1), empty(2)))
        [write] = of_kind(done, WriteLevel)
        driver.step(actions.StepStored(write.number))
        driver.now += 30.0
        assert not of_kind(driver.see((slot(0, 1), slot(1, 2), empty(2))), Hold)

        assert Hold(0, 1, sequence=3, num_kept=1) in driver.pass_time(30.0)

    def test_what_a_level_failed_to_store_stays_held_for_the_level_that_stores_it_instead(self):
        """One event ends the first write and begins the second: the slot is not released between the two."""
        slow = structs.replace(self.LEVEL, url="slow")
        driver = Driver()
        lists = of_kind(driver.report(structs.replace(STATE, job=JobSettings("run", (self.LEVEL, slow)))), ListLevel)
        driver.see((slot(0, 1), empty(1), empty(2)))
        for task in lists:
            driver.step(Listed(task.number, ()))
        driver.see((slot(0, 1, is_held=True), empty(1), empty(2)))

        done = driver.step(actions.Failed(driver.core.job.level_tasks[0].task.number, "the disk is away"))

        [write] = of_kind(done, WriteLevel)
        assert (write.level, write.source) == (1, None)
        assert not of_kind(done, actions.Release)


def test_older_captures_of_a_dead_trainer_are_held_and_stored_where_they_are_required():
    """Nothing is written over any more, so not only the newest can be held."""
    settings = structs.replace(SETTINGS, levels=(structs.replace(LEVEL, every_n_steps=100),))
    driver = Driver()
    [listing] = of_kind(driver.report(structs.replace(STATE, job=settings, required=(1,))), ListLevel)
    driver.see((slot(0, 1), slot(1, 2), slot(2, 3)))

    driver.step(actions.ProcessDied(100))
    done = driver.step(Listed(listing.number, ()))

    held = [action.sequence for action in of_kind(done, Hold)]
    assert held
    assert all(action.num_kept == 3 for action in of_kind(done, Hold))


class TestWhatIsStoredFirst:
    def test_a_name_takes_the_place_of_a_write_that_nobody_requires(self):
        """Memory has one slot to spare: while the write went on the named step would be written over."""
        driver, step = driver_with_a_grant()
        driver.see((slot(0, step, is_held=True), empty(1), empty(2)))
        write = driver.core.job.level_tasks[0].task
        assert isinstance(write, WriteLevel)
        driver.see((slot(0, step, is_held=True), slot(1, step + 1), empty(2)))

        named = NamedStep("mine", StepKey(START, step + 1))
        done = driver.report(structs.replace(STATE, names=(named,)))

        assert actions.CancelTask(write.number) in done
        assert Hold(0, 1, sequence=step + 2, num_kept=1) in done

    def test_the_end_of_a_cancelled_write_does_not_give_up_the_next_grant_of_its_step(self):
        """Found by the model: the last capture of a training was never stored, and the keeper left."""
        driver, step = driver_with_a_grant()
        older = slot(1, step - 1)
        driver.see((slot(0, step, is_whole=False, is_held=True), older, empty(2)))
        cancelled = driver.core.job.level_tasks[0].task
        state = structs.replace(STATE, names=(NamedStep("mine", StepKey(START, step - 1)),))
        assert actions.CancelTask(cancelled.number) in driver.report(state)
        driver.see((slot(0, step, is_held=True), older, empty(2)))
        driver.report(structs.replace(state, is_sealed=True))

        done = driver.step(actions.Missed(cancelled.number, "cancelled"))

        [write] = of_kind(done, WriteLevel)
        assert write.key.step == step

    def test_redundancy_does_not_wait_for_a_level_that_is_due_more_rarely(self):
        rare = structs.replace(LEVEL, every_n_steps=50)
        settings = JobSettings("run", (rare,), RedundancySettings(every_n_steps=10))
        driver = Driver()
        for task in of_kind(driver.report(structs.replace(STATE, job=settings)), ListLevel):
            driver.step(Listed(task.number, ()))
        driver.see(THREE_EMPTY)

        level, redundancy = driver.core.job.node.levels

        assert (level.grant, redundancy.grant) == (StepKey(START, 50), StepKey(START, 10))

    def test_redundancy_that_is_due_more_rarely_does_not_take_each_step_that_a_level_reads(self):
        settings = JobSettings("run", (LEVEL,), RedundancySettings(every_n_steps=50))
        driver = Driver()
        for task in of_kind(driver.report(structs.replace(STATE, step=60, job=settings)), ListLevel):
            driver.step(Listed(task.number, (StepKey(START, 55),) if task.level == 1 else ()))
        driver.see(THREE_EMPTY)

        level, redundancy = driver.core.job.node.levels

        assert level.grant == StepKey(START, 61)
        assert redundancy.grant is None or redundancy.grant.step == 100

    def test_a_failure_beside_a_grant_that_waits_lets_other_levels_go_on(self):
        """Its step would be waited for until the level works again."""
        driver, _ = driver_with_a_grant()
        level = driver.core.job.node.levels[0]
        assert level.progress is GrantProgress.WAITING
        driver.core.job.level_tasks[0].task = actions.DeleteFiles(0, 77, (StepKey(1, 1),))

        driver.step(actions.Failed(77, "the disk is away"))

        assert driver.core.job.node.levels[0].wanted_key is None


class TestOtherNodes:
    def test_each_coordinator_of_a_keeper_has_a_number_of_its_own(self):
        """Another node may still answer the one before: its versions count from 0 again."""
        driver = Driver()
        settings = structs.replace(SETTINGS, world_size=2, num_nodes=2)
        driver.report(structs.replace(STATE, job=settings, linger_s=0.0))
        driver.see((slot(0, 1), empty(1), empty(2)))
        numbers = [driver.core.job.coordinator.number]

        driver.step(actions.ProcessDied(100))
        driver.pass_time(1.0)
        driver.pass_time(SILENCE_S)
        assert driver.core.job.coordinator.is_alone
        numbers.append(driver.core.job.coordinator.number)
        driver.report(structs.replace(STATE, job=settings), pid=200, connection=2)
        assert not driver.core.job.coordinator.is_alone
        numbers.append(driver.core.job.coordinator.number)

        assert len(set(numbers)) == 3

    def test_a_report_on_an_earlier_grant_of_the_same_step_does_not_count(self):
        """The file that it speaks of may be deleted since."""
        settings = structs.replace(SETTINGS, world_size=2, num_nodes=2)
        key = StepKey(START, 1)
        driver = Driver()
        [listing] = of_kind(driver.report(structs.replace(STATE, job=settings)), ListLevel)
        driver.see(THREE_EMPTY)
        driver.step(Listed(listing.number, ()))
        job = driver.core.job

        def other_reports(version: int, grant: StepKey | None, progress: GrantProgress) -> list[actions.Action]:
            level = LevelReport(version, grant, progress, True, ())
            return driver.step(Report(1, job.digest, job.coordinator.number, (level,)))

        other_reports(0, None, GrantProgress.IDLE)
        other_reports(1, None, GrantProgress.IDLE)
        [level] = job.coordinator.levels
        assert (level.version, level.grant) == (2, key)
        driver.see((slot(0, 1, is_held=True), empty(1), empty(2)))
        driver.step(actions.StepStored(job.level_tasks[0].task.number))

        other_reports(1, key, GrantProgress.STORED)
        assert level.complete == set()

        other_reports(2, key, GrantProgress.STORED)
        assert level.complete == {key}

    @pytest.mark.parametrize("change", [{"levels": (structs.replace(LEVEL, is_shared=False),)}, {"redundancy": PARITY}])
    def test_what_a_keeper_with_other_settings_reports_does_not_count(self, change):
        """It may serve the start before: it stores only its share, or protects against the loss of fewer nodes."""
        assert digest_of(PAIR) != digest_of(structs.replace(PAIR, **change))

    def test_all_settings_must_be_the_same_on_all_nodes_but_those_that_a_node_has_of_its_own(self):
        level = structs.replace(LEVEL, storage_options={"key": "a"})
        redundancy = RedundancySettings(members=(0, 1, 2))
        settings = structs.replace(PAIR, levels=(level,), redundancy=redundancy)

        same = {name for name, changed in each_changed(settings) if digest_of(changed) == digest_of(settings)}
        for name, changed in each_changed(level):
            if digest_of(structs.replace(settings, levels=(changed,))) == digest_of(settings):
                same.add(f"level {name}")
        for name, changed in each_changed(redundancy):
            if digest_of(structs.replace(settings, redundancy=changed)) == digest_of(settings):
                same.add(f"redundancy {name}")

        of_a_node = {"ranks", "node", "redundancy members", "redundancy max_bytes_per_s"}
        of_a_node |= {f"level {name}" for name in ("url", "storage_options", "max_bytes_per_s", "timeout_s")}
        assert same == of_a_node

    def test_a_run_that_goes_on_from_a_late_step_is_not_told_that_nothing_was_protected_before_a_step_is_due(self):
        driver = Driver()
        state = structs.replace(STATE, job=structs.replace(PAIR, num_nodes=1), step=1003)
        driver.report(state)
        driver.see((slot(0, 1004), empty(1), empty(2)))

        done = driver.pass_time(UNPROTECTED_S)
        assert not any(
            alert.about == "protection" for sent in of_kind(done, actions.SendToTrainer) for alert in sent.state.alerts
        )

        driver.see((slot(0, 1010), empty(1), empty(2)))
        [alert] = driver.sent(driver.pass_time(UNPROTECTED_S)).alerts
        assert alert.about == "protection"

    @pytest.mark.parametrize(("node", "said"), [(0, "the keeper of node 1"), (1, "of rank 0's node")])
    def test_trainers_hear_that_a_node_is_not_reached_and_that_it_is_back(self, node, said):
        """Without a link between keepers nothing is stored."""
        driver = Driver()
        settings = structs.replace(SETTINGS, ranks=(node,), world_size=2, node=node, num_nodes=2)
        driver.report(structs.replace(STATE, job=settings))
        digest = driver.core.job.digest
        message = Report(1, digest, 0, ())
        if node == 1:
            message = Order(digest, 5, (LevelOrder(1, None, None, (), (), (), (), False, True),))

        [alert] = driver.sent(driver.pass_time(UNREACHED_S)).alerts
        done = driver.step(message)

        assert alert.about == "links"
        assert said in alert.text
        assert "MASTER_ADDR" in alert.text
        assert driver.sent(done).alerts == ()
