"""One level's thread: does what the schedule gives it, under a deadline, and says how it went."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lazysnap import faults
from lazysnap.arena import Slot, SlotStatus
from lazysnap.errors import CaptureAborted, LazySnapError, LevelHangs
from lazysnap.keeper.frozen_writer import Beat, FrozenWriter
from lazysnap.keeper.protocol import Durable, LevelFailed, NameFailed, Sound, Surplus
from lazysnap.keeper.schedule import Committed
from lazysnap.keeper.slot_source import SlotSource
from lazysnap.levels import SnapshotStore, open_store
from lazysnap.levels.belongings import Belongings, Told
from lazysnap.levels.rate_limiter import RateLimiter
from lazysnap.levels.redaction import shown
from lazysnap.levels.source import BlockSource, FileSource, RateLimitedSource
from lazysnap.levels.watchdog import Watchdog
from lazysnap.resolver import Entry
from lazysnap.shard.manifest import CaptureMeta

if TYPE_CHECKING:
    from lazysnap.keeper.persist import Persister

logger = logging.getLogger(__name__)
"""At INFO, which a keeper's log shows: in a trainer that stores by itself the events below are told once each."""

_IDLE_S = 0.5
_MAX_HANGING = 3
"""Threads that may hang at one level at a time; then it is left alone until one comes back."""
_NAME_RETRY_S = 5.0
_DELETING = "deleting old snapshots"


@dataclass(frozen=True)
class SlotWork:
    """Write the capture of a slot."""

    slot: Slot
    status: SlotStatus


@dataclass(frozen=True)
class Naming:
    """Give a snapshot a name; without ``entry`` take it from whatever of the run has it."""

    run_id: str
    name: str
    entry: Entry | None


@dataclass(frozen=True)
class Retaining:
    """Delete what had to stay before: a slower level was still to copy it, or it was not known who has what follows."""

    item: Committed | None
    waits_for: frozenset[int]
    """Steps that stayed."""


Work = SlotWork | Committed | Naming | Retaining


