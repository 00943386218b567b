"""Collects the state of a job on one node for ``lazysnap status``, from the core, and words and metadata of slots."""

import time
from collections.abc import Mapping

from lazysnap.core.actions import WriteLevel
from lazysnap.core.core import Core
from lazysnap.core.job import JobCore
from lazysnap.core.lifecycle import Phase
from lazysnap.core.messages import StepKey
from lazysnap.core.node import whole_on_all
from lazysnap.core.ranks import Presence, Rank
from lazysnap.keeper.event_log import EventLog, LevelHistory
from lazysnap.keeper.questions import CaptureTimes, LevelFacts, NodeState, RankState
from lazysnap.keeper.slot_table import NodeSlots, captured_ns, reached_step
from lazysnap.levels.redaction import Redaction
from lazysnap.memory.slot_choice import newest_whole
from lazysnap.memory.slots import Slot


def node_state(core: Core, slots: NodeSlots, parity_bytes: int, log: EventLog) -> NodeState | None:
    """Return the state of the node; None before the first start. Does not block.

    Args:
        core: the decisions of the keeper.
        slots: all slots of the node.
        parity_bytes: memory that protects other nodes.
        log: has wall-clock times and ended trainers, which the core does not have.
    """
    job = core.job
    if job is None:
        return None
    settings = job.settings
    common = None
    ranks = []
    if not (core.phase is Phase.DRAINING and job.node.order.is_drained):  # otherwise nothing needs memory any more
        common = max(whole_on_all(core.ranks.views(settings)), default=None)
        for rank in core.ranks.all:
            if rank.presence is not Presence.ABSENT or rank.slots:
                ranks.append(_rank_state(core, job, rank, slots.get(rank.number, {}), log))
    levels = []
    for index, level in enumerate(settings.levels):
        levels.append(_level_facts(core, job, index, slots, log.level(level.url)))
    may_lose = 0
    if settings.redundancy is not None:
        may_lose = settings.redundancy.parity
    return NodeState(
        run_id=settings.run,
        node=settings.node,
        nodes=settings.num_nodes,
        common_step=_step_of(common),
        protected=_step_of(job.protected),
        may_lose=may_lose,
        parity_bytes=parity_bytes,
        ranks=ranks,
        levels=levels,
        problems=_problems(core),
    )


def _step_of(key: StepKey | None) -> int | None:
    return None if key is None else key.step


def _problems(core: Core) -> list[str]:
    """Return the alerts of trainers, which all have the same ones."""
    for rank in core.ranks.all:
        if rank.presence is Presence.ATTACHED and rank.last_sent is not None:
            return [alert.text for alert in rank.last_sent.alerts]
    return []


# Ranks


def _rank_state(core: Core, job: JobCore, rank: Rank, slots: Mapping[int, Slot], log: EventLog) -> RankState:
    memory_bytes = sum(slot.memory_bytes for slot in slots.values())
    all_bytes = sum(slot.size_bytes for slot in slots.values())
    waited_s = 0.0
    if rank.state is not None:
        waited_s = rank.state.waited_s
    _, since_s = log.processes.get(rank.number, (rank.pid, 0.0))
    return RankState(
        rank=_number_in_job(job, rank),
        is_training=rank.presence in (Presence.ATTACHED, Presence.AWAY),
        pid=rank.pid,
        since_s=since_s,
        lingers_s=_lingers_s(core, rank),
        end=log.ends.get(rank.number),
        reached=reached_step(rank.slots),
        captures=_captures(rank, slots),
        slots=len(slots),
        memory_bytes=memory_bytes,
        file_bytes=all_bytes - memory_bytes,
        waited_s=waited_s,
    )


def _number_in_job(job: JobCore, rank: Rank) -> int:
    """Return the global rank in the last start of that rank."""
    settings = job.settings
    if rank.state is not None and rank.state.job is not None:
        settings = rank.state.job
    if rank.number < len(settings.ranks):
        return settings.ranks[rank.number]
    return rank.number


def _lingers_s(core: Core, rank: Rank) -> float | None:
    """Return the seconds for which the memory of a dead process stays."""
    if rank.presence is not Presence.DEAD:
        return None
    if core.phase is Phase.SERVING:
        return core.lifecycle.linger_s  # they begin when the last trainer of the node dies
    if core.phase is Phase.LINGERING:
        return max(0.0, min(core.lifecycle.deadlines()) - time.monotonic())
    return None


def _captures(rank: Rank, slots: Mapping[int, Slot]) -> list[CaptureTimes]:
    captures = []
    for view in newest_whole(rank.slots, len(rank.slots)):
        if view.slot_id not in slots or view.step is None:
            continue
        taken_ns = captured_ns(slots[view.slot_id], view.sequence)
        if taken_ns is not None:
            captures.append(CaptureTimes(view.step, taken_ns, view.copied_ns))
    return captures


# Levels


def _level_facts(core: Core, job: JobCore, index: int, slots: NodeSlots, history: LevelHistory) -> LevelFacts:
    settings = job.settings.levels[index]
    level = job.node.levels[index]
    tasks = job.level_tasks[index]
    newest = max(level.order.complete, default=None)
    complete_ns = None
    if newest is not None and newest == history.completed:
        # A keeper that replaces another one finds complete steps whose time is not known.
        complete_ns = history.completed_ns
    bytes_per_s = None
    if tasks.written_bytes:
        bytes_per_s = tasks.written_bytes / max(tasks.written_s, 1e-9)
    total_bytes = _total_bytes(job, index, slots)
    moved_bytes = tasks.moved_bytes
    if total_bytes:
        moved_bytes = min(moved_bytes, total_bytes)  # a file has a header, too
    failure = history.failure
    if level.failure:
        failure = Redaction(settings.storage_options or {}).clean(level.failure)
    return LevelFacts(
        url=settings.url,
        is_shared=settings.is_shared,
        newest=_step_of(newest),
        complete_ns=complete_ns,
        bytes_per_s=bytes_per_s,
        storing=_step_of(tasks.writing),
        moved_bytes=moved_bytes,
        total_bytes=total_bytes,
        waiting=_num_waiting(core, job, index),
        is_failing=bool(level.failure),
        failure=failure,
        failed_ns=history.failed_ns,
    )


def _total_bytes(job: JobCore, index: int, slots: NodeSlots) -> int:
    """Return the bytes that the task of a level will write; 0 if none, or unknown.

    For a copy this is an estimate: the bytes that the other level wrote for its last step.
    """
    write = job.level_tasks[index].task
    if not isinstance(write, WriteLevel):
        return 0
    if write.source is not None:
        return job.level_tasks[write.source].written_bytes
    total_bytes = 0
    for rank, slot_id in write.slots:
        slot = slots.get(rank, {}).get(slot_id)
        if slot is not None:
            total_bytes += slot.view().image_bytes
    return total_bytes


def _num_waiting(core: Core, job: JobCore, index: int) -> int:
    """Return the number of required steps that a level neither has nor is storing."""
    keys = job.node.unanswered_at(index, core.ranks.wants)
    return len(keys - {job.level_tasks[index].writing})
