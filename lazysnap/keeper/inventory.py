"""The captures of a keeper that a restart could read: sent to its trainer, and to other processes of the same user."""

import contextlib
import os
import time
from collections.abc import Iterable, Sequence

from lazysnap.errors import LazySnapError
from lazysnap.keeper.frozen import FrozenPool
from lazysnap.keeper.held import HeldCapture, HeldParity, TrainerEnd
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.protocol import HandOver, Inventory, Message
from lazysnap.memory.arena import Slot, SlotPhase, Word
from lazysnap.memory.slot_pool import SlotPool
from lazysnap.shard.manifest import CaptureMeta


class RankInventory:
    """The whole captures in one keeper's slots, and the frozen tensors beside them."""

    def __init__(self, pool: SlotPool, frozen: FrozenPool) -> None:
        self._pool = pool
        self._frozen = frozen
        self._sequence = 0
        self.end: TrainerEnd | None = None
        """The end of the last trainer that captured anything."""

    def trainer_came(self) -> None:
        """A trainer is attached; what is captured from now on is its own."""
        self._sequence = max((slot.word(Word.SEQUENCE) for slot in self._pool.all()), default=0)

    def trainer_ended(self) -> None:
        """Remember when the trainer ended and how far it came; not of one that captured nothing, as an evaluation."""
        newest = max(self._pool.all(), key=lambda slot: slot.word(Word.SEQUENCE), default=None)
        if newest is None or newest.word(Word.SEQUENCE) <= self._sequence:
            return
        with contextlib.suppress(LazySnapError):  # it died while it wrote them: then the last end known stays
            meta = CaptureMeta.from_bytes(newest.read_meta())
            step = max(newest.word(Word.REACHED), newest.word(Word.BEGIN)) - 1
            self.end = TrainerEnd(time.time_ns(), meta.run_id, step)

    def message(self, local_ranks: Iterable[int], number: int = 0, parity: Sequence[HeldParity] = ()) -> Inventory:
        """The answer to the question of that number. ``local_ranks``: of all ranks for which the keeper has one."""
        entries = []
        for index, slot in self._pool.items():
            with contextlib.suppress(LazySnapError):  # unreadable metadata: nothing that could be restored
                entry = self._entry(index, slot)
                if entry is not None:
                    entries.append(entry)
        return Inventory(
            id=number,
            entries=entries,
            frozen=self._frozen.digests(),
            end=self.end,
            local_ranks=list(local_ranks),
            parity=list(parity),
        )

    def _entry(self, number: int, slot: Slot) -> HeldCapture | None:
        status = slot.status()
        if status.phase is not SlotPhase.WHOLE:
            return None
        meta = CaptureMeta.from_bytes(slot.read_meta())
        return HeldCapture(
            slot=number,
            step=meta.step,
            run_id=meta.run_id,
            start=meta.start,
            sequence=status.sequence,
            frozen=None if meta.frozen is None else meta.frozen.digest,
            rank=meta.rank,
            world_size=meta.world_size,
            checksums=slot.checksums,
        )

    def send_slots(self, connection: Connection) -> None:
        """Give the memory itself to another process that wants to read. Raises: OSError, if it is gone again."""
        for number, slot in self._pool.items():
            _lend(connection, HandOver(slot=number), slot)
        for digest, slot in self._frozen.items():
            _lend(connection, HandOver(slot=digest), slot)


def _lend(connection: Connection, message: Message, slot: Slot) -> None:
    """Send a descriptor through which the slot can only be read."""
    fd = slot.reading_fd()
    try:
        connection.send(message, (fd,))
    finally:
        os.close(fd)
