"""The file of events of one run on this node: where it is, how lines get into it, and how long it grows.

It is beside the snapshots, where the first level is a directory. For a first level at a URL the keeper of node 0 writes
it into the runtime directory, and copies it to the level every ``_COPY_S`` at most, and at the end. Lines are appended
and never changed; a file that grew to ``MAX_FILE_BYTES`` becomes the older one, which replaces the one before it.
"""

import contextlib
import errno
import logging
import os
import pathlib
import threading
import time

from msgspec.structs import replace

from lazysnap.core.messages import LevelSettings
from lazysnap.errors import LazySnapError
from lazysnap.events import (
    MAX_FILE_BYTES,
    Event,
    KeeperStarted,
    Progress,
    Stored,
    TrainerEnded,
    TrainerStarted,
    encode,
)
from lazysnap.keeper.runtime import runtime_directory
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import open_storage
from lazysnap.shard.names import events_file_name

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5
"""Events that come within it make one write."""
_COPY_S = 300.0
"""Seconds between two copies to a URL, where each is a request that is paid for."""
_RETRY_S = 10.0
"""Seconds until lines that could not be written are tried again."""
_MOST_WAITING = 8000
"""Events that wait to be written: a level may fail, or hang, for days. Beyond them only starts and ends are taken."""
_ALWAYS = (KeeperStarted, TrainerStarted, TrainerEnded)


class EventFileWriter:
    """Writes the events of one run, on a thread of its own: a level that hangs holds up nothing else.

    Nothing is written before the level has a snapshot: a run that stores nothing leaves nothing.
    """

    def __init__(self, level: LevelSettings, run_id: str, node: int) -> None:
        """``level``: the first one; ``node``: the number of this node. Does not block."""
        self.run_id = run_id
        self._level = level
        self._name = events_file_name(run_id, node)
        self._older_name = events_file_name(run_id, node, is_older=True)
        self._changed = threading.Condition()
        """Guards the attributes up to the thread."""
        self._waiting: list[Event] = []
        self._may_write = False
        """True once the level has a snapshot, or a file of this run."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="lazysnap-events", daemon=True)
        self._facts = _FileStart()
        self._directory: pathlib.Path | None = None
        self._copy: _LevelCopy | None = None
        """The copy at the first level; None where that is a path, which has the file itself."""
        self._thread.start()

    def add(self, event: Event) -> None:
        """Take an event. Does not block. Thread-safe."""
        with self._changed:
            is_first_stored = isinstance(event, Stored) and not self._may_write
            if is_first_stored:
                self._may_write = True
            if len(self._waiting) < _MOST_WAITING or isinstance(event, _ALWAYS) or is_first_stored:
                self._waiting.append(event)
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Write what is left. Blocks: at most ``timeout_s``."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._wait()
            try:
                if self._directory is None:
                    self._begin()
                self._write(is_last=is_last)
            except (LazySnapError, OSError) as error:
                logger.info("events are not written now: %s", error)
                self._pause(_RETRY_S)
            except Exception:  # the last handler of the thread
                logger.exception("events")
                self._pause(_RETRY_S)

    def _begin(self) -> None:
        """Find out where the file is. Raises: LazySnapError, if the level or the runtime directory cannot be used;
        OSError.
        """
        storage = open_storage(self._level.url, options=self._level.storage_options)
        if isinstance(storage, LocalStorage):
            directory = pathlib.Path(storage.url)
            is_there = (directory / self._name).exists()
        else:
            directory = runtime_directory()
            self._copy = _LevelCopy(storage, directory, self._name, self._older_name)
            is_there = (directory / self._name).exists() or storage.exists(self._name)
        self._directory = directory
        with self._changed:
            self._may_write = self._may_write or is_there

    def _wait(self) -> bool:
        """Block until there is something to write. Returns: True if this is the last time."""
        copy = self._copy
        due_in_s = copy.due_in_s() if copy is not None else None
        with self._changed:
            self._changed.wait_for(self._has_work, due_in_s)
        self._pause(_PAUSE_S)
        with self._changed:
            return self._is_closed

    def _has_work(self) -> bool:
        may_write = self._may_write or self._directory is None
        return self._is_closed or (may_write and len(self._waiting) > 0)

    def _pause(self, seconds: float) -> None:
        """Block that long; less if the writer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)

    def _write(self, *, is_last: bool) -> None:
        """Append what waits; copy the file if that is due. Raises: LevelError; OSError."""
        assert self._directory is not None
        path = self._directory / self._name
        with self._changed:
            events = list(self._waiting)
            may_write = self._may_write
        if not may_write:
            return
        if events:
            self._append(path, events)
            with self._changed:
                del self._waiting[: len(events)]
        if self._copy is not None and (is_last or self._copy.due_in_s() == 0.0):
            self._copy.write()
            if is_last:
                self._copy.remove_original()

    def _append(self, path: pathlib.Path, events: list[Event]) -> None:
        data = b"".join(map(encode, events))
        size = path.stat().st_size if path.exists() else 0
        if size > 0 and size + len(data) > MAX_FILE_BYTES:
            os.replace(path, path.with_name(self._older_name))
            size = 0
        if size == 0:  # also where an append failed before its first line: a full disk leaves an empty file
            data = b"".join(map(encode, self._facts.as_of(time.time()))) + data
        append(path, data)
        for event in events:
            self._facts.note(event)
        if self._copy is not None:
            self._copy.is_behind = True


