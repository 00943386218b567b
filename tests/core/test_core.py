"""Single decisions of the core that the model shows too rarely, or not at all."""

from support.core_world import slot_view

from lazysnap.core.actions import Hold, Listed, ListLevel, SlotsSeen, TrainerReported, WriteLevel
from lazysnap.core.core import Core
from lazysnap.core.messages import JobSettings, LevelSettings, MemoryWish, Progress, StepKey, TrainerState
from lazysnap.memory.slot_choice import SlotView

START = 7
SETTINGS = JobSettings("run", (LevelSettings("level", every_n_steps=1),))


def slot(slot_id: int, step: int, *, is_whole: bool = True, is_held: bool = False) -> SlotView:
    return slot_view(slot_id, StepKey(START, step), step + 1, is_whole=is_whole, is_held=is_held)


def empty(slot_id: int) -> SlotView:
    return slot_view(slot_id, None, 0)


def core_with_a_grant() -> tuple[Core, int]:
    """A core that granted a step; that step."""
    core = Core(1, 0.0)
    state = TrainerState(local_rank=0, start=START, step=-1, job=SETTINGS, memory=MemoryWish(3, 0, 1))
    actions = core.step(TrainerReported(1, 100, state), 0.0)
    core.step(SlotsSeen({0: (empty(0), empty(1), empty(2))}), 0.0)
    job = next(action for action in actions if isinstance(action, ListLevel))
    core.step(Listed(0, job.job, ()), 0.0)
    grant = core.job.node.levels[0].grant
    assert grant is not None
    return core, grant.step


def test_a_capture_that_is_being_written_is_held_and_then_stored():
    core, step = core_with_a_grant()

    actions = core.step(SlotsSeen({0: (slot(0, step, is_whole=False), empty(1), empty(2))}), 0.0)
    assert Hold(0, 0, sequence=step + 1) in actions

    held = slot(0, step, is_whole=False, is_held=True)
    actions = core.step(SlotsSeen({0: (held, empty(1), empty(2))}), 0.0)
    assert any(isinstance(action, WriteLevel) for action in actions)


def test_a_capture_is_never_held_once_its_slot_may_be_chosen():
    """The trainer may have read HELD before, and begin to write there now."""
    core, step = core_with_a_grant()

    actions = core.step(SlotsSeen({0: (slot(0, step), slot(1, step + 1), slot(2, step + 2))}), 0.0)

    assert not any(isinstance(action, Hold) for action in actions)
    assert core.job.node.levels[0].progress is not Progress.WRITING
    assert core.job.node.levels[0].grant is None or core.job.node.levels[0].grant.step > step
