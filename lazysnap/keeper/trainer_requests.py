"""The pending requests of a trainer to its keeper. Pure.

A trainer requests by its state, and a keeper answers by its own. Answered requests leave the trainer's state, so that
it stays small.
"""

from collections.abc import Collection

from msgspec import structs

from lazysnap.core.messages import KeeperState, NamedStep, StepKey, TrainerState, is_removed

MAX_RELEASED = 16
"""Maximum removed names that are still sent: no answer confirms the removal at every level, and each later keeper
checks all of them.
"""


def without_answered(state: TrainerState, sent: TrainerState, answer: KeeperState) -> TrainerState:
    """Return the state of a trainer without answered requests.

    Args:
        state: the state of the trainer.
        sent: the last state that was sent on the same connection. Only its requests can have been answered.
        answer: the newest state of the keeper.
    """
    return structs.replace(
        state,
        returned=_open_returns(state, sent, answer),
        required=_open_steps(state, sent, answer),
        protect=_open_protections(state, sent, answer),
        names=_open_names(state, sent, answer),
        released=_open_releases(state, sent, answer),
    )


def with_returned(state: TrainerState, slot_id: int) -> TrainerState:
    """Return the state with one slot less, which the keeper may free."""
    slots = tuple(other for other in state.slots if other != slot_id)
    return structs.replace(state, slots=slots, returned=(*state.returned, slot_id))


def with_required(state: TrainerState, step: int) -> TrainerState:
    """Return the state with one more step that every level must store."""
    if step in state.required:
        return state
    return structs.replace(state, required=(*state.required, step))


def with_protected(state: TrainerState, step: int) -> TrainerState:
    """Return the state with one more step that other nodes must protect."""
    if step in state.protect:
        return state
    return structs.replace(state, protect=(*state.protect, step))


def with_name(state: TrainerState, name: str, step: int) -> TrainerState:
    """Return the state with a name for a step of this start. A pending removal still removes it from older ones."""
    named = NamedStep(name, StepKey(state.start, step))
    released = []
    for removal in state.released:
        if removal.name == name:
            removal = NamedStep(name, min(removal.key, named.key))
        released.append(removal)
    names = (*_other_names(state.names, name), named)
    return structs.replace(state, names=names, released=tuple(released))


def without_name(state: TrainerState, name: str) -> TrainerState:
    """Return the state that removes a name from all snapshots so far."""
    later_than_all = StepKey(state.start + 1, 0)
    released = (*_other_names(state.released, name), NamedStep(name, later_than_all))
    return structs.replace(state, names=_other_names(state.names, name), released=released)


def _other_names(names: tuple[NamedStep, ...], name: str) -> tuple[NamedStep, ...]:
    return tuple(named for named in names if named.name != name)


def _is_same_start(state: TrainerState, sent: TrainerState) -> bool:
    """Return True if the steps in both states are of one start."""
    return state.start == sent.start


def _open_returns(state: TrainerState, sent: TrainerState, answer: KeeperState) -> tuple[int, ...]:
    open_returns = []
    for slot_id in state.returned:
        is_freed = slot_id in sent.returned and slot_id not in answer.slots
        if not is_freed:
            open_returns.append(slot_id)
    return tuple(open_returns)


def _open_steps(state: TrainerState, sent: TrainerState, answer: KeeperState) -> tuple[int, ...]:
    """Return the required steps that some level may still store."""
    if state.job is None or not _is_same_start(state, sent):
        return state.required
    num_levels = len(state.job.levels)
    if len(answer.levels) < num_levels:
        return state.required
    levels = answer.levels[:num_levels]
    open_steps = []
    for step in state.required:
        key = StepKey(state.start, step)
        is_done = all(key in level.complete or key in level.given_up for level in levels)
        is_answered = is_done or key in answer.lost
        if step not in sent.required or not is_answered:
            open_steps.append(step)
    return tuple(open_steps)


def _open_protections(state: TrainerState, sent: TrainerState, answer: KeeperState) -> tuple[int, ...]:
    if not _is_same_start(state, sent):
        return state.protect
    open_steps = []
    for step in state.protect:
        key = StepKey(state.start, step)
        is_protected = answer.protected is not None and answer.protected >= key
        is_answered = is_protected or key in answer.lost
        if step not in sent.protect or not is_answered:
            open_steps.append(step)
    return tuple(open_steps)


def _open_names(state: TrainerState, sent: TrainerState, answer: KeeperState) -> tuple[NamedStep, ...]:
    """Return the names that the first level may still get, and the lost ones: see ``lost_names``."""
    open_names = []
    for named in state.names:
        if named not in sent.names or named not in answer.names:
            open_names.append(named)
    return tuple(open_names)


def lost_names(state: TrainerState, answer: KeeperState) -> tuple[NamedStep, ...]:
    """Return the requested names whose snapshots will never be stored. They stay requested until they are reported."""
    lost = []
    for named in state.names:
        if named.key in answer.lost and named not in answer.names:
            lost.append(named)
    return tuple(lost)


def without_names(state: TrainerState, dropped: Collection[NamedStep]) -> TrainerState:
    """Return the state that no longer requests these names."""
    return structs.replace(state, names=tuple(named for named in state.names if named not in dropped))


def are_names_answered(state: TrainerState, answer: KeeperState) -> bool:
    """Return True if the first level has all names and lacks the removed ones, except where it never will."""
    if answer.levels and answer.levels[0].is_failing:
        return True  # it may not answer for hours
    if any(is_removed(named, state.released) for named in answer.names):
        return False
    lost = lost_names(state, answer)
    return all(named in lost or named in answer.names for named in state.names)


def _open_releases(state: TrainerState, sent: TrainerState, answer: KeeperState) -> tuple[NamedStep, ...]:
    kept_from = len(state.released) - MAX_RELEASED
    open_releases = []
    for index, removal in enumerate(state.released):
        is_answered = removal in sent.released and not any(is_removed(named, (removal,)) for named in answer.names)
        if index >= kept_from or not is_answered:
            open_releases.append(removal)
    return tuple(open_releases)