class Lane:
    """The worker of one level."""

    def __init__(self, persister: "Persister", index: int) -> None:
        self._persister = persister
        self._index = index
        self._level = persister.levels[index]
        self._where = shown(self._level.url)
        self._share = persister.team.share
        self._pace = RateLimiter(self._level.max_bytes_per_s)
        self._frozen_writer = FrozenWriter(persister.frozen, self._pace)
        self._store: SnapshotStore | None = None
        self._start: tuple[str, str | None] | None = None
        """Run and start for which ``_store`` was opened, or looked through anew."""
        self._own: Belongings | None = None
        """With several ranks: what this one has there, as far as ``_store`` knows."""
        self._attempt: Watchdog[Any] | None = None
        self._hanging: list[Watchdog[Any]] = []
        self.names: deque[Naming] = deque()
        self.slot: Slot | None = None
        """The slot that is read now."""
        self.copying: Committed | None = None
        """What is copied from a faster level now."""
        self.is_busy = False
        self._sequence = 0
        self._reading: RateLimitedSource | None = None
        """What is read now; ``_sequence``: of which capture."""
        self.owed: Retaining | None = None
        """Deletions that wait for a slower level, or for a moment without other work."""
        self.told: Told | None = None
        """With several ranks: which snapshots all of them have there."""

    @property
    def idle_s(self) -> float:
        """Seconds since the work at hand moved."""
        return self._attempt.idle_s if self._attempt is not None else 0.0

    @property
    def doing(self) -> str | None:
        """What is done there, and for how long nothing has moved; ``None``, if nothing is done."""
        attempt = self._attempt
        return None if attempt is None else f"{attempt.name} (nothing has moved for {attempt.idle_s:.1f} s)"

    def moved_bytes(self, sequence: int) -> int:
        """How much of a capture was brought here so far, if it is the one that is being brought."""
        reading = self._reading
        return reading.moved_bytes if reading is not None and self._sequence == sequence else 0

    def run(self) -> None:
        """The thread: until the persister stops."""
        persister = self._persister
        while True:
            try:
                with persister.changed:
                    if persister.stopping:
                        return
                    work = persister.work_for(self._index)
                    if work is None:
                        persister.changed.wait(_IDLE_S)
                    else:
                        self._take(work)
                if work is not None:
                    self._do(work)
            except Exception:  # the rim of the thread: a bug here must not end persistence
                logger.exception("%s", self._where)
                time.sleep(_IDLE_S)
            finally:
                if self.is_busy:
                    with persister.changed:
                        self.slot = self.copying = self._attempt = self._reading = None
                        self.is_busy = False
                        persister.changed.notify_all()

    def _take(self, work: Work) -> None:
        self.is_busy = True
        if isinstance(work, Naming):
            self.names.popleft()
        elif isinstance(work, Retaining):
            self.owed = None
        elif isinstance(work, SlotWork):
            self.slot = work.slot
            self._persister.hold(work)
        elif isinstance(work, Committed):
            self.copying = work
            self._persister.states[self._index].queue.remove(work)

    def _do(self, work: Work) -> None:
        if isinstance(work, Naming):
            self._name(work)
        elif isinstance(work, Retaining):
            self._tidy() if work.item is None else self._retain(work.item)
        else:
            self._bring(work)

    def _bring(self, work: SlotWork | Committed) -> None:
        sequence = work.status.sequence if isinstance(work, SlotWork) else work.sequence
        step = work.status.step if isinstance(work, SlotWork) else work.entry.step
        started = time.monotonic()
        try:
            if isinstance(work, SlotWork):
                item = self._within_deadline(f"writing step {step}", lambda beat: self._write(work, beat))
            else:
                item = self._within_deadline(f"copying step {step}", lambda beat: self._copy(work, beat))
        except CaptureAborted as error:
            # Not marked as tried: the newest whole capture is an older one, and it still wants to be persisted.
            logger.info("%s", error)
            return
        except Exception as error:  # noqa: BLE001  the rim to storage packages, which raise what they like
            if isinstance(work, Committed) and self._persister.is_withdrawn(work):
                logger.info("step %s is not copied to %s: it was read back damaged: %s", step, self._where, error)
                return
            self._failed(step or 0, sequence, error)
            return
        seconds = time.monotonic() - started
        self._committed(item, seconds)
        with self._persister.changed:
            # Deleting large files, and reading back, take their time: the slot is free before.
            self.slot = self.copying = None
            self._persister.changed.notify_all()
        if self._persister.team.world_size == 1:
            is_sound = self._is_sound(item)
            with self._persister.changed:
                self._persister.read_back(item, is_sound=is_sound)
            if is_sound:
                self._tell_durable(item, seconds)
            self._retain(item)
        else:
            self._confirm(item)
            self._tidy()  # sound or not: else a place where all is read back damaged fills up

    def _within_deadline(self, what: str, work: Callable[[Beat], Any]) -> Any:
        self._hanging = [attempt for attempt in self._hanging if attempt.is_running]
        if len(self._hanging) >= _MAX_HANGING:
            raise LevelHangs(f"{self._where}: {what}: {len(self._hanging)} earlier operations still hang there")
        attempt = self._attempt = Watchdog(work, f"{self._where}: {what}")
        try:
            return attempt.result(self._level.timeout_s)
        except LevelHangs:
            self._hanging.append(attempt)
            # Whatever it was in the middle of: the next try starts anew.
            self._store = None
            raise

    # ---------------------------------------------------------------- inside an attempt

    def _write(self, work: SlotWork, beat: Beat) -> Committed:
        faults.point("keeper.persist.begin")
        source = SlotSource(work.slot, work.status, beat)
        store = self._opened(source.meta)
        self._frozen_writer.bring(store, source.meta, beat)
        paced = self._paced(source, work.status.sequence, beat)
        entry, manifest = store.write_entry(source.meta, paced, beat=beat)
        return Committed(work.status.sequence, entry, manifest.meta, self._index, manifest)

    def _copy(self, item: Committed, beat: Beat) -> Committed:
        faults.point("keeper.persist.cascade")
        assert item.manifest is not None
        store = self._opened(item.meta)
        origin = self._origin(item)
        path = f"{item.entry.location}/{item.manifest.file}"
        self._frozen_writer.bring(store, item.meta, beat, origin)
        with FileSource(origin.storage, path, item.manifest.size_bytes) as source:
            paced = self._paced(source, item.sequence, beat)
            entry, manifest = store.write_entry(item.meta, paced, expected=item.manifest.checksums.whole, beat=beat)
        return Committed(item.sequence, entry, manifest.meta, self._index, manifest)

    def _paced(self, source: BlockSource, sequence: int, beat: Beat) -> RateLimitedSource:
        self._sequence, self._reading = sequence, RateLimitedSource(source, self._pace, beat)
        return self._reading

    def _origin(self, item: Committed) -> SnapshotStore:
        level = self._persister.levels[item.level]
        return open_store(level.url, options=level.storage_options)

    def _opened(self, meta: CaptureMeta) -> SnapshotStore:
        start, level = (meta.run_id, meta.start), self._level
        if self._store is None or start != self._start:
            store = self._store or open_store(level.url, speed=self._index + 1, options=level.storage_options)
            # Between two starts others may have been here: what they left is looked for once more.
            gone = store.sweep(self._share)
            if gone:
                logger.info("%s: removed what dead runs left: %s", shown(level.url), ", ".join(gone))
            self._own = Belongings(store, level, self._share)
            self._store, self._start = store, start
        return self._store

    # ---------------------------------------------------------------- what comes after

    def _committed(self, item: Committed, seconds: float) -> None:
        faults.point("keeper.persist.committed")
        with self._persister.changed:
            left_out = self._persister.committed(item)
        for message in left_out:
            self._persister.emit(message)
        logger.info(
            "step %d committed to %s: %d bytes in %.2f s", item.entry.step, self._where, item.size_bytes, seconds
        )
        if self._persister.team.world_size > 1:
            self._tell_durable(item, seconds)

    def _tell_durable(self, item: Committed, seconds: float) -> None:
        """With one rank it was read back before; with several it counts when all have read back theirs."""
        facts = (item.entry.step, item.size_bytes, seconds, item.sequence, item.entry.run_id)
        self._persister.emit(Durable(self._level.url, *facts))

    def _failed(self, step: int, sequence: int, error: Exception) -> None:
        with self._persister.changed:
            self._persister.failed(self._index, sequence)
        if not isinstance(error, LazySnapError):
            self._store = None  # credentials may have expired, a mount gone stale: the next try opens everything anew
        logger.info("step %d is not persisted at %s: %s", step, self._where, error)
        self._tell_failed(step, error)

    def _tell_failed(self, step: int, error: Exception) -> None:
        self._persister.emit(LevelFailed(self._level.url, step, str(error)))

    def _tell_damaged(self, item: Committed, error: Exception) -> None:
        """It was told to be durable; it is not."""
        self._persister.emit(LevelFailed(self._level.url, item.entry.step, str(error), item.sequence))

    def _protected(self, item: Committed | None) -> frozenset[int]:
        """Steps that must stay for now; they are looked at again when nothing waits for them."""
        protect = self._persister.steps_to_copy(self._index)
        with self._persister.changed:
            self.owed = Retaining(item, protect) if protect else None
            # Names are put in later, by this thread; until then no file says that a snapshot has one.
            return protect | {naming.entry.step for naming in self.names if naming.entry is not None}

    def _is_sound(self, item: Committed) -> bool:
        """Whether what was just committed is there as it was sent. One rank reads it back where the level does not."""
        store, entry, verify = self._store, item.entry, self._level.verify
        if store is None or not (not store.storage.checks_writes if verify is None else verify):
            return True

        def read(beat: Beat) -> None:
            store.check_frozen(entry, beat)
            store.verify_entry(entry, beat)

        try:
            self._within_deadline(f"reading back step {entry.step}", read)
        except Exception as error:  # noqa: BLE001  the rim to storage packages; what cannot be read back is not there
            logger.info("%s: step %d does not count: %s", self._where, entry.step, error)
            self._tell_damaged(item, error)
            return False
        return True

    def _retain(self, item: Committed) -> None:
        """Delete what need not stay."""
        if self._persister.run_id not in (None, item.entry.run_id):
            return  # a late capture of a run that was left: what was chosen instead may be an older one of that run
        protect, store = self._protected(item), self._store
        if store is None:
            return
        try:
            run_id = item.entry.run_id
            self._within_deadline(_DELETING, lambda beat: store.retain(self._level, run_id, protect, beat))
        except (LazySnapError, OSError) as error:
            logger.info("%s: old snapshots stay for now: %s", self._where, error)

    def _confirm(self, item: Committed) -> None:
        """Of several ranks each reads back what it wrote, and has it counted if it is sound."""
        entry, manifest, own = item.entry, item.manifest, self._own
        if own is None or manifest is None or self._store is None:
            return
        try:
            self._within_deadline(f"reading back step {entry.step}", lambda beat: own.confirm(entry, manifest, beat))
        except Exception as error:  # noqa: BLE001  the rim to storage packages, which raise what they like
            logger.info("%s: %s", self._where, error)
            self._tell_damaged(item, error)
            with self._persister.changed:
                self._persister.read_back(item, is_sound=False)
            return
        self._count(item)

    def _count(self, item: Committed) -> None:
        """Have the ranks count that a snapshot of this one is sound here."""
        faults.point("keeper.persist.sound")
        start = Told(item.entry.run_id, item.entry.start)
        self._persister.emit(Sound(self._level.url, item.entry.step, start.run_id, start.start))
        with self._persister.changed:
            self._persister.read_back(item, is_sound=True)
            if self.told is None or not self.told.is_of(start):
                self.told = start

    def _tidy(self) -> None:
        """Of several ranks each deletes what it has, and has those steps taken back that nobody completes."""
        protect = self._protected(None)  # first: what is told from now on is another piece of work
        own, told = self._own, self.told
        if own is None or told is None or self._store is None:
            return

        def tidy(beat: Beat) -> list[int]:
            own.tidy(told, protect, beat)
            return own.surplus(told, protect, self._persister.most_ahead(), beat)

        try:
            surplus = self._within_deadline(_DELETING, tidy)
        except (LazySnapError, OSError) as error:
            logger.info("%s: old snapshots stay for now: %s", self._where, error)
            return
        for step in surplus:
            self._persister.emit(Surplus(self._level.url, step, told.run_id, told.start))

    def _name(self, work: Naming) -> None:
        def apply(beat: Beat) -> None:
            store = self._store or open_store(
                self._level.url, speed=self._index + 1, options=self._level.storage_options
            )
            if work.entry is None:
                store.release(work.run_id, work.name)
            else:
                store.keep(work.entry, work.name)

        for attempts_left in (2, 1, 0):
            try:
                self._within_deadline(f"naming a snapshot {work.name!r}", apply)
                return
            except Exception as error:  # noqa: BLE001  the rim to storage packages
                logger.info("%s: the name %r: %s", self._where, work.name, error)
                if not attempts_left:
                    self._persister.emit(NameFailed(self._level.url, work.name, str(error)))
                else:
                    time.sleep(_NAME_RETRY_S)
