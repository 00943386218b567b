"""The state of a job on one node, collected for people. Only control words and memory of the keeper are read."""

from collections.abc import Iterable, Sequence

from lazysnap.config import PersistentLevel
from lazysnap.grants.node import NodeLevel
from lazysnap.keeper.held import CaptureTimes, LevelState, LevelStatus, NodeState, RankState
from lazysnap.keeper.level_writer import LevelWriter
from lazysnap.keeper.lifecycle import Phase
from lazysnap.keeper.local_rank import LocalRank
from lazysnap.keeper.node_storage import NodeStorage
from lazysnap.keeper.parity import ParityStore
from lazysnap.keeper.protocol import Status
from lazysnap.levels.redaction import Redaction
from lazysnap.memory.arena import Slot, SlotPhase, Word

_FIGURES = (Word.TAKEN, Word.COPIED, Word.WAITED)


def node_state(ranks: Iterable[LocalRank], storage: NodeStorage, parity: ParityStore, status: Status) -> NodeState:
    """Return the state of the node. Does not block."""
    run, team = storage.run, storage.team
    return NodeState(
        run_id=run.run_id,
        node=team.node,
        nodes=team.nodes,
        every_n_steps=run.every_n_steps,
        common_step=storage.common_step(),
        protected=status.protected,
        may_lose=0 if run.parity is None else run.parity.parity,
        parity_bytes=parity.size_bytes,
        ranks=[_rank_state(rank) for rank in ranks],
        levels=[_level_state(*facts, storage, status) for facts in storage.level_facts()],
        problems=[alert.text for alert in status.alerts if alert.text],
    )


def _rank_state(rank: LocalRank) -> RankState:
    slots = rank.slots()
    newest = max(slots, key=lambda slot: slot.word(Word.SEQUENCE), default=None)
    reached = 0 if newest is None else max(newest.word(Word.REACHED), newest.word(Word.BEGIN))
    memory = sum(slot.memory_bytes for slot in slots)
    return RankState(
        rank=rank.team.rank,
        phase=rank.phase.value,
        pid=rank.trainer_pid,
        since_s=rank.trainer_since,
        lingers_s=rank.seconds_left if rank.phase is Phase.LINGERING else None,
        end=rank.inventory.end,
        reached=reached - 1 if reached else None,
        captures=_captures(slots),
        slots=len(slots),
        memory_bytes=memory,
        file_bytes=sum(slot.size_bytes for slot in slots) - memory,
    )


def _captures(slots: Sequence[Slot]) -> list[CaptureTimes]:
    found = {}
    for slot in slots:
        status = slot.status()
        capture = CaptureTimes(status.step or 0, *map(slot.word, _FIGURES))
        # Its trainer may have begun another capture there meanwhile.
        if status.phase is SlotPhase.WHOLE and slot.word(Word.END) and slot.word(Word.SEQUENCE) == status.sequence:
            found[status.sequence] = capture
    return [found[sequence] for sequence in sorted(found)]


def _level_state(
    level: PersistentLevel, known: NodeLevel, writer: LevelWriter, storage: NodeStorage, status: Status
) -> LevelState:
    told, newest, storing = status.levels.get(level.url, LevelStatus()), max(known.complete, default=None), writer.step
    stored, failed = told.stored, told.failed
    total = 0 if storing is None else storage.size_of(storing)
    # A keeper that replaces another one finds old steps complete: their time is not known.
    is_told = newest is not None and newest.step in told.complete
    is_seen = is_told and stored is not None and stored.t <= told.complete_at
    return LevelState(
        url=level.url,
        is_shared=bool(level.shared),
        newest=None if newest is None else newest.step,
        complete_ns=int(1e9 * told.complete_at) if is_seen else None,
        bytes_per_s=stored.bytes / max(stored.seconds, 1e-9) if stored is not None else None,
        storing=storing,
        moved_bytes=min(writer.moved_bytes, total) if total else writer.moved_bytes,  # a file has a header, too
        total_bytes=total,
        waiting=len(known.required - {key.step for key in known.complete} - {storing}),
        is_failing=writer.health.fails_since is not None or not known.works,
        failure=Redaction(level.storage_options or {}).clean(failed.text) if failed is not None else "",
        failed_ns=None if failed is None else int(1e9 * failed.t),
    )
