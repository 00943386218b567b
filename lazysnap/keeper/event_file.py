"""The event file of one run on this node: its place, its writes and its size.

If the first level is a directory, the file is there. For a first level at a URL the keeper of node 0 writes it into the
runtime directory, and copies it to the level every ``_COPY_S`` at most, and at the end. Lines are appended and never
changed. A file of ``MAX_FILE_BYTES`` becomes the older one, which replaces the previous older one.
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
"""Seconds within which events are written together."""
_COPY_S = 300.0
"""Seconds between two copies to a URL, where each request costs money."""
_RETRY_S = 10.0
"""Seconds until failed writes are retried."""
_MOST_WAITING = 8000
"""Maximum events that wait to be written, because a level may fail or hang for days. Beyond it only starts and ends are
accepted.
"""
_ALWAYS = (KeeperStarted, TrainerStarted, TrainerEnded)


class EventFileWriter:
    """Writes the events of one run, on its own thread: a level that hangs delays nothing else.

    Nothing is written before the level has a snapshot, so a run that stores nothing leaves no file.
    """

    def __init__(self, level: LevelSettings, run_id: str, node: int) -> None:
        """``level``: the first one; ``node``: the number of this node. Does not block."""
        self.run_id = run_id
        self._level = level
        self._name = events_file_name(run_id, node)
        self._older_name = events_file_name(run_id, node, is_older=True)
        self._changed = threading.Condition()
        """Protects the attributes up to the thread."""
        self._waiting: list[Event] = []
        self._may_write = False
        """True once the level has a snapshot, or a file of this run."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="lazysnap-events", daemon=True)
        self._facts = _FileStart()
        self._directory: pathlib.Path | None = None
        self._copy: _LevelCopy | None = None
        """The copy at the first level; None if that is a path, which has the file itself."""
        self._thread.start()

    def add(self, event: Event) -> None:
        """Add an event. Does not block. Thread-safe."""
        with self._changed:
            is_first_stored = isinstance(event, Stored) and not self._may_write
            if is_first_stored:
                self._may_write = True
            if len(self._waiting) < _MOST_WAITING or isinstance(event, _ALWAYS) or is_first_stored:
                self._waiting.append(event)
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Write the remaining events. Blocks: at most ``timeout_s``."""
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
        """Determine the place of the file. Raises: LazySnapError, if the level or the runtime directory cannot be used;
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
        """Block until there are events to write. Returns: True if this is the last time."""
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
        """Block for that time; less if the writer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)

    def _write(self, *, is_last: bool) -> None:
        """Append the waiting events; copy the file if that is due. Raises: LevelError; OSError."""
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
        if size == 0:  # also if the first append failed: a full disk leaves an empty file
            data = b"".join(map(encode, self._facts.as_of(time.time()))) + data
        append(path, data)
        for event in events:
            self._facts.note(event)
        if self._copy is not None:
            self._copy.is_behind = True


class _FileStart:
    """The first lines of a file that begins during a start: the keeper and its live trainers. Without them the later
    lines could not be assigned after the older file is deleted.
    """

    def __init__(self) -> None:
        self._keeper: KeeperStarted | None = None
        self._trainers: dict[str, TrainerStarted] = {}
        """By rank and start."""

    def note(self, event: Event) -> None:
        """Update this with a written event."""
        if isinstance(event, KeeperStarted):
            self._keeper = event
        elif isinstance(event, TrainerStarted):
            self._trainers[_key(event)] = event
        elif isinstance(event, Progress) and _key(event) in self._trainers:
            self._trainers[_key(event)] = replace(self._trainers[_key(event)], step=event.step)
        elif isinstance(event, TrainerEnded):
            self._trainers.pop(_key(event), None)

    def as_of(self, now: float) -> list[Event]:
        """Return the events that begin a file now: each trainer as if it had started now, at its current step."""
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
        """Modification time of the older file at the level, in nanoseconds."""
        self._has_earlier = False
        """True once the earlier lines of the level are in the file here."""
        self._due = time.monotonic()
        self.is_behind = False
        """True if lines were written since the last copy."""

    def due_in_s(self) -> float | None:
        """Return the seconds until the next copy; ``None`` if nothing is new. Does not block."""
        if not self.is_behind:
            return None
        return max(0.0, self._due - time.monotonic())

    def write(self) -> None:
        """Copy the files."""
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
        """Append the lines of the level's copy that the file here lacks: an earlier keeper was on another machine.

        The order of lines does not matter, because each line has its time.
        """
        try:
            earlier = self._storage.get(self._path.name)
        except FileNotFoundError:
            earlier = b""
        if len(earlier) > MAX_FILE_BYTES:
            earlier = earlier[-MAX_FILE_BYTES:].partition(b"\n")[2]  # only whole lines
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
    """Append whole lines to a file atomically, unless the process is killed meanwhile. One process at a time.

    Not durable at once: a power cut may lose the last seconds.

    Blocks. Raises: OSError.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data  # a keeper was killed during a write: end its last line
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)
