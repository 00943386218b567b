"""Protection of a node's memory by other nodes, for one start of a job: parity in their memory (REFT, section 4).

A keeper computes the parity that it is to hold, out of what it reads from the slots of the other nodes of its group.
Which step is protected is granted and counted as for storage: protection is one more level of ``grants``. When all
keepers have their parity of a step, the step is protected. Until a newer one is, its slots and its parity stay.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lazysnap import faults
from lazysnap.config import due_every
from lazysnap.errors import LazySnapError, LevelError
from lazysnap.events import Event, Protected
from lazysnap.grants.core import Action, Begin, Hold, Learn, ReleaseStalePins
from lazysnap.grants.node import NodeLevel, RankView, Write, whole_before_newest
from lazysnap.keeper.grant_loop import GrantLoop
from lazysnap.keeper.held import HeldParity
from lazysnap.keeper.node_slots import NodeSlots
from lazysnap.keeper.parity import Encoding, ParityStore
from lazysnap.keeper.protocol import Parity, Run
from lazysnap.keeper.reminder import Reminder
from lazysnap.levels.watchdog import WriteCancelled
from lazysnap.levels.watched import RateLimiter
from lazysnap.links.messages import PeerRefused
from lazysnap.memory.arena import SlotPhase, Word
from lazysnap.memory.failures import CaptureAborted, MemoryBoundExceeded
from lazysnap.topology import Team

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
"""Seconds between two tries to reach the others: the pause doubles from the first to the second."""
_LATE_S = 60.0
"""Seconds until the warning that nothing was protected since."""


@dataclass(frozen=True)
class ProtectionContext:
    """The keeper's side of protection."""

    emit: Callable[[Event], None]
    """Add to the status that trainers of the node get; does not block."""
    has_stored: Callable[[], bool]
    """True if a snapshot is complete at some level, and with it the frozen tensors."""
    loop: GrantLoop
    level: NodeLevel
    """The node's state for the grants of protection."""
    index: int
    """The number of this level."""


@dataclass
class HeldSteps:
    """Which captures a node holds for parity, and which step trainers know to be protected. Pure.

    Of one start. At most two steps of it, and what earlier starts held until this one protects one.
    """

    start: str
    level: NodeLevel
    """Its state for the grants of protection."""
    kept: int | None = None
    """The step whose slots and parity stay until a newer one is protected."""
    protected: int | None = None
    """The newest protected step that trainers know."""
    knows: bool = False
    """True once an order said what is protected, or this start is over."""
    is_earlier_over: bool = False
    """True if captures of earlier starts are released, although this start protected nothing."""

    def inherit(self, ranks: Sequence[RankView]) -> None:
        """Take over what a keeper before this one held of this start: of two steps the older one was protected."""
        self.kept = min((slot.step for rank in ranks for slot in rank.slots if slot.hold == slot.step), default=None)

    def stays(self, step: int | None, *, is_own: bool) -> bool:
        """True if slots and parity of that step stay. ``is_own``: of this start."""
        if is_own:
            # A new keeper does not know yet which of two steps is the protected one.
            return step in (self.kept, self.level.grant) or not self.knows
        return self.kept is None and not self.is_earlier_over

    def learn(self) -> bool:
        """Take an obeyed order; True if trainers must be informed."""
        before, self.knows = self.protected, True
        self.protected = max((key.step for key in self.level.complete if key.start == self.start), default=None)
        # If parity was lost with a keeper, what is left of it is the best there is.
        self.kept = self.kept if self.protected is None else self.protected
        return self.protected != before

    def release_earlier(self, ranks: Sequence[RankView], num_kept: int) -> None:
        """There are too few slots to protect anything: held ones must not hold up captures, once there are enough."""
        self.is_earlier_over = len(whole_before_newest(ranks)) >= num_kept

    def end(self) -> None:
        """This start is over. A step of which this node has its parity may be protected, as others know."""
        self.knows = True
        if self.level.grant not in self.level.stored:
            self.level.grant = None


