"""One level's thread on one node: writes the steps that were granted, reads them back, names and deletes.

It never decides what is stored; that is ``grants.coordinator``. What it does runs under the level's deadline, and what
fails costs this level this snapshot, and nothing else.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.errors import ConfigError, LazySnapError
from lazysnap.events import LevelFailed, NameFailed, Stored
from lazysnap.grants.messages import StepKey
from lazysnap.grants.node import NodeLevel, Write
from lazysnap.grants.retention import Retention, still_to_copy
from lazysnap.keeper.frozen import FrozenTurn, FrozenWriter
from lazysnap.keeper.grant_loop import GrantLoop
from lazysnap.keeper.level_health import LevelHealth
from lazysnap.keeper.node_files import FileWriter, NodeFiles
from lazysnap.keeper.status import StatusBoard
from lazysnap.levels import SnapshotStore, open_store
from lazysnap.levels.node_file import delete_files
from lazysnap.levels.storage import probe
from lazysnap.levels.watchdog import Beat, LevelHangs, Watchdog, WriteCancelled
from lazysnap.levels.watched import RateLimiter
from lazysnap.memory.arena import Slot
from lazysnap.memory.failures import CaptureAborted
from lazysnap.shard.manifest import Manifest

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_IDLE_S = 0.5
_NAMING_TRIES = 3
_MAX_HANGING = 3
"""Threads that may hang at one level at a time; then it is left alone until one comes back."""
_STANDS_S = 30.0
"""An operation without progress for this long (seconds) no longer counts as pending."""


@dataclass(frozen=True)
class WriterContext:
    """The source of a writer, and the receiver of its results. Called on any thread."""

    loop: GrantLoop
    """The grants, which get the result of each write."""
    slots_of: Callable[[int], Sequence[Slot | None]]
    """Return the slot of each rank that holds a capture of that step of this start."""
    frozen: Callable[[str], Slot | None]
    """Return the slot that holds the frozen tensors of a digest, if there is one."""
    may_delete: Callable[[], bool]
    """``False`` while a trainer chooses what to go on with: what falls out then may be what it chooses."""
    board: StatusBoard
    """Gets what trainers of the node are to know."""


@dataclass(frozen=True)
class Naming:
    """A name that a level is to give, or to take away."""

    step: int | None
    """``None``: it is taken from all snapshots of the run."""
    name: str


class LevelPlace:
    """State that all starts of a job share at one level: the bound of bytes per second, and the threads that hang
    there."""

    def __init__(self, level: PersistentLevel, before: "LevelPlace | None" = None) -> None:
        """``before``: the place of an earlier start at the same level."""
        self.level = level
        is_same = before is not None and before.level.max_bytes_per_s == level.max_bytes_per_s
        self.pace: RateLimiter = before.pace if before is not None and is_same else RateLimiter(level.max_bytes_per_s)
        self._hanging: list[Watchdog[Any]] = [] if before is None else before._hanging

    def num_hanging(self) -> int:
        """Return how many threads hang there now."""
        self._hanging[:] = [attempt for attempt in self._hanging if attempt.is_running]
        return len(self._hanging)

    def hangs(self, attempt: Watchdog[Any]) -> None:
        """Count a thread that was given up, until it returns."""
        self._hanging.append(attempt)


class LevelWriter:
    """The thread of one level, for one start of a job. Methods may be called from any thread, and do not block.

    It is large because all work at a level takes turns on this one thread: writing, names, deleting, probing. The parts
    that stand alone are apart: ``FileWriter``, ``LevelHealth``, ``LevelPlace``.
    """

    def __init__(
        self, place: LevelPlace, index: int, files: NodeFiles, memory: WriterContext, *, knows_earlier: bool = True
    ) -> None:
        """``knows_earlier``: whether the restart saw what earlier starts stored at this level."""
        level = place.level
        self.place, self._level, self._index, self._files, self._memory = place, level, index, files, memory
        self._loop = memory.loop
        self._where = level.url
        self._retention = Retention(level, files.start)
        frozen = FrozenWriter(memory.frozen, verify=bool(level.verify))
        self._bytes = FileWriter(files, memory.slots_of, frozen)
        self._store: SnapshotStore | None = None
        """The store, without a watchdog: it outlives a job. Each job gets it from ``_opened``."""
        self._above: Sequence[LevelWriter] = ()
        self._settings: Sequence[PersistentLevel] = ()
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._known: tuple[Sequence[NodeLevel], Mapping[int, set[str]]] = (), {}
        """See ``on_order``. Replaced as a whole."""
        self._is_untidy = self._is_closed = self._is_swept = self._is_busy = False
        self._knows_earlier = knows_earlier
        self._lists = False
        """True until it is known what an earlier keeper of this start stored."""
        self.health = LevelHealth()
        self._began = 0.0
        """When the work at hand was begun."""
        self._attempt: Watchdog[Any] | None = None
        self._namings: deque[Naming] = deque()
        """Names to give and to take away, in order."""
        self._given: set[Naming] = set()
        """Names that were given here, or are among ``_namings``."""
        self._naming_failures: Counter[Naming] = Counter()
        """How often those at work failed; the first time is reported. Only the thread uses it."""
        self.step: int | None = None
        """The step that is being stored; ``None``: nothing."""

    def start(self, writers: Sequence["LevelWriter"]) -> None:
        """Begin. ``writers``: of all levels, fast to slow."""
        self._above, self._settings = writers[: self._index], [writer._level for writer in writers]
        threading.Thread(target=self._run, name="lazysnap-level", daemon=True).start()

    def close(self) -> None:
        """End after what is being done, and after names that are due."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # ---------------------------------------------------------------- asked for

    def begin(self, write: Write) -> None:
        """Store a step."""
        self._put(lambda: self._write(write))

    def list_own(self) -> None:
        """Find what an earlier keeper of this start stored."""
        self._lists = True
        self._put(self._list)

    def on_order(self, levels: Sequence[NodeLevel], names: Mapping[int, set[str]]) -> None:
        """Take the complete steps of all levels, and the names by step: names may be given, old snapshots may go."""
        # On every node: what it stores may be where no other one sees it.
        complete = levels[self._index].complete
        with self._changed:
            for step in sorted(names):
                if StepKey(step, self._files.start) in complete:
                    self._want({Naming(step, name) for name in names[step]})
            self._known = levels, names
            self._is_untidy = True
            self._changed.notify_all()

    def _want(self, namings: set[Naming]) -> None:
        missing = namings - self._given
        self._namings.extend(sorted(missing, key=lambda naming: naming.name))
        self._given |= missing

    def release(self, name: str) -> None:
        """Take a name from the snapshots of the run."""
        with self._changed:
            self._given = {naming for naming in self._given if naming.name != name}
            self._namings = deque(naming for naming in self._namings if naming.name != name)
            self._namings.append(Naming(None, name))
            self._changed.notify_all()

    def _put(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._work.append(work)
            self._changed.notify_all()

    # ---------------------------------------------------------------- how it is

    @property
    def idle_s(self) -> float:
        """Seconds since the work at hand moved."""
        attempt = self._attempt
        return 0.0 if attempt is None else attempt.idle_s

    @property
    def is_at_work(self) -> bool:
        """True if an operation of the level runs."""
        return self._attempt is not None

    @property
    def has_names(self) -> bool:
        """True if names are still to be given or taken away, as far as the level works."""
        return self.health.fails_since is None and bool(self._namings)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do that a level which works could do."""
        with self._changed:
            stands = self.idle_s > _STANDS_S
            is_done = stands or not (self._is_busy or self._work)
            return is_done and (
                stands or self.health.fails_since is not None or not (self._is_untidy or self.has_names)
            )

    @property
    def moved_bytes(self) -> int:
        """The bytes written so far of the current step."""
        return self._bytes.moved_bytes

    def is_reading(self, slot: Slot) -> bool:
        """True if the slot is read now."""
        return any(slot is other for other in self._bytes.slots)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            try:
                work = self._next()
                if work is None:
                    return
                self._began = time.monotonic()
                work()
            except Exception:  # the last handler of the thread: a bug here must not end persistence
                logger.exception("%s", self._where)
            finally:
                self._attempt = self.step = None
                self._bytes.rest()
                self._memory.board.wake()  # a trainer may wait for the end of this

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._is_busy = False
            work = self._await_work()
            self._is_busy = work is not None  # under the lock: nobody takes the level for idle in between
            return work

    def _await_work(self) -> Callable[[], None] | None:
        with self._changed:
            while True:
                rests_s = self.health.rests_s
                if rests_s is None and self._namings:
                    return partial(self._name, self._namings[0])
                if self._is_closed:
                    return None
                if self._work:
                    return self._work.popleft()
                if rests_s is not None and rests_s <= 0:
                    return self._probe
                if self._is_untidy and rests_s is None and self._memory.may_delete():
                    self._is_untidy = False
                    return self._tidy
                self._changed.wait(_IDLE_S if rests_s is None else rests_s)

    def _within_deadline(self, what: str, work: Callable[[SnapshotStore], Result]) -> Result:
        """Do a job with the store of the level. Blocks. Raises: as ``_watched``."""
        return self._watched(what, lambda beat: work(self._opened(beat)))

    def _watched(self, what: str, work: Callable[[Beat], Result]) -> Result:
        """Do a job that opens the store itself. Blocks. Raises: LevelHangs; what ``work`` raises."""
        if (count := self.place.num_hanging()) >= _MAX_HANGING:
            raise LevelHangs(f"{self._where}: {what}: {count} earlier operations still hang there")
        attempt = Watchdog(work, f"{self._where}: {what}")
        self._attempt = attempt
        try:
            return attempt.result(self._level.timeout_s)
        except LevelHangs:
            self.place.hangs(attempt)
            self._store = None  # whatever it was in the middle of: the next try starts anew
            raise
        finally:
            self._attempt = None

    def _opened(self, beat: Beat) -> SnapshotStore:
        """Return the store as one job uses it. Blocks. ``beat``: of the watchdog of this job."""
        opened = self._store
        if opened is None:
            opened = open_store(self._level.url, speed=self._index + 1, options=self._level.storage_options)
            beat()  # a thread that was left behind does not replace the store of later jobs
            self._store = opened
        store = opened.watched(beat, self.place.pace)
        if not self._is_swept:
            gone = store.sweep(self._files.looks_after)
            self._is_swept = True
            if gone:
                logger.info("%s: removed what dead runs left: %s", self._where, ", ".join(gone))
        return store

    # ---------------------------------------------------------------- storing

    def _write(self, write: Write) -> None:
        """Store a step: write the node's file, commit it by its manifest, read it back. Only then it counts.

        ``core.verified`` is where it begins to count. The snapshot is durable once all nodes have reported that:
        see ``grants.coordinator``. What an earlier keeper of this start stored counts by ``_list``.
        """
        loop, step, started = self._loop, write.step, time.monotonic()
        self.step = step
        doing = "writing" if write.source is None else "copying"
        try:
            manifest = self._watched(f"{doing} step {step}", lambda beat: self._bring(write, beat))
            seconds, size = time.monotonic() - started, manifest.size_bytes
            self._bytes.rest()
            logger.info("step %d committed to %s: %d bytes in %.2f s", step, self._where, size, seconds)
            faults.point("keeper.persist.committed")
            loop.post(loop.node.committed, write)
            read_back_s = self._read_back(manifest)
            faults.point("keeper.persist.verified")
        except CaptureAborted as error:
            logger.info("%s: step %d is not stored: %s", self._where, step, error)
            loop.post(loop.core.missed, write)
        except Exception as error:  # noqa: BLE001  what cannot be read back is not there
            self._failed(step, error)
            loop.post(loop.core.failed, write)
        else:
            self.health.stored()
            if loop.is_wanted(write):
                times = {"seconds": seconds, "checksum_s": manifest.checksums.seconds, "read_back_s": read_back_s}
                self._memory.board.add(Stored(t=time.time(), level=self._level.url, step=step, bytes=size, **times))
            loop.post(loop.core.verified, write)

    def _bring(self, write: Write, beat: Beat) -> Manifest:
        """The files of all ranks of the node; each is committed by its manifest."""

        def obey() -> None:
            beat()
            if not self._loop.is_wanted(write):  # other nodes may already know that this write is void
                raise WriteCancelled(f"step {write.step} was cancelled")

        store = self._opened(obey)
        if write.source is None:
            faults.point("keeper.persist.begin")
            return self._bytes.store(store, write.step, self._turn(write, obey), obey)
        faults.point("keeper.persist.copy")
        above = self._above[write.source]
        if above._files.is_shared and not self._files.is_shared:
            raise CaptureAborted(f"{above._where}: has this node's share alone of what several nodes hold")
        origin = open_store(above._level.url, options=above._level.storage_options).watched(obey)
        return self._bytes.copy(store, origin, write.step, self._turn(write, obey))

    def _turn(self, write: Write, beat: Beat) -> FrozenTurn | None:
        """Return ``None`` if no other node writes the same frozen tensors there, or none answers."""
        if not self._files.is_shared or self._files.team.nodes == 1 or write.is_alone:
            return None
        return FrozenTurn(self._loop, self._index, self._level, beat)

    def _read_back(self, manifest: Manifest) -> float:
        """Read the file back, if the level does that (``PersistentLevel.verify``). Return the seconds that it took.

        Raises: FormatError, and it is no snapshot any more; LevelError.
        """
        opened = self._store
        if opened is None:
            raise LevelHangs(f"{self._where}: given up meanwhile")
        wanted = self._level.verify
        if wanted is None:
            wanted = not opened.storage.checks_writes
        if not wanted:
            return 0.0
        began, step = time.monotonic(), manifest.meta.step
        self._within_deadline(f"reading back step {step}", lambda store: self._bytes.check(store, step))
        return time.monotonic() - began

    def _list(self) -> None:
        found: set[int] | None = None
        try:
            found = self._within_deadline("looking for what is there", self._bytes.listed)
            self._lists = False
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            self._failed(None, error)
        self._loop.post(self._loop.node.listed, self._index, found)

    # ---------------------------------------------------------------- a level that fails

    def _failed(self, step: int | None, error: Exception) -> None:
        if not isinstance(error, LazySnapError):
            self._store = None  # credentials may have expired, a mount gone stale: the next try opens everything anew
        self.health.failed(self._began)
        logger.info("%s: step %s: %s", self._where, step, error)
        if step is not None:
            self._memory.board.add(LevelFailed(t=time.time(), level=self._level.url, step=step, text=str(error)))

    def _probe(self) -> None:
        """True if a small write works again."""
        try:
            self._within_deadline("trying a small write", lambda store: probe(store.storage))
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            self._store = None
            self.health.failed(self._began)
            logger.info("%s: a small write fails: %s", self._where, error)
            return
        self.health.probed()
        if self._lists:
            self._put(self._list)
        self._loop.post(self._loop.node.probed, self._index)

    # ---------------------------------------------------------------- names and old snapshots

    def _name(self, naming: Naming) -> None:
        """Give a name, or take it away. What failed is tried again, ``_NAMING_TRIES`` times in all; then a name that
        could not be given waits for the next order, see ``on_order``.
        """
        try:
            self._within_deadline(f"naming a snapshot {naming.name!r}", lambda store: self._apply(naming, store))
        except ConfigError as error:  # that does not pass, and the level is well
            self._report_failed(naming, str(error))
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            self._report_failed(naming, f"{error}; it is tried again")
            if isinstance(error, LevelHangs):
                self._failed(None, error)
            if self._naming_failures[naming] < _NAMING_TRIES:
                self._store = None  # credentials may have expired, a mount gone stale
                with self._changed:
                    self._changed.wait(_IDLE_S)
                return
            if naming.step is None:
                del self._naming_failures[naming]  # whoever releases it again is told again
            else:
                self._naming_failures[naming] = 1  # the next order asks for it again, and it was reported
            with self._changed:
                self._given.discard(naming)
        else:
            self._naming_failures.pop(naming, None)
        with self._changed:
            if self._namings and self._namings[0] is naming:  # else the name was taken away meanwhile
                self._namings.popleft()

    def _apply(self, naming: Naming, store: SnapshotStore) -> None:
        if naming.step is None:
            store.release(self._files.run_id, naming.name)
        else:
            store.keep(self._files.entry(store.url, store.speed, naming.step), naming.name)

    def _report_failed(self, naming: Naming, text: str) -> None:
        logger.info("%s: the name %r: %s", self._where, naming.name, text)
        self._naming_failures[naming] += 1
        if self._naming_failures[naming] == 1:
            self._memory.board.add(NameFailed(t=time.time(), level=self._level.url, name=naming.name, text=text))

    def _tidy(self) -> None:
        try:
            self._within_deadline("deleting old snapshots", self._delete)
        except CaptureAborted:
            return
        except (LazySnapError, OSError) as error:
            logger.info("%s: old snapshots stay for now: %s", self._where, error)

    def _delete(self, store: SnapshotStore) -> None:
        levels, names = self._known
        named = {step for step, given in names.items() if given}
        protected = named | still_to_copy(levels, self._settings, self._index, self._files.start)
        found = self._files.of_run(store.storage.list())
        for directory, key in sorted(found.items(), key=lambda item: item[1]):
            if not self._memory.may_delete():
                return
            is_own = key.start == self._files.start
            if not self._retention.is_over(key, levels[self._index], protected) or not (is_own or self._knows_earlier):
                continue
            # Asked at the last moment: a step that was cancelled may have been granted again.
            if not is_own or self._loop.give_up(self._index, key.step):
                delete_files(self._files.mine(store.storage, directory, key))
