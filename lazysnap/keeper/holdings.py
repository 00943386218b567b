"""What a keeper holds that a restart could read: told to its trainer, and shown to other processes of the same user."""

import contextlib
from collections.abc import Callable
from typing import Any

from lazysnap.arena import Slot, SlotPhase
from lazysnap.errors import LazySnapError
from lazysnap.keeper.frozen import FrozenPool
from lazysnap.keeper.memory import SlotPool
from lazysnap.keeper.messages import Connection
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.manifest import CaptureMeta


class Holdings:
    """The whole captures in one keeper's slots, and the immutable tensors beside them."""

    def __init__(self, pool: SlotPool, frozen: FrozenPool, checksums_of: Callable[[Slot], Checksums | None]) -> None:
        self._pool = pool
        self._frozen = frozen
        self._checksums_of = checksums_of

    def told(self) -> dict[str, Any]:
        """The fields of the message ``inventory``."""
        entries = []
        for number, slot in self._pool.items():
            with contextlib.suppress(LazySnapError):  # unreadable metadata: nothing that could be restored
                entry = self._entry(number, slot)
                if entry is not None:
                    entries.append(entry)
        return {"entries": entries, "frozen": self._frozen.digests()}

    def _entry(self, number: int, slot: Slot) -> dict[str, Any] | None:
        status = slot.status()
        if status.phase is not SlotPhase.WHOLE:
            return None
        meta = CaptureMeta.from_bytes(slot.read_meta())
        checksums = self._checksums_of(slot)
        return {
            "slot": number,
            "step": meta.step,
            "run_id": meta.run_id,
            "run_started_ns": meta.run_started_ns,
            "rank": meta.rank,
            "world_size": meta.world_size,
            "generation": meta.generation,
            "sequence": status.sequence,
            "frozen": meta.frozen and meta.frozen.digest,
            "block_bytes": checksums.block_bytes if checksums else 0,
            "blocks": list(checksums.blocks) if checksums else None,
        }

    def show(self, connection: Connection) -> None:
        """Another process wants to read: the memory itself, and what it is. Raises: OSError, if it is gone again."""
        for number, slot in self._pool.items():
            connection.send({"type": "slot", "slot": number}, (slot.fd,))
        for digest, slot in self._frozen.items():
            connection.send({"type": "frozen_slot", "digest": digest}, (slot.fd,))
        connection.send({"type": "inventory", **self.told()})
