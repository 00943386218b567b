"""One rank of a node, as its keeper serves it: the trainer's connection and its end, slots, levels."""

import logging
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.keeper import protocol
from lazysnap.keeper.frozen import FrozenPool
from lazysnap.keeper.inventory import RankInventory
from lazysnap.keeper.lifecycle import Event, Phase, next_phase
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.node_storage import NodeStorage
from lazysnap.keeper.process_watch import ProcessWatch
from lazysnap.keeper.rank_slots import RankSlots
from lazysnap.keeper.starts import Starts
from lazysnap.keeper.status import StatusBoard
from lazysnap.keeper.step_wait import Wait
from lazysnap.memory.arena import Slot, SlotPhase, Word
from lazysnap.topology import Team

logger = logging.getLogger(__name__)

DRAIN_LIMIT_S = 3600.0
"""Seconds after which captures of a rank without a trainer are freed, even if a level still hangs."""
_NAMES_S = 60.0
"""Seconds for which a rank that drains waits for names; after that the keeper goes on giving them by itself."""
_HEARTBEAT_S = 1.0
"""A trainer gets a status so often, though nothing changed."""
_AWAY_GRACE_S = 1.5
"""A trainer that lives and lost its connection comes back sooner; until then no other process takes its place. Less
than the time for which a new trainer asks again (``attach._BUSY_GRACE_S``).
"""


@dataclass
class Node:
    """The parts of a keeper that all ranks of its node share."""

    frozen: FrozenPool
    board: StatusBoard
    """The status that trainers get."""
    storage: NodeStorage | None = None
    """The storage of the newest start; ``None``: no trainer began one yet."""


