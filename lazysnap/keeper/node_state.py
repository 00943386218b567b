"""The state of a job on one node, collected for people. Only control words and memory of the keeper are read."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

from lazysnap.config import PersistentLevel
from lazysnap.grants.node import NodeLevel
from lazysnap.keeper.held import CaptureTimes, LevelState, NodeState, RankState
from lazysnap.keeper.level_writer import LevelWriter
from lazysnap.keeper.lifecycle import Phase
from lazysnap.keeper.local_rank import LocalRank
from lazysnap.keeper.node_storage import NodeStorage
from lazysnap.keeper.parity import ParityStore
from lazysnap.keeper.protocol import Alert, Complete, LevelFailed, Message, NodeFileStored, Protected
from lazysnap.levels.redaction import Redaction, shown
from lazysnap.memory.arena import Slot, SlotPhase, Word

_FIGURES = (Word.TAKEN, Word.COPIED, Word.WAITED)
M = TypeVar("M", bound=Message)


class LastMessages:
    """The last message of each kind and level to trainers, and its time; alerts by subject. Used by any thread."""

    def __init__(self) -> None:
        self._found: dict[tuple[type[Message], str], tuple[int, Message]] = {}

    def add(self, message: Message) -> None:
        """A message is sent."""
        about = message.about if isinstance(message, Alert) else getattr(message, "level", "")
        self._found[type(message), about] = time.time_ns(), message

    def last(self, kind: type[M], about: str = "") -> tuple[int, M] | tuple[None, None]:
        """Return Unix time in nanoseconds and message; ``None`` twice, if there was none."""
        return cast("tuple[int, M]", self._found.get((kind, about), (None, None)))


def node_state(ranks: Iterable[LocalRank], storage: NodeStorage, parity: ParityStore, sent: LastMessages) -> NodeState:
    """Return the state of the node. Does not block."""
    run, team = storage.run, storage.team
    _, protected = sent.last(Protected)
    alerts = [sent.last(Alert, about)[1] for about in ("protection", "links", "keeper")]
    return NodeState(
        run_id=run.run_id,
        node=team.node,
        nodes=team.nodes,
        every_n_steps=run.every_n_steps,
        common_step=storage.common_step(),
        protected=None if protected is None or protected.start != run.start else protected.step,
        may_lose=0 if run.parity is None else run.parity.parity,
        parity_bytes=parity.size_bytes,
        ranks=[_rank_state(rank) for rank in ranks],
        levels=[_level_state(*facts, storage, sent) for facts in storage.level_facts()],
        problems=[alert.text for alert in alerts if alert is not None and alert.text],
    )


def _rank_state(rank: LocalRank) -> RankState:
    slots, trainer = rank.slots(), rank.busy()
    newest = max(slots, key=lambda slot: slot.word(Word.SEQUENCE), default=None)
    reached = 0 if newest is None else max(newest.word(Word.REACHED), newest.word(Word.BEGIN))
    memory = sum(slot.memory_bytes for slot in slots)
    return RankState(
        rank=rank.team.rank,
        phase=rank.phase.value,
        pid=trainer.pid,
        since_s=trainer.since,
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
    level: PersistentLevel, known: NodeLevel, writer: LevelWriter, storage: NodeStorage, sent: LastMessages
) -> LevelState:
    stored_ns, stored = sent.last(NodeFileStored, level.url)
    complete_ns, complete = sent.last(Complete, level.url)
    failed_ns, failed = sent.last(LevelFailed, level.url)
    newest, storing = max(known.complete, default=None), writer.step
    total = 0 if storing is None else storage.size_of(storing)
    # A keeper that replaces another one finds old steps complete: their time is not known.
    is_complete = complete is not None and newest is not None and newest.step in complete.steps
    is_seen = is_complete and (stored_ns or math.inf) <= (complete_ns or 0)
    return LevelState(
        url=shown(level.url),
        is_shared=bool(level.shared),
        newest=None if newest is None else newest.step,
        complete_ns=complete_ns if is_seen else None,
        bytes_per_s=stored.num_bytes / max(stored.seconds, 1e-9) if stored is not None else None,
        storing=storing,
        moved_bytes=min(writer.moved_bytes, total) if total else writer.moved_bytes,  # reads end at a page
        total_bytes=total,
        waiting=len(known.wishes - {key.step for key in known.complete} - {storing}),
        is_failing=writer.health.fails_since is not None or not known.works,
        failure=Redaction(level.url, level.storage_options or {}).clean(failed.text) if failed is not None else "",
        failed_ns=failed_ns,
    )
