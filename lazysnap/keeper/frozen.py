"""Frozen tensors, by the digest of their bytes: the keeper's slots of them, and who writes them at levels.

Ranks of a node with equal ones share a slot. A slot is whole when its words say so: the trainer compares the digest of
what it copied before it writes the last word.

At a level that all nodes see, nodes take turns, so that one node writes what several hold. The coordinator names one
node of those that ask. When that node is done, or has no link, it names the next one, which finds the file or writes
it.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.errors import FormatError, LevelError
from lazysnap.keeper.grant_loop import GrantLoop
from lazysnap.levels import SnapshotStore
from lazysnap.levels.blocks import FileBlocks, VerifiedSource
from lazysnap.levels.source import BlockSource, MemorySource, shard_of
from lazysnap.levels.watchdog import Beat
from lazysnap.memory.arena import Slot, SlotPhase
from lazysnap.memory.slot_pool import make_slot_or_file
from lazysnap.resolver import FrozenEntry
from lazysnap.shard.manifest import CaptureMeta, FrozenReference, Shard
from lazysnap.shard.names import frozen_directory_name

logger = logging.getLogger(__name__)

_POLL_S = 0.02
"""Pause of a waiting node between two checks of the last order."""
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 1.0, 10.0
"""Pauses of a waiting node between two checks of the level: each is twice as long as the one before."""
_SLOWEST_BYTES_PER_S = 10 << 20
"""The lowest rate of writing that the deadline allows for, unless ``max_bytes_per_s`` of the level is lower."""


class FrozenTurn:
    """The turns of this node at one level, for one job."""

    def __init__(self, loop: GrantLoop, index: int, level: PersistentLevel, beat: Beat) -> None:
        """``index``: of the level; ``beat``: of the job, called while another node has the turn."""
        self._loop, self._index, self._level = loop, index, level
        self._beat = beat

    @contextlib.contextmanager
    def taken(self, store: SnapshotStore, frozen: FrozenReference) -> Iterator[None]:
        """Ask for the turn, and give it back at the end.

        Blocks: until this node is named, the tensors are there, or the deadline passed: ``timeout_s`` of the level, and
        the time that a slow node takes to write them. Raises: LevelError; CaptureAborted.
        """
        self._loop.post(self._loop.node.ask, self._index, frozen.digest)
        try:
            self._wait(store, frozen)
            yield
        finally:
            self._loop.post(self._loop.node.ask, self._index, None)

    def _wait(self, store: SnapshotStore, frozen: FrozenReference) -> None:
        rate = min(_SLOWEST_BYTES_PER_S, self._level.max_bytes_per_s or _SLOWEST_BYTES_PER_S)
        began, pause_s = time.monotonic(), _SHORTEST_LOOK_S
        deadline, look_at = began + self._level.timeout_s + frozen.size_bytes / rate, began + pause_s
        while not self._loop.is_to_write(self._index, frozen.digest):
            faults.point("keeper.frozen.wait")
            if time.monotonic() > deadline:
                seconds, where = time.monotonic() - began, store.url
                logger.warning(
                    "%s: another node was to write the frozen tensors %s and did not in %.0f s: this node writes them",
                    *(where, frozen.digest, seconds),
                )
                return
            if time.monotonic() > look_at:
                if store.has_frozen(frozen.digest):
                    return
                pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
                look_at = time.monotonic() + pause_s
            self._beat()
            time.sleep(_POLL_S)


class FrozenPool:
    """Slots by digest, for all ranks of the node. Thread-safe."""

    def __init__(self, dropped: Callable[[str], None]) -> None:
        """``dropped`` is called with each digest that is let go."""
        self._dropped = dropped
        self._lock = threading.Lock()
        self._slots: dict[str, Slot] = {}
        self._asked: dict[int, list[str]] = {}
        """The digests that each trainer asked for, by local rank, the last one last."""
        self._fillers: dict[str, int] = {}
        """The local rank whose trainer fills the slot."""
        self._making: dict[str, threading.Lock] = {}

    def get(self, digest: str) -> Slot | None:
        """The whole slot of that digest."""
        with self._lock:
            slot = self._slots.get(digest)
        return slot if slot is not None and _is_whole(slot) else None

    def items(self) -> list[tuple[str, Slot]]:
        """Every slot, whole or not, with its digest."""
        with self._lock:
            return list(self._slots.items())

    def digests(self) -> list[str]:
        """The digests of the whole ones."""
        return [digest for digest, slot in self.items() if _is_whole(slot)]

    def size_bytes(self, local_rank: int, *, without: str = "") -> int:
        """Memory that those take which a rank asked for; one may be left out."""
        with self._lock:
            asked = {*self._asked.get(local_rank, ())} - {without}
            return sum(slot.memory_bytes for digest, slot in self._slots.items() if digest in asked)

    def provide(
        self,
        local_rank: int,
        digest: str,
        sizes: tuple[int, int],
        free_bytes: int | None,
        spill_dir: str | None = None,
    ) -> tuple[Slot, bool]:
        """The slot for that digest: the one that is there, or a new one of these sizes (metadata, tensors); and whether
        the trainer of that rank is to fill it.

        Blocks: populates memory. It is a file in ``spill_dir`` if it takes more than ``free_bytes``, or than there is.
        Raises: MemoryBoundExceeded, without such a directory, or if there is no room.
        """
        with self._lock:
            self._ask(local_rank, digest)
            making = self._making.setdefault(digest, threading.Lock())
        with making:
            slot = dict(self.items()).get(digest)
            if slot is None:
                slot = self.adopt(local_rank, digest, _make(sizes, free_bytes, spill_dir))
        with self._lock:
            return slot, not _is_whole(slot) and self._fillers.setdefault(digest, local_rank) == local_rank

    def filled(self, local_rank: int, digest: str | None = None) -> None:
        """The trainer of that rank writes no more into the slot of that digest; into none, without ``digest``."""
        with self._lock:
            mine = {known for known, filler in self._fillers.items() if filler == local_rank}
            for known in mine if digest is None else mine & {digest}:
                del self._fillers[known]

    def forget(self, local_rank: int) -> None:
        """That rank is gone."""
        self.filled(local_rank)
        with self._lock:
            self._asked.pop(local_rank, None)

    def _ask(self, local_rank: int, digest: str) -> None:
        others = [one for one in self._asked.get(local_rank, ()) if one != digest]
        self._asked[local_rank] = [*others, digest]

    def _asked_last(self) -> set[str]:
        return {asked[-1] for asked in self._asked.values() if asked}

    def adopt(self, local_rank: int, digest: str, slot: Slot) -> Slot:
        """Take over a slot, as a trainer kept it when an earlier keeper died; the one that serves for that digest."""
        with self._lock:
            self._ask(local_rank, digest)
            known = self._slots.get(digest)
            if known is not None and (_is_whole(known) or os.path.sameopenfile(known.fd, slot.fd)):
                slot.close()
                return known
            self._slots[digest] = slot
        return slot

    def sweep(self, captures: Iterable[Slot]) -> None:
        """Let go of slots that no capture refers to and no rank asked for last."""
        with self._lock:
            unasked = self._slots.keys() - self._asked_last()
        if not unasked:
            return
        try:
            referred = {_reference(slot) for slot in captures}
        except FormatError:
            return  # a capture begins right now: next time
        for digest in unasked - referred:
            self._drop(digest)

    def _drop(self, digest: str) -> None:
        with self._lock:
            if digest in self._asked_last():
                return  # asked for again meanwhile
            slot = self._slots.pop(digest)
            self._asked = {rank: [one for one in asked if one != digest] for rank, asked in self._asked.items()}
            faults.point("keeper.frozen.drop")
            # Told before anybody can ask for another one of that digest.
            self._dropped(digest)
        # Another thread may still read it: the memory goes with the last reference.
        weakref.finalize(slot, os.close, slot.fd)

    def close(self) -> None:
        """Let all of them go."""
        with self._lock:
            slots, self._slots = list(self._slots.values()), {}
        for slot in slots:
            weakref.finalize(slot, os.close, slot.fd)


def _make(sizes: tuple[int, int], free_bytes: int | None, spill_dir: str | None) -> Slot:
    """Raises: MemoryBoundExceeded."""
    needed, refused = Slot.bytes_for(*sizes), ""
    faults.point("keeper.frozen.make")
    if free_bytes is not None and needed > free_bytes:
        refused = (
            f"the frozen tensors need {needed} bytes, MemoryLevel.max_bytes leaves {max(0, free_bytes)} beside "
            "the slots for snapshots; raise it"
        )
    return make_slot_or_file(sizes, "the frozen tensors", refused, spill_dir)


def _is_whole(slot: Slot) -> bool:
    return slot.status().phase is SlotPhase.WHOLE


def _reference(slot: Slot) -> str | None:
    """The digest that the capture in ``slot`` refers to. Raises: FormatError, if it cannot be read now."""
    status = slot.status()
    if status.phase not in (SlotPhase.WHOLE, SlotPhase.CAPTURING):
        return None
    frozen = CaptureMeta.from_bytes(slot.read_meta()).frozen
    if slot.status().sequence != status.sequence:
        raise FormatError("another capture began meanwhile")
    return None if frozen is None else frozen.digest


class FrozenWriter:
    """Writes frozen tensors at one level, before the first snapshot that refers to them.

    What is missing there comes from memory, else from a faster level.
    """

    def __init__(self, slot_of: Callable[[str], Slot | None], *, verify: bool = False) -> None:
        """``slot_of`` gives the whole slot of the frozen tensors of a digest, if there is one.

        ``verify``: read them back also where the storage checks what arrives.
        """
        self._slot_of, self._verify = slot_of, verify
        self._whole: set[str] = set()
        """Digests of the files that this start wrote, or read in full."""

    def is_whole(self, store: SnapshotStore, digest: str) -> bool:
        """True if the frozen tensors are at the level and undamaged. The first call of a start reads the whole file.

        A damaged file loses its manifest. Blocks. Raises: LevelError.
        """
        if not store.has_frozen(digest):
            return False
        if digest not in self._whole:
            try:
                store.verify_frozen(digest)
            except FormatError as error:
                logger.warning("%s; they are written again if memory or a faster level still has them", error)
                return False
            self._whole.add(digest)
        return True

    def bring(
        self,
        store: SnapshotStore,
        meta: CaptureMeta,
        origin: SnapshotStore | None = None,
        turn: FrozenTurn | None = None,
    ) -> None:
        """Write what the snapshot of ``meta`` refers to, unless it is there and whole.

        ``origin`` is a faster level that has the snapshot. With a ``turn`` one of several nodes writes.
        Blocks: also while another node writes. Raises: LevelError, CaptureAborted.
        """
        frozen = meta.frozen
        if frozen is None or self.is_whole(store, frozen.digest):
            return
        with contextlib.nullcontext() if turn is None else turn.taken(store, frozen):
            if turn is None or not self.is_whole(store, frozen.digest):
                self._write(store, meta.step, frozen, origin)

    def _write(self, store: SnapshotStore, step: int, frozen: FrozenReference, origin: SnapshotStore | None) -> None:
        with self._source(step, frozen, origin) as (shard, source):
            store.write_frozen(shard, source, frozen.digest)
        # Once, also without ``PersistentLevel.verify``: snapshots that refer to them compare only their size.
        if self._verify or not store.storage.checks_writes:
            store.verify_frozen(frozen.digest)
        self._whole.add(frozen.digest)

    @contextlib.contextmanager
    def _source(
        self, step: int, frozen: FrozenReference, origin: SnapshotStore | None
    ) -> Iterator[tuple[Shard, BlockSource]]:
        slot = self._slot_of(frozen.digest)
        if slot is not None:
            own = CaptureMeta.from_bytes(slot.read_meta(), "a slot of frozen tensors")
            held = MemorySource(slot.image, frozen.size_bytes)
            yield shard_of(own, held), held
            return
        if origin is None:
            raise LevelError(f"the frozen tensors {frozen.digest} of step {step} are gone from memory")
        entry = FrozenEntry(origin.url, origin.speed, frozen.digest, frozen_directory_name(frozen.digest))
        try:
            manifest = origin.read_manifest(entry)
            shard, blocks = manifest.shards[0], FileBlocks(origin.place(entry), manifest)
            blocks.header(shard)
        except (FormatError, FileNotFoundError) as error:
            where = origin.url
            raise LevelError(f"{where}: the frozen tensors {frozen.digest} are not there any more") from error
        with contextlib.closing(blocks):
            yield shard, VerifiedSource(blocks)