class _Lateness:
    """Measures for how long nothing was protected that was due, and sends the alerts about it."""

    def __init__(self, emit: Callable[[Event], None], *, is_open: bool) -> None:
        """``is_open``: see ``Reminder``."""
        self._newest = -1
        """The newest protected step at the last look."""
        self._since = time.monotonic()
        """The time at which something that was due was protected last, or nothing was due."""
        self._reminder = Reminder("protection", _LATE_S, emit, is_open=is_open)

    def look(self, protected: int, *, is_newer_due: bool, why: Callable[[], str]) -> None:
        """Send an alert if one is due. ``protected``: the newest such step; ``is_newer_due``: a newer one should be."""
        now = time.monotonic()
        is_late = is_newer_due and protected <= self._newest
        if not is_late:
            self._newest, self._since = protected, now
        lasts_s = now - self._since
        text = f"nothing was protected for {lasts_s:.0f} s: "
        self._reminder.look(lasts_s if is_late else None, lambda: text + why())


class NodeProtection:
    """Protection of one node, for one start. Methods may be called from any thread, and do not block but for
    ``close``.

    It has many attributes because it joins memory, grants, other nodes and trainers; ``HeldSteps`` decides.
    """

    def __init__(self, run: Run, team: Team, slots: NodeSlots, store: ParityStore, context: ProtectionContext) -> None:
        """``run.peers`` and ``run.parity`` are there."""
        assert run.peers is not None
        assert run.parity is not None
        self._run, self._slots, self._store, self._context = run, slots, store, context
        self._parity: Parity = run.parity
        self._every = due_every(run.parity.every_n_steps, run.every_n_steps)
        pace = RateLimiter(run.parity.max_bytes_per_s)
        self._encoding = Encoding(run.parity, run, team, run.peers.secret, pace)
        self._loop = context.loop
        self._held = HeldSteps(run.start, context.level)
        if not run.is_new:
            self._held.inherit(slots.views())
        self._is_closed = False
        self._is_failing = False
        self._why = ""
        """Why the last step that was tried is not protected."""
        self._lateness = _Lateness(context.emit, is_open=not run.is_new)
        self._work: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        threading.Thread(target=self._encode_all, name="lazysnap-parity", daemon=True).start()

    def close(self) -> None:
        """Protect no more; what is protected stays so. Blocks: for a moment."""
        if self._is_closed:
            return  # another start may hold slots by now
        self._is_closed = True
        self._encoding.interrupt()
        with self._loop.lock:
            self._context.level.leave()
            self._let_go()  # now it is known of which steps there is parity
            self._held.end()
            self._let_go()
        self._work.put(None)

    # ---------------------------------------------------------------- the grants' side (``grant_loop``)

    def act(self, action: Action) -> None:
        """Carry out an action of the grants, if it concerns protection."""
        match action:
            case Hold(ranks, step) if not self._is_closed:
                slots = self._slots.of_step(step)
                for slot in (slots[number] for number in ranks):
                    if slot is not None:
                        slot.set_word(Word.HOLD, step + 1)
            case ReleaseStalePins() if not self._is_closed:
                self._let_go()
            case Begin(write) if write.level == self._context.index:
                self._work.put(write)
            case Learn() if not self._is_closed and self._held.learn():
                told = Protected(t=time.time(), step=self._held.protected, start=self._run.start)
                self._context.emit(told)

    def _let_go(self) -> None:
        held = self._held
        if held.kept is None and self._num_slots() < self._parity.slots:
            held.release_earlier(self._slots.views(), self._run.num_kept)
        start = self._run.start
        for rank in self._slots.ranks():
            for slot in rank.slots():
                status, is_own = slot.status(), rank.starts.holds(slot, start)
                is_there = status.step is not None and status.phase is not SlotPhase.VOID
                if status.held and not (is_there and held.stays(status.step, is_own=is_own)):
                    slot.set_word(Word.HOLD, 0)
        # What was let go is not there any more: if it is granted again, it is computed again.
        left = self._store.keep(lambda parity: held.stays(parity.step, is_own=parity.start == start))
        held.level.stored = {parity.step for parity in left if parity.start == start}

    # ---------------------------------------------------------------- parity

    def _encode_all(self) -> None:
        """The thread that computes parity."""
        while (write := self._work.get()) is not None:
            try:
                self._encode(write)
                self._is_failing, self._why = False, ""
                self._loop.post(self._loop.core.verified, write)
            except (CaptureAborted, WriteCancelled, PeerRefused) as error:
                self._encoding.close()  # a reader may be in the middle of a block
                logger.info("step %d is not protected: %s", write.step, error)
                if not isinstance(error, WriteCancelled):
                    self._why = f"step {write.step}: {error}"
                self._loop.post(self._loop.core.missed, write)
            except Exception as error:  # noqa: BLE001  the last handler of the thread
                self._encoding.close()
                if self._is_closed:
                    continue
                self._failed(write, error)
                self._await_peers()
        self._encoding.close()

    def _failed(self, write: Write, error: Exception) -> None:
        level, self._is_failing = logging.INFO if self._is_failing else logging.WARNING, True
        self._why = str(error) if isinstance(error, LazySnapError) else f"{type(error).__name__}: {error}"
        logger.log(level, "step %d is not protected by other nodes, tried again: %s", write.step, self._why)
        self._loop.post(self._loop.core.failed, write)

    def _encode(self, write: Write) -> None:
        def obey() -> None:
            if self._is_closed or not self._loop.is_wanted(write):
                raise WriteCancelled(f"step {write.step} was cancelled")

        faults.point("keeper.parity.begin")
        self._check_slots()
        done = self._encoding.encode(write.step, self._store, self._slots, obey)
        self._check_frozen(done.held)
        # The words once more: what parity was made of must be what is held.
        for slot in self._slots.of_step(write.step):
            if slot is None or slot.word(Word.HOLD) != write.step + 1 or slot.status().phase is not SlotPhase.WHOLE:
                raise CaptureAborted(f"step {write.step} is not in memory any more")
        faults.point("keeper.parity.done")
        obey()
        self._store.add(done)

    def _check_frozen(self, held: HeldParity) -> None:
        """Frozen tensors are not in the parity. Raises: LevelError, if those of a lost node would be lost."""
        digests = {frozenset(filter(None, member.frozen)) for member in held.members}
        if len(digests) > 1 and not self._context.has_stored():
            raise LevelError(
                "each node holds frozen tensors of its own, which parity leaves to storage, and they are not stored "
                "yet: give SnapshotConfig(levels=...), or wait for the first snapshot there"
            )

    def _check_slots(self) -> None:
        """Raises: MemoryBoundExceeded, if what is held would leave too few slots for captures."""
        if (count := self._num_slots()) < self._parity.slots:
            raise MemoryBoundExceeded(
                f"a rank of this node has {count} slots of memory, parity needs {self._parity.slots}"
            )

    def _num_slots(self) -> int:
        """The slots of the rank that has the fewest."""
        ranks = [rank.slots() for rank in self._slots.ranks()]
        counts = [sum(slot.status().ready for slot in slots) for slots in ranks]
        return min(counts, default=self._parity.slots)

    def _await_peers(self) -> None:
        """Try until all of the group can be reached again; then steps are granted again."""
        pause_s = _SHORTEST_PAUSE_S
        while not self._is_closed:
            try:
                self._check_slots()
                self._encoding.connect()
            except Exception as error:  # noqa: BLE001  the last handler of the thread
                self._why = str(error)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._loop.post(self._loop.node.probed, self._context.index)
                return

    # ---------------------------------------------------------------- telling

    def tell(self) -> None:
        """A run that is not protected says so, and says it again. Called now and then."""
        begun = max((view.begun for view in self._slots.views()), default=-1)
        protected = -1 if self._held.protected is None else self._held.protected

        def why() -> str:
            nodes, _ = self._loop.unreached
            unreached = f"no link to the keeper of node {min(nodes)}" if nodes else ""
            return unreached or self._why or "a node of its group, or of another one, has no parity yet"

        is_newer_due = begun // self._every > protected // self._every
        self._lateness.look(protected, is_newer_due=is_newer_due, why=why)
