"""Takes captures from slots to the levels, in the background, one thread per level.

The first level that works reads the slot, while it may still fill; later levels copy that level's file. What a level
cannot keep up with it leaves out: always the newest capture next. A level that fails costs that level that snapshot.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from lazysnap import faults
from lazysnap.arena import Slot, SlotPhase, SlotStatus, Word
from lazysnap.config import PersistentLevel
from lazysnap.errors import CaptureAborted, FormatError, LazySnapError
from lazysnap.keeper.machine import LevelProgress, cascades, newest_whole, slot_to_persist, stale_pins
from lazysnap.keeper.messages import Message
from lazysnap.levels import SnapshotStore, open_store
from lazysnap.levels.source import FileSource
from lazysnap.resolver import Entry
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.manifest import CaptureMeta, Manifest

logger = logging.getLogger(__name__)

_POLL_S = 0.001
_IDLE_S = 0.5
STALL_S = 300.0
"""A capture whose watermark does not move for so long is given up."""


class SlotSource:
    """The image in a slot, as it lands. See ``levels.source.BlockSource``."""

    def __init__(self, slot: Slot, chosen: SlotStatus) -> None:
        """Read the capture that was ``chosen``. Raises: CaptureAborted, if it is gone; FormatError, if unreadable."""
        self._slot = slot
        self._step = chosen.step
        self.sequence = chosen.sequence
        self.size_bytes = chosen.image_bytes
        # Before and after: metadata and numbers must be of one capture, whatever the trainer does meanwhile.
        self._check()
        meta = slot.read_meta()
        self._check()
        self.meta = CaptureMeta.from_bytes(meta, "a slot of the arena")
        if self.meta.step != chosen.step:
            raise FormatError(f"a slot of the arena: its words say step {chosen.step}, its metadata {self.meta.step}")

    def _check(self) -> int:
        status = self._slot.status()
        if status.sequence != self.sequence or status.phase not in (SlotPhase.CAPTURING, SlotPhase.WHOLE):
            raise CaptureAborted(f"the capture of step {self._step} was dropped or its slot reused")
        return self.size_bytes if status.phase is SlotPhase.WHOLE else status.watermark

    def wait(self, upto: int) -> None:
        """See ``BlockSource.wait``."""
        seen, deadline = -1, 0.0
        while (watermark := self._check()) < upto:
            if watermark != seen:
                seen, deadline = watermark, time.monotonic() + STALL_S
            elif time.monotonic() > deadline:
                raise CaptureAborted(f"the capture of step {self._step} stands still at byte {watermark}")
            time.sleep(_POLL_S)

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``."""
        return self._slot.image[offset : offset + length]

    def finish(self) -> None:
        """Every byte was read: the capture must still be the same one, and whole."""
        self.wait(self.size_bytes)
        deadline = time.monotonic() + STALL_S
        while self._check() and (self._slot.status().phase is not SlotPhase.WHOLE or self._slot.word(Word.UNCHECKED)):
            if time.monotonic() > deadline:
                raise CaptureAborted(f"the capture of step {self._step} was not checked by its trainer")
            time.sleep(_POLL_S)