class _FileStart:
    """First lines of a file that begins within a start: the keeper, and the trainers that live. Without it nobody
    could tell what the lines after it belong to, once the older file is gone.
    """

    def __init__(self) -> None:
        self._keeper: KeeperStarted | None = None
        self._trainers: dict[str, TrainerStarted] = {}
        """By rank and start."""

    def note(self, event: Event) -> None:
        """Note an event that was written."""
        if isinstance(event, KeeperStarted):
            self._keeper = event
        elif isinstance(event, TrainerStarted):
            self._trainers[_key(event)] = event
        elif isinstance(event, Progress) and _key(event) in self._trainers:
            self._trainers[_key(event)] = replace(self._trainers[_key(event)], step=event.step)
        elif isinstance(event, TrainerEnded):
            self._trainers.pop(_key(event), None)

    def as_of(self, now: float) -> list[Event]:
        """Return the events that begin a file now: each trainer as if it had begun now, at the step it reached."""
        events: list[Event] = []
        if self._keeper is not None:
            events.append(replace(self._keeper, t=now))
        for trainer in self._trainers.values():
            events.append(replace(trainer, t=now, began=now, source=None))
        return events


def _key(event: TrainerStarted | Progress | TrainerEnded) -> str:
    return f"{event.rank} {event.start}"


class _LevelCopy:
    """The copy of the file at the first level, which is at a URL. Its methods block. Raises: LevelError; OSError."""

    def __init__(self, storage: Storage, directory: pathlib.Path, name: str, older_name: str) -> None:
        self._storage = storage
        self._path = directory / name
        self._older_path = directory / older_name
        self._older_copied: int | None = None
        """When the older file that is at the level was changed last, in nanoseconds."""
        self._has_earlier = False
        """True once the lines are here that were at the level when this keeper began."""
        self._due = time.monotonic()
        self.is_behind = False
        """True if lines were written since the last copy."""

    def due_in_s(self) -> float | None:
        """Return the seconds until it is to be copied; ``None`` if nothing is new. Does not block."""
        if not self.is_behind:
            return None
        return max(0.0, self._due - time.monotonic())

    def write(self) -> None:
        """Copy what is there."""
        self._due = time.monotonic() + _COPY_S
        if not self._has_earlier:
            self._take_earlier()
        if self._older_path.exists() and self._older_path.stat().st_mtime_ns != self._older_copied:
            changed = self._older_path.stat().st_mtime_ns
            self._storage.put(self._older_path.name, self._older_path.read_bytes())
            self._older_copied = changed
        if self._path.exists():
            self._storage.put(self._path.name, self._path.read_bytes())
        self.is_behind = False

    def _take_earlier(self) -> None:
        """Append the lines of the level's copy that are not here: the keeper before this one was on another machine.
        Their order does not matter, each line has its time.
        """
        try:
            earlier = self._storage.get(self._path.name)
        except FileNotFoundError:
            earlier = b""
        if len(earlier) > MAX_FILE_BYTES:
            earlier = earlier[-MAX_FILE_BYTES:].partition(b"\n")[2]  # whole lines only
        present_lines = set[bytes]()
        with contextlib.suppress(FileNotFoundError):
            present_lines.update(self._path.read_bytes().splitlines())
        missing = [line for line in earlier.splitlines() if line not in present_lines]
        if missing:
            append(self._path, b"\n".join(missing) + b"\n")
        self._has_earlier = True

    def remove_original(self) -> None:
        """Remove the files of this node, which the level has now."""
        self._path.unlink(missing_ok=True)
        self._older_path.unlink(missing_ok=True)


def append(path: pathlib.Path, data: bytes) -> None:
    """Append whole lines to a file, all of them or none, unless the process is killed within. One process at a time.

    Not durable at once: a power cut may take the last seconds.

    Blocks. Raises: OSError.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data  # a keeper was killed while it wrote: its last line ends here
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)
