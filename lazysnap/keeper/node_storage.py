"""The storage of a keeper for one start of a job: its ranks' slots, the grants, and one writer per level.

The decisions are those of ``grants.coordinator`` and ``grants.node``; here they meet shared memory and the levels.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lazysnap.config import PersistentLevel
from lazysnap.events import NameFailed, Notice
from lazysnap.grants.core import Action, Begin, GiveNotice, Learn, Pin, ReleaseStalePins
from lazysnap.grants.messages import StepKey
from lazysnap.grants.node import NodeLevel, whole_before_newest
from lazysnap.keeper.grant_loop import GrantLoop, make_core
from lazysnap.keeper.known_levels import KnownLevels, copied
from lazysnap.keeper.level_writer import LevelPlace, LevelWriter, WriterContext
from lazysnap.keeper.node_files import NodeFiles
from lazysnap.keeper.node_links import NodeLinks
from lazysnap.keeper.node_slots import NodeSlots, Ranks
from lazysnap.keeper.parity import ParityStore
from lazysnap.keeper.protection import NodeProtection, ProtectionContext
from lazysnap.keeper.protocol import Run
from lazysnap.keeper.status import StatusBoard
from lazysnap.keeper.step_wait import AtLevel, Wait
from lazysnap.links.links import Links
from lazysnap.memory.arena import KEEP, Slot, Word
from lazysnap.topology import Team

logger = logging.getLogger(__name__)

_MOVING_S = 5.0
"""A reader that did not move for so long does not hold a slot any more."""
_REST_S = 0.25
"""Seconds after which an idle thread looks again."""
_ALONE_S = 20.0
"""Seconds that other nodes may be silent before a node without trainers stores its captures alone."""
_AFTER_ERROR_S = 5.0
"""Pause after an error that nobody foresaw."""


@dataclass(frozen=True)
class StorageContext:
    """The keeper's side of a node's storage."""

    ranks: Ranks
    frozen: Callable[[str], Slot | None]
    board: StatusBoard
    """Gets what trainers of the node are to know."""
    admit: Callable[[Links], None]
    """Accepts links of other nodes, at node 0."""
    parity: ParityStore = field(default_factory=ParityStore)


class NodeStorage:
    """The storage of one node, for one start. Methods may be called from any thread, and do not block but for
    ``close``.

    It is large because it joins what must not know each other: grants, slots, levels, links, protection and trainers.
    It decides nothing but which names and messages are still due.
    """

    def __init__(
        self,
        levels: Sequence[PersistentLevel],
        run: Run,
        team: Team,
        context: StorageContext,
        before: "NodeStorage | None" = None,
    ) -> None:
        """``before``: the storage of an earlier start, which ends now."""
        self.run = run
        self._before = before
        self.levels = tuple(replace(level, shared=level.url in run.shared) for level in levels)
        self._from_slots = [
            index
            for index, level in enumerate(self.levels)
            if not any(level.shared or not above.shared for above in self.levels[:index])
        ]
        """Levels that cannot copy from a faster one: see ``Coordinator``."""
        self._context, self.team = context, team
        self._slots = NodeSlots(context.ranks, run.start, run.step)
        self._telling = threading.Lock()
        """Held while writers get the complete steps, so that each sees names and levels together."""
        self._names: dict[int, set[str]] = {}
        """Names by step. Used under ``_telling``."""
        self._lost_names: set[tuple[int, str]] = set()
        """Names whose snapshot the first level will never have; each was reported. Used under ``_telling``."""
        core = make_core(self.levels, run, team, _ALONE_S)
        self._node, self._core = core.node, core
        self._known = KnownLevels(self.levels, self._node.levels[: len(levels)], run.start)
        self._is_closed = False
        self._is_ending = False
        """True once somebody said that the processes of this start are about to be killed."""
        self._indices = range(len(levels))
        """The levels, without the protection by other nodes."""
        self._loop = GrantLoop(core, self._slots.views, self._act)
        self._links = NodeLinks(run, team, self._loop, context.board.add)
        self._writers = [self._writer(level, index) for index, level in enumerate(self.levels)]
        for writer in self._writers:
            writer.start(self._writers)
        self._protection = self._protecting()
        for work, name in ((self._begin, "lazysnap-begin"), (self._rest, "lazysnap-rest")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def _protecting(self) -> NodeProtection | None:
        if self.run.parity is None or self.run.peers is None:
            return None
        grants = self._loop, self._node.levels[-1], len(self.levels)
        add, known = self._context.board.add, self._known
        context = ProtectionContext(add, lambda: any(level.complete for level in known.levels), *grants)
        return NodeProtection(self.run, self.team, self._slots, self._context.parity, context)

    def _writer(self, level: PersistentLevel, index: int) -> LevelWriter:
        run = self.run
        files = NodeFiles(self.team, run.run_id, run.start, is_shared=bool(level.shared))
        earlier = () if self._before is None else self._before._writers
        before = next((writer.place for writer in earlier if writer.place.level.url == level.url), None)
        reads = self._loop, self._slots.of_step, self._context.frozen
        context = WriterContext(*reads, self._may_delete, self._context.board)
        return LevelWriter(LevelPlace(level, before), index, files, context, knows_earlier=level.url in run.stored)

    def _begin(self) -> None:
        """The thread that ends the start before, and begins."""
        try:
            if self._before is not None:
                self._before.close()
                self._before = None
            if self._protection is None:
                for slot in self._slots.all():  # nobody counts on what an earlier start protected
                    slot.set_word(Word.HOLD, 0)
            self._links.begin(self._context.admit)
            if self._is_closed:
                return
            if self.run.is_new:
                for index in self._indices:
                    self._loop.post(self._node.listed, index, set())
            else:
                self._require_kept()
                for writer in self._writers:
                    writer.list_own()
        except Exception:  # the last handler of the thread
            logger.exception("storage")

    def end_protection(self) -> None:
        """Protect no more; what is protected stays so. Blocks: for a moment."""
        if self._protection is not None:
            self._protection.close()

    def _require_kept(self) -> None:
        """Take over what trainers asked an earlier keeper to store."""
        for rank in self._slots.ranks():
            for slot in rank.slots():
                step = slot.kept_step
                if step is not None and rank.starts.holds(slot, self.run.start):
                    self.require(step, is_urgent=True)

    # ---------------------------------------------------------------- the grants' side (``grant_loop``)

    def _act(self, action: Action) -> None:
        """Carry out an action of the grants."""
        if self._protection is not None:
            self._protection.act(action)
        match action:
            case Pin(ranks, step):
                slots = self._slots.of_step(step)
                for slot in (slots[number] for number in ranks):
                    if slot is not None and slot.word(Word.PIN) & ~KEEP != step + 1:
                        slot.pin(step)
            case ReleaseStalePins(word):
                self._slots.release_stale_pins(0 if word is None else word + 1, self._is_answered, self._is_read)
            case Begin(write) if write.level < len(self._writers):
                if write.is_alone:
                    logger.warning(
                        "all trainers here are dead and not all nodes answer: this node stores step %d", write.step
                    )
                self._writers[write.level].begin(write)
            case GiveNotice():
                self.give_notice()
            case Learn():
                self._learn(tuple(map(copied, self._node.levels[: len(self.levels)])))

    def _is_answered(self, step: int) -> bool:
        """True if a step that must be stored is complete, or lost, at every level that reads the slots."""
        return self._node.is_answered(step, self._from_slots)

    def _is_read(self, slot: Slot) -> bool:
        """True if levels that read the slot move."""
        return not any(writer.idle_s > _MOVING_S for writer in self._writers if writer.is_reading(slot))

    def _learn(self, levels: tuple[NodeLevel, ...]) -> None:
        for news in self._known.news(levels):
            self._context.board.add(news)
        with self._telling:
            if levels != self._known.levels:
                self._tell(levels)
            # Only now: those who wait for a step are woken after trainers, and after writers that name and delete.
            self._known.take(levels)
        self._context.board.wake()

    def _tell(self, levels: tuple[NodeLevel, ...]) -> None:
        """Names may be written, old snapshots may go."""
        names = {step: set(given) for step, given in self._names.items()}
        for writer in self._writers:
            writer.on_order(levels, names)
        for step in sorted(names):
            if step in levels[0].lost:
                self._report_lost(step, names[step])

    def _report_lost(self, step: int, names: set[str]) -> None:
        text = f"that of step {step} was dropped, or overwritten in memory, before it was stored"
        level = self.levels[0].url
        for name in sorted(names):
            if (step, name) not in self._lost_names:
                self._lost_names.add((step, name))
                self._context.board.add(NameFailed(t=time.time(), level=level, name=name, text=text, is_lost=True))

    # --------------------------------------------------------------- the writers' side (``level_writer.WriterContext``)

    def _may_delete(self) -> bool:
        return not self._is_closed and not any(rank.is_choosing for rank in self._slots.ranks())

    # ---------------------------------------------------------------- the keeper's side

    def slots_changed(self) -> None:
        """Something changed in the slots, or a trainer came or went."""
        self._loop.slots_changed()

    def require(self, step: int, *, is_urgent: bool = False) -> None:
        """The step must be stored at every level."""
        self._loop.post(self._node.require, step, self._indices, is_urgent=is_urgent)

    def give_notice(self) -> None:
        """Store the newest capture now, and pass the notice on to all trainers: this start is about to be killed."""
        if self._is_ending:
            return
        self._is_ending = True
        self.store_newest()
        self._loop.post(self._node.take_notice)
        self._context.board.add(Notice(t=time.time()))

    def store_newest(self) -> None:
        """Store the newest capture that all ranks of the node hold whole, due or not."""
        step = self.common_step()
        if step is not None:
            self.require(step, is_urgent=True)

    def protect(self, step: int) -> None:
        """The step is to be protected by other nodes."""
        if self._protection is not None:
            self._loop.post(self._node.require, step, [len(self.levels)])

    def keep(self, name: str, step: int) -> None:
        """Name a snapshot: it must be stored, and gets the name at each level where it is complete."""
        # A new keeper gets old names, too: what is being written does not give way to those.
        self.require(step, is_urgent=any(slot is not None for slot in self._slots.of_step(step)))
        with self._telling:
            self._names.setdefault(step, set()).add(name)
            self._tell(self._known.levels)

    def release(self, name: str) -> None:
        """Take a name from this run's snapshots at every level."""
        with self._telling:  # else a writer that just got the name would give it again
            for names in self._names.values():
                names.discard(name)
            for writer in self._writers:
                writer.release(name)
            self._tell(self._known.levels)

    def wait_for(self, step: int) -> Wait:
        """Ask for a step at every level; the result shows if it arrives."""
        self.require(step)
        return Wait(lambda: self._at_levels(step), lambda: self.size_of(step))

    def _at_levels(self, step: int) -> list[AtLevel]:
        return [
            AtLevel(
                is_complete=StepKey(step, self.run.start) in level.complete,
                is_lost=step in level.lost,
                is_cancelled=step in level.cancelled,
                stopped_at=stopped,
                failed_at=None if writer.health.fails_since is None else writer.health.failed_at,
                moved_bytes=writer.moved_bytes if writer.step == step else 0,
            )
            for (level, stopped), writer in zip(self._known.known, self._writers, strict=True)
        ]

    def level_facts(self) -> list[tuple[PersistentLevel, NodeLevel, LevelWriter]]:
        """Settings, state and writer of each level."""
        known = zip(self._known.levels, self._node.levels, strict=False)  # the last may be protection
        levels = [replace(level, required=now.required) for level, now in known]
        return list(zip(self.levels, levels, self._writers, strict=True))

    def has_complete(self) -> bool:
        """True if the first level has a complete snapshot of this start."""
        return any(key.start == self.run.start for key in self._known.levels[0].complete)

    def common_step(self) -> int | None:
        """The newest step that all ranks of the node hold whole."""
        return self._slots.newest_common()

    def is_abandoned(self) -> bool:
        """True if all trainers that there were are gone, and none captured anything whole for this start."""
        ranks = self._slots.ranks()
        return bool(ranks) and all(rank.is_gone for rank in ranks) and self.common_step() is None

    @property
    def has_stored_alone(self) -> bool:
        """True if not all nodes answer, all trainers of this node are dead, and it stored alone what it could."""
        return self._core.alone.is_over

    def size_of(self, step: int) -> int:
        """Bytes of that step in the slots of the node."""
        return sum(0 if slot is None else slot.status().image_bytes for slot in self._slots.of_step(step))

    def is_reading(self, slot: Slot) -> bool:
        """True if a level reads this slot now."""
        return any(writer.is_reading(slot) for writer in self._writers)

    def is_at_work(self) -> bool:
        """True if an operation of any level runs."""
        return any(writer.is_at_work for writer in self._writers)

    def has_names(self) -> bool:
        """True if snapshots are still to be named, as far as levels work and nodes answer."""
        if any(writer.has_names for writer in self._writers):
            return True
        with self._telling:
            named = [step for step, names in self._names.items() if names]
        works = [level for level, stopped_at in self._known.known if stopped_at is None]
        return not self.has_stored_alone and any(self._is_awaited(step, level) for step in named for level in works)

    def _is_awaited(self, step: int, level: NodeLevel) -> bool:
        return StepKey(step, self.run.start) not in level.complete and step not in level.lost

    def is_idle(self) -> bool:
        """True if levels that work have nothing left to do: names, old snapshots."""
        return not self.has_names() and all(writer.is_idle for writer in self._writers)

    def close(self) -> None:
        """Store no more; what is under way may end. Blocks: for a moment."""
        self._is_closed = True
        before = self._before
        if before is not None:
            before.close()  # this one did not begin yet
        self.end_protection()
        self._loop.close()
        for writer in self._writers:
            writer.close()

    # ---------------------------------------------------------------- memory at rest

    def _rest(self) -> None:
        """The thread that looks after memory and links while nothing else does. No error ends it."""
        while not self._is_closed:
            try:
                self._links.look()
                if self._protection is not None:
                    self._protection.tell()
                # Without protection, one of as many newer captures is whole on all ranks (docs/architecture.md).
                if self._protection is None and len(whole_before_newest(self._slots.views())) >= self.run.num_kept:
                    self._context.parity.clear()
                pause_s = 0.0 if self._is_at_rest() and self._slots.add_checksums() else _REST_S
            except Exception:  # the last handler of the thread
                logger.exception("memory at rest")
                pause_s = _AFTER_ERROR_S
            time.sleep(pause_s)

    def _is_at_rest(self) -> bool:
        """True if nothing is written into the slots, and no level is at work: there is time to compute checksums."""
        ranks = self._slots.ranks()
        return bool(ranks) and all(rank.is_gone for rank in ranks) and not self.is_at_work()