class Persister:
    """All levels of one keeper. Thread-safe."""

    def __init__(
        self, levels: Sequence[PersistentLevel], slots: Callable[[], list[Slot]], emit: Callable[[Message], None]
    ) -> None:
        self.levels = tuple(levels)
        self._slots = slots
        self._emit = emit
        self._changed = threading.Condition()
        self._force = False
        self._stopping = False
        self._tried = 0
        self._progress = [LevelProgress() for _ in self.levels]
        self._source: tuple[int, Entry, Manifest] | None = None
        self._busy: set[int] = set()
        self._stores: dict[int, SnapshotStore] = {}
        self._checksums: weakref.WeakKeyDictionary[Slot, tuple[int, Checksums]] = weakref.WeakKeyDictionary()
        self._reading: Slot | None = None
        self._swept: set[int] = set()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"level-{index}", daemon=True)
            for index in range(max(1, len(self.levels)))
        ]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Something may have to be done: a capture began, or became whole."""
        with self._changed:
            self._changed.notify_all()

    def set_force(self, force: bool) -> None:
        """Whether the newest whole capture is to be persisted at every level, due or not."""
        with self._changed:
            self._force = force
            self._changed.notify_all()

    def try_again(self) -> None:
        """Forget failures: what is nowhere, or not everywhere, durable gets another chance."""
        with self._changed:
            newest = self._newest_sequence()
            if not any(progress.durable_sequence >= newest for progress in self._progress):
                self._tried = min(self._tried, newest - 1)
            # The first level has no other chance than the one above: it does not copy from later ones.
            self._progress[1:] = [
                replace(progress, sequence=progress.durable_sequence) for progress in self._progress[1:]
            ]
            self._changed.notify_all()

    def _newest_sequence(self) -> int:
        statuses = [slot.status() for slot in self._slots()]
        newest = newest_whole(statuses)
        return 0 if newest is None else statuses[newest].sequence

    def stop(self) -> None:
        """Let the threads end after what they are doing."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def is_reading(self, slot: Slot) -> bool:
        """Whether a thread reads this slot now."""
        return self._reading is slot

    def checksums_of(self, slot: Slot) -> Checksums | None:
        """Checksums of the capture in ``slot``, if they are known."""
        sequence, checksums = self._checksums.get(slot, (0, None))
        return checksums if sequence == slot.status().sequence else None

    def is_drained(self) -> bool:
        """Whether the newest whole capture was brought, or tried, to every level."""
        with self._changed:
            first_done = not self.levels or self._tried >= self._newest_sequence()
            later_done = self._source is None or all(
                progress.sequence >= self._source[0] for progress in self._progress
            )
            return first_done and later_done and not self._busy

    def is_durable_everywhere(self) -> bool:
        """Whether the newest whole capture is committed at every level."""
        newest = self._newest_sequence()
        return all(progress.durable_sequence >= newest for progress in self._progress)

    # ---------------------------------------------------------------- threads

    def _run(self, index: int) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
            try:
                worked = self._step_first() if index == 0 else self._step_later(index)
            except Exception:  # the rim of the thread: a bug here must not end persistence
                logger.exception("level %d", index)
                worked = False
            with self._changed:
                self._busy.discard(index)
                if not worked and not self._stopping:
                    self._changed.wait(_IDLE_S)
                if worked:
                    self._changed.notify_all()

    def _step_first(self) -> bool:
        with self._changed:
            slots = self._slots()
            statuses = [slot.status() for slot in slots]
            for stale in stale_pins(statuses):
                # Read again: a trainer sets the pin after everything else of a capture.
                if slots[stale].status().phase in (SlotPhase.EMPTY, SlotPhase.VOID):
                    slots[stale].unpin()
            index = slot_to_persist(statuses, self._tried, force=self._force)
            if index is None:
                return self._checksum_newest(slots, statuses)
            slot = slots[index]
            self._busy.add(0)
            self._reading = slot
        try:
            if self._force and statuses[index].phase is SlotPhase.WHOLE:
                slot.set_word(Word.PIN, 1)
            written = self._persist(slot, statuses[index])
        finally:
            self._reading = None
            # Only the keeper unpins, and always: also what failed must not hold a slot.
            slot.unpin()
            self._unpin_older(statuses[index].sequence)
        if written is not None:
            # Not before the slot is free again: deleting large files takes its time.
            self._retain(*written)
        return True

    def _unpin_older(self, done: int) -> None:
        """Captures that were pinned while a newer one was persisted are left out."""
        for slot in self._slots():
            status = slot.status()
            if status.pinned and status.sequence < done:
                slot.unpin()

    def _persist(self, slot: Slot, chosen: SlotStatus) -> tuple[SnapshotStore, PersistentLevel, str] | None:
        """Write one capture to the first level that takes it; where it went, and of which run it is."""
        written = None
        faults.point("keeper.persist.begin")
        try:
            source = SlotSource(slot, chosen)
            for index, level in enumerate(self.levels):
                store = self._write(index, level, source)
                if store is not None:
                    written = store, level, source.meta.run_id
                    break
        except CaptureAborted as error:
            # Not marked as tried: the newest whole capture is an older one, and it still wants to be persisted.
            logger.info("%s", error)
            return None
        except FormatError as error:
            logger.warning("not persisted: %s", error)
        with self._changed:
            self._tried = max(self._tried, chosen.sequence)
        return written

    def _checksum_newest(self, slots: list[Slot], statuses: list[SlotStatus]) -> bool:
        """Without a trainer, memory rests: from now on a restore can tell whether its bytes are the same."""
        newest = newest_whole(statuses)
        if newest is None or not self._force or self.checksums_of(slots[newest]) is not None:
            return False
        image = slots[newest].image[: statuses[newest].image_bytes]
        faults.point("keeper.persist.checksum")
        self._checksums[slots[newest]] = (statuses[newest].sequence, Checksums.of(image))
        return True

    def _write(self, index: int, level: PersistentLevel, source: SlotSource) -> SnapshotStore | None:
        started = time.monotonic()
        meta = source.meta
        try:
            store = self._store(index, level, meta)
            manifest = store.write(meta, source)
        except CaptureAborted:
            raise
        except Exception as error:  # noqa: BLE001  the rim to storage packages, which raise what they like
            self._failed(index, meta.step, source.sequence, error)
            return None
        self._committed(index, source.sequence, manifest, time.monotonic() - started)
        entry = self._entry(store, manifest) if len(self.levels) > 1 else None
        with self._changed:
            if entry is not None:
                self._source = (source.sequence, entry, manifest)
            for slot in self._slots():
                if slot.status().sequence == source.sequence:
                    self._checksums[slot] = (source.sequence, manifest.checksums)
        return store

    def _step_later(self, index: int) -> bool:
        with self._changed:
            if self._source is None:
                return False
            sequence, entry, manifest = self._source
            progress = self._progress[index]
            if progress.sequence >= sequence or entry.level == self.levels[index].url:
                return False
            level = self.levels[index]
            if not cascades(level, manifest.meta.step, progress, force=self._force):
                return False
            self._busy.add(index)
            faults.point("keeper.persist.cascade")
            # Marked as tried beforehand: a level that fails waits for the next snapshot.
            self._progress[index] = replace(progress, sequence=sequence)
        started = time.monotonic()
        try:
            store = self._store(index, level, manifest.meta)
            origin = open_store(entry.level).storage
            with FileSource(origin, f"{entry.location}/{manifest.file}", manifest.size_bytes) as source:
                written = store.write(manifest.meta, source)
            if written.checksums != manifest.checksums:
                raise FormatError(f"{entry.level}: step {entry.step} changed on its way to {level.url}")
        except Exception as error:  # noqa: BLE001  the rim to storage packages, which raise what they like
            self._failed(index, manifest.meta.step, sequence, error)
            return True
        self._committed(index, sequence, written, time.monotonic() - started)
        self._retain(store, level, manifest.meta.run_id)
        return True

    # ---------------------------------------------------------------- book-keeping

    def _store(self, index: int, level: PersistentLevel, meta: CaptureMeta) -> SnapshotStore:
        if index not in self._stores:
            self._stores[index] = open_store(level.url, speed=index + 1)
        store = self._stores[index]
        if index not in self._swept:
            gone = store.sweep(meta.rank, meta.world_size)
            self._swept.add(index)
            if gone:
                logger.info("%s: removed what dead runs left: %s", level.url, ", ".join(gone))
        return store

    @staticmethod
    def _entry(store: SnapshotStore, manifest: Manifest) -> Entry | None:
        """Where the store put it; ``None`` if it does not say: later levels get the next one."""
        meta = manifest.meta
        try:
            for entry in store.inventory().entries:
                if (entry.run_id, entry.step, entry.rank) == (meta.run_id, meta.step, meta.rank):
                    return entry
        except (LazySnapError, OSError) as error:
            logger.warning("%s: step %d cannot be copied to later levels: %s", store.url, meta.step, error)
        return None

    def _retain(self, store: SnapshotStore, level: PersistentLevel, run_id: str) -> None:
        try:
            store.retain(level, run_id)
        except (LazySnapError, OSError) as error:
            logger.warning("%s: old snapshots stay for now: %s", level.url, error)

    def _committed(self, index: int, sequence: int, manifest: Manifest, seconds: float) -> None:
        faults.point("keeper.persist.committed")
        level, step = self.levels[index].url, manifest.meta.step
        with self._changed:
            self._progress[index] = LevelProgress(step, sequence, sequence)
            self._changed.notify_all()
        logger.info("step %d committed to %s: %d bytes in %.2f s", step, level, manifest.size_bytes, seconds)
        event = {"type": "durable", "level": level, "step": step, "bytes": manifest.size_bytes, "seconds": seconds}
        self._emit({**event, "run_id": manifest.meta.run_id, "sequence": sequence})

    def _failed(self, index: int, step: int, sequence: int, error: Exception) -> None:
        level = self.levels[index].url
        with self._changed:
            self._progress[index] = replace(self._progress[index], sequence=sequence)
        logger.warning("step %d is not persisted at %s: %s", step, level, error)
        self._emit({"type": "level_failed", "level": level, "step": step, "text": str(error)})