class LocalRank:
    """The captures and duties of a keeper for one rank of its node. Used on the keeper's main thread.

    It is large because each message of the trainer, its death and each phase may change all of this. What stands alone
    is apart: slots (``RankSlots``), the table of phases (``lifecycle``), what is stored (``NodeStorage``).
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        close: Callable[[Connection], None],
        last_words: Callable[[Connection], None],
        node: Node,
    ) -> None:
        """``close`` ends a connection, which leads to ``lost_connection``; ``last_words`` reads what is left there."""
        self._watch = ProcessWatch(selector)
        self._close = close
        self._last_words = last_words
        self._node = node
        self._sent: tuple[protocol.Status, tuple[int, int]] | None = None
        """The last status that the trainer took, and the progress with it."""
        self._sent_at = float("-inf")
        """The time of that, by the monotonic clock."""
        self.phase = Phase.WAITING
        self._phase_since = self._deadline = time.monotonic()
        self._linger_s = 0.0
        self.trainer: Connection | None = None
        self.trainer_since = 0.0
        self.trainer_pid = 0
        self._memory = RankSlots(node.frozen, self.emit, lambda: self.phase is Phase.ATTACHED, self._is_reading)
        self._pool = self._memory.pool
        self._frozen = node.frozen
        self.levels: tuple[PersistentLevel, ...] = ()
        self.team = Team()
        self.inventory = RankInventory(self._pool, self._frozen)
        self._drain: tuple[protocol.Drain, Wait | None] | None = None
        self._is_superseded = False
        """True if nobody needs what it holds."""
        self._last: Wait | None = None
        """The wait for the newest step that the node holds, while it drains."""
        self._progress = (0, 0)
        self._is_sealed = False
        """True if its trainer lives, and captures nothing more."""
        self.ended: tuple[Literal["goodbye", "left", "died"], float] | None = None
        """The end of its last trainer: how, and the Unix time; ``None`` while there is one. For people."""
        self.is_choosing = False
        """True if its trainer did not name its run yet: until then nothing may be deleted."""
        self.starts = Starts()

    @property
    def is_used(self) -> bool:
        """True if it has a trainer, which may have lost its connection for a moment."""
        return self.phase in (Phase.ATTACHED, Phase.AWAY)

    @property
    def is_gone(self) -> bool:
        """True if its trainer is dead, sealed, or said goodbye: captures in its slots do not change any more."""
        return self._is_sealed or self.phase not in (Phase.WAITING, Phase.ATTACHED, Phase.AWAY)

    def slots(self) -> list[Slot]:
        """All of them."""
        return self._pool.all()

    def holds_only(self, start: str) -> bool:
        """True if there are whole captures, and all are of that start."""
        whole = [slot for slot in self._pool.all() if slot.status().phase is SlotPhase.WHOLE]
        return bool(whole) and all(self.starts.holds(slot, start) for slot in whole)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline of its phase."""
        return max(0.0, self._deadline - time.monotonic())

    def tick(self) -> None:
        """Do what is due; called about ten times a second, and whenever something happened."""
        self._memory.wake()
        if self._drain is not None:
            self._look_at_drain(*self._drain)
        if self.phase is Phase.ATTACHED and self.trainer is None:  # an error came in between when it died
            self._trainer_died()
        if self.phase is Phase.DRAINING and self.is_drained():
            self.go(Event.DRAINED)
        if self.phase is not Phase.ATTACHED and time.monotonic() > self._deadline:
            self.go(Event.TIME_UP)

    def stay(self) -> None:
        """Another rank of the node has a trainer: what the dead one left is kept, and lingers from now on."""
        if self.phase is Phase.LINGERING:
            self._deadline = time.monotonic() + self._linger_s

    def go(self, event: Event) -> None:
        """Something happened; see ``keeper.lifecycle``."""
        before, self.phase = self.phase, next_phase(self.phase, event)
        if self.phase is before:
            return
        logger.info("local rank %d: %s -> %s on %s", self.team.local_rank, before.value, self.phase.value, event.value)
        faults.point(f"keeper.{self.phase.name.lower()}")
        self._phase_since = time.monotonic()
        limit = self._linger_s if self.phase in (Phase.AWAY, Phase.LINGERING) else DRAIN_LIMIT_S
        self._deadline = time.monotonic() + limit
        self._is_superseded = event is Event.SUPERSEDED
        if self.phase is Phase.DRAINING and not self._is_superseded:
            self.await_newest()
        storage = self._node.storage
        if storage is not None:
            storage.slots_changed()

    def await_newest(self) -> None:
        """Ask anew for the newest step that the node holds: a level that was away may be back."""
        storage = self._node.storage
        step = None if storage is None else storage.common_step()
        self._last = None if storage is None or step is None else storage.wait_for(step)

    def close(self) -> None:
        """Let everything go. Threads that hang at a level end when it answers, or with the process."""
        if self.trainer is not None:
            self._close(self.trainer)
        self._watch.end()
        self.phase = Phase.GONE
        self._memory.close()

    # ---------------------------------------------------------------- what a person who stops the keeper wants to know

    def is_drained(self) -> bool:
        """True if every level has the newest step that the node held, with its names, or was tried."""
        storage = self._node.storage
        if self._is_superseded or (storage is not None and storage.has_stored_alone):
            return True
        if self._last is None:
            self.await_newest()
        if self._last is not None and self._last.result() is None:
            return False
        is_late = time.monotonic() - self._phase_since > _NAMES_S
        return storage is None or is_late or not storage.has_names()

    def is_durable(self) -> bool:
        """True if it is at every level; also if nobody wants it any more."""
        return self.phase is not Phase.LINGERING or self._last is None or self._last.result() is True

    def newest_step(self) -> int | None:
        """The step of the newest whole capture."""
        held = [slot.status() for slot in self._pool.all()]
        newest = max((s for s in held if s.phase is SlotPhase.WHOLE), key=lambda s: s.sequence, default=None)
        return None if newest is None else newest.step

    # ---------------------------------------------------------------- the trainer

    def lost_connection(self) -> None:
        """The connection to the trainer ended."""
        self.trainer, self._drain, self.is_choosing = None, None, False
        if self._watch.is_alive:
            self.go(Event.CONNECTION_LOST)
        else:
            self._trainer_died()

    def refuses(self, connection: Connection) -> bool:
        """True if another process than the one at the other end is this rank's trainer."""
        if self.trainer is not None:
            return True
        if self.phase is not Phase.AWAY or connection.peer_pid == self.trainer_pid:
            return False
        is_writing = any(slot.status().phase is SlotPhase.CAPTURING for slot in self._pool.all())
        if is_writing or time.monotonic() - self._phase_since < _AWAY_GRACE_S:
            return True  # that process still writes into a slot, or is about to connect again
        self._trainer_died()
        return False

    def attach(self, trainer: Connection, hello: protocol.Hello) -> None:
        """Serve this trainer from now on."""
        self._linger_s = hello.memory.linger_s
        self._memory.serve(hello)
        self.trainer, self.trainer_since, self.trainer_pid = trainer, time.time(), trainer.peer_pid
        self.inventory.trainer_came()
        self._watch.begin(trainer.peer_pid, self._on_trainer_exit)
        self.levels, self.team = hello.levels, hello.team
        self.is_choosing, self._last, self._sent = True, None, None
        self._is_sealed, self.ended = False, None
        self.go(Event.HELLO)
        newest = max((slot.word(Word.SEQUENCE) for slot in self._pool.all()), default=0)
        self.emit(protocol.Welcome(os.getpid(), newest))
        for number, slot in self._pool.items():
            self.emit(protocol.HandOver(slot=number), (slot.fd,))
        for digest in self._frozen.digests():
            self._hand_over(digest)

    def _hand_over(self, digest: str) -> None:
        slot = dict(self._frozen.items()).get(digest)
        if slot is not None:
            self.emit(protocol.HandOver(slot=digest), (slot.fd,))

    def _on_trainer_exit(self) -> None:
        if self.trainer is not None:
            self._last_words(self.trainer)  # a goodbye may be among what it said before
        if self.trainer is not None:
            self._close(self.trainer)
        if self._watch.is_on:  # its connection had ended before
            self._trainer_died()

    def _trainer_died(self, how: Literal["left", "died"] = "died") -> None:
        """Nothing is written into the slots any more. What is not whole is void."""
        self.ended = how, time.time()
        self._watch.end()
        self._memory.trainer_ended()
        self.inventory.trainer_ended()
        self.is_choosing = False
        for slot in self._pool.all():
            if slot.status().phase is SlotPhase.CAPTURING:
                slot.discard()
                slot.unpin()
        faults.point("keeper.trainer_died")
        # An evaluation, or a trainer that fell before its first capture, left nothing that a restart could want.
        has_whole = any(slot.status().phase is SlotPhase.WHOLE for slot in self._pool.all())
        self.go(Event.TRAINER_DEAD if has_whole else Event.NOTHING_KEPT)

    # ---------------------------------------------------------------- messages of the trainer

    def handle(self, message: protocol.Message, fds: tuple[int, ...]) -> None:
        """Do what the trainer says. Raises: ValueError, if a trainer says no such thing; OSError; LazySnapError.

        What adopts a slot takes its one descriptor over.
        """
        storage = self._node.storage
        match message:
            case protocol.SlotsChanged():
                if storage is not None:
                    storage.slots_changed()
            case protocol.Reserve(frozen=None):
                self._memory.reserve(message)
            case protocol.Reserve():
                assert self.trainer is not None
                self._memory.ask_frozen(self.trainer, message)
            case protocol.Return(slot=int(number)):
                self._memory.take_back(number)
            case protocol.Return(slot=str(digest)):
                self._frozen.filled(self.team.local_rank, digest)
                if storage is not None:
                    storage.slots_changed()
            case protocol.HandOver(slot=None | str() as digest):
                (fd,) = fds
                self._adopt(Slot.attach(fd), digest)
            case protocol.Release():
                if storage is not None:
                    storage.release(message.name)
            case protocol.Store(step, name):
                if storage is not None and name is None:
                    storage.require(step, is_urgent=True)
                elif storage is not None and name is not None:
                    storage.keep(name, step)
            case protocol.Protect():
                if storage is not None:
                    storage.protect(message.step)
            case protocol.Leave(how="soon" | "sealed" as how):
                self._is_sealed = how == "sealed"
                if storage is not None:
                    storage.give_notice()
                    storage.slots_changed()
            case protocol.Drain():
                self._progress = (0, 0)
                self._drain = message, storage.wait_for(message.step) if storage is not None and self.levels else None
            case protocol.Leave():
                self._drain = None
                if message.how == "over":
                    self.ended = "goodbye", time.time()
                    self.go(Event.GOODBYE)
                else:  # its process may live on
                    self.trainer = None
                    self._trainer_died("left")
            case _:
                raise ValueError("no message of a trainer")

    def begin_run(self, run: protocol.Run) -> None:
        """Captures from now on are of this run and start."""
        self.is_choosing, self._sent = False, None  # a status before it knew its start was lost on it
        self.starts.begin(run, self.team)

    def _adopt(self, slot: Slot, digest: str | None) -> None:
        """A trainer outlived the keeper before: its slot, and what is in it, are kept on."""
        if digest is None:
            number, kept = self._pool.adopt(slot)
            self.emit(protocol.HandOver(slot=number), (kept.fd,))
        else:
            self._frozen.adopt(self.team.local_rank, digest, slot)
            self._hand_over(digest)

    def _look_at_drain(self, request: protocol.Drain, wait: Wait | None) -> None:
        if wait is None:  # without levels, what counts is that this keeper has it
            whole = [slot.status() for slot in self._pool.all()]
            self._answer(request, any(s.step == request.step and s.phase is SlotPhase.WHOLE for s in whole))
            return
        self._progress = wait.progress()
        result = wait.result()
        if result is not None and self.send_status():  # first that it is durable
            self._answer(request, result)

    def _answer(self, request: protocol.Drain, ok: bool) -> None:
        self._drain = None
        self.emit(protocol.Done(id=request.id, ok=ok))

    # ---------------------------------------------------------------- other threads

    def emit(self, message: protocol.Message, fds: tuple[int, ...] = ()) -> None:
        """Tell the trainer, if there is one."""
        trainer = self.trainer
        if trainer is not None:
            try:
                trainer.send(message, fds)
            except OSError as error:  # it is dying, which the main loop will notice, or takes nothing now
                logger.info("could not tell the trainer: %s", error)

    def send_status(self) -> bool:
        """Send the newest status, unless the trainer got it within the last second; ``False`` if it takes none now.

        Does not block.
        """
        status = self._node.board.status
        progress = self._progress
        trainer = self.trainer
        if trainer is None:
            return True
        is_new = self._sent is None or self._sent[0] is not status or self._sent[1] != progress
        if not is_new and time.monotonic() - self._sent_at < _HEARTBEAT_S:
            return True
        try:
            is_taken = trainer.post(msgspec.structs.replace(status, drained=progress))
        except OSError as error:  # it is dying, which the main loop will notice
            logger.info("could not tell the trainer: %s", error)
            return False
        if is_taken:
            self._sent = status, progress
            self._sent_at = time.monotonic()
        return is_taken

    def _is_reading(self, slot: Slot) -> bool:
        storage = self._node.storage
        return storage is not None and storage.is_reading(slot)
