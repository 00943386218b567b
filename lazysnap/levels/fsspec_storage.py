"""Any fsspec URL as a place for snapshots: object stores and network file systems, through one thin layer.

An object is streamed in order, one block at a time. Most object stores show it only when it is closed. Elsewhere it is
written under a temporary name and renamed. ``levels.s3`` has the differences of S3.
"""

import contextlib
import datetime
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from lazysnap import faults
from lazysnap.errors import FormatError, LazySnapError, LevelError
from lazysnap.levels.files import temp_name
from lazysnap.levels.redaction import Redaction
from lazysnap.levels.storage import MAX_SMALL_BYTES, Storage, is_probe, level_error, probe_name
from lazysnap.shard.checksum import BLOCK_BYTES, digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Abilities:
    """Behaviour of a place, determined by a test write."""

    shows_open_files: bool
    """A file is visible under its name before it is closed."""
    clock_ahead_s: float
    """Seconds by which the place's clock is ahead of ours."""


_abilities: dict[str, Abilities] = {}
"""By a digest of URL and options."""
MAX_PARTS = 10_000
"""The most parts of an object that object stores allow."""


def part_bytes(size_bytes: int) -> int:
    """Return the size of a part: one block, or as many as ``MAX_PARTS`` requires."""
    blocks = -(-size_bytes // BLOCK_BYTES)
    return max(1, -(-blocks // MAX_PARTS)) * BLOCK_BYTES


def temp_path(path: str) -> str:
    """Return a hidden path, in the same directory, for an object being written."""
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}{temp_name(name)}"


def discard(file: Any) -> None:
    """Close a file without publishing it, where the driver can."""
    with contextlib.suppress(Exception):
        if not hasattr(file, "discard"):
            file.close()
            return
        file.discard()
        if isinstance(file, AbstractBufferedFile):
            file.closed = True  # else its destructor would publish the bytes so far


class FsspecStorage(Storage):
    """See ``levels.storage.Storage``, which has the contracts of these methods."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Raises: LevelError, if there is no such driver, or it refuses an option."""
        self.url = url
        self._options = dict(options or {})
        self._redaction = Redaction(self._options)
        self._opened: tuple[int, Any] | None = None
        self._root = ""
        self._filesystem()

    def __repr__(self) -> str:
        return f"FsspecStorage({self.url!r})"

    # ---------------------------------------------------------------- the driver

    def _filesystem(self) -> Any:
        """Return the driver of this process. After a fork the inherited one shares sockets and has no threads."""
        opened = self._opened
        if opened is not None and opened[0] == os.getpid():
            return opened[1]
        try:
            filesystem, root = self._open_driver()
        except Exception as error:  # noqa: BLE001  drivers raise their own types, also for options that they lack
            action = "cannot open it; install the package it names, or correct storage_options"
            raise self._error(action, error) from None
        self._root = root.rstrip("/")
        self._opened = (os.getpid(), filesystem)
        return filesystem

    def _open_driver(self) -> tuple[Any, str]:
        """Make a driver. Return it and the path of the place in it. Raises: as the driver."""
        filesystem, root = fsspec.core.url_to_fs(self.url, **{**self._options, "skip_instance_cache": True})
        return filesystem, str(root)

    def _error(self, action: str, error: BaseException) -> LevelError:
        """Return ``error`` as a LevelError without secrets."""
        if isinstance(error, OSError) and error.errno is not None:
            reason = self._redaction.clean(error.strerror or error)
            return level_error(self.url, action, OSError(error.errno, reason))
        return LevelError(f"{self.url}: {action}: {type(error).__name__}: {self._redaction.clean(error)}")

    def _path(self, path: str) -> str:
        if not path:
            return self._root
        return f"{self._root}/{path}"

    def _call(self, action: str, method: str, *arguments: Any, **options: Any) -> Any:
        return self.call(action, getattr(self._filesystem(), method), *arguments, **options)

    def call(self, action: str, method: Any, *arguments: Any, **options: Any) -> Any:
        """Call the driver.

        Raises: LevelError; FileNotFoundError and FileExistsError, without secrets; what a ``beat`` raises.
        """
        try:
            return method(*arguments, **options)
        except LazySnapError:
            raise  # of a ``beat``, not of the driver
        except (FileNotFoundError, FileExistsError) as error:
            if not self._redaction.hides(str(error)):
                raise
            raise type(error)(self._redaction.clean(error)) from self._redaction.cause(error)
        except Exception as error:  # noqa: BLE001  drivers raise their own types
            if isinstance(error, PermissionError):
                self._opened = None  # credentials may be renewed: the next operation reads them again
            raise self._error(action, error) from self._redaction.cause(error)

    def _change(self, action: str, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the driver; a missing or an existing object is a LevelError."""
        try:
            return self._call(action, method, *arguments, **options)
        except (FileNotFoundError, FileExistsError) as error:
            raise self._error(action, error) from self._redaction.cause(error)

    def reach(self, point: str, path: str) -> None:
        """Pass a fault point of tests."""
        try:
            faults.point(f"level.remote.{point}")
        except OSError as error:
            raise self._error(f"{point} {path}", error) from error

    def _make_directory(self, path: str, *, is_missing: bool = False) -> None:
        """Make a directory if the place needs one: some drivers would also create a bucket."""
        action = f"creating the directory of {path}"
        bucket = self._root.split("/")[0]
        if not bucket or (is_missing and self._call(action, "exists", bucket)):
            self._change(action, "makedirs", os.path.dirname(self._path(path)), exist_ok=True)

    def _make(self, action: str, path: str, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the driver to make an object, and its directory if necessary. Raises: LevelError."""
        self._make_directory(path)
        try:
            return self._call(action, method, self._path(path), *arguments, **options)
        except FileNotFoundError:
            self._make_directory(path, is_missing=True)
        except FileExistsError as error:  # a directory, or a file where a directory should be
            raise self._error(action, error) from self._redaction.cause(error)
        second_try = f"{action} (does the bucket or share exist?)"
        return self._change(second_try, method, self._path(path), *arguments, **options)

    def open_to_write(self, path: str, size_bytes: int) -> Any:
        """Open a file of the driver that will have ``size_bytes`` bytes."""
        return self._make(f"creating {path}", path, "open", "wb", block_size=part_bytes(size_bytes))

    def rename(self, old: str, new: str) -> None:
        """Give a finished file its final name. An old file is deleted first only if the storage cannot replace it."""
        action = f"renaming {old}"
        paths = (self._path(old), self._path(new))
        is_present = self.exists(new)
        try:
            self._change(action, "mv", *paths)
        except LevelError:
            if not is_present or not self.exists(old):
                raise
        if is_present and self.exists(old):  # not every driver raises if the place refuses
            self.delete(new)
            self._change(action, "mv", *paths)

    # ---------------------------------------------------------------- abilities of the place

    def abilities(self) -> Abilities:
        """Return the behaviour of the place. Tested by a write, once per process. Raises: LevelError."""
        key = digest(json.dumps([self.url, self._options], sort_keys=True, default=str).encode())
        abilities = _abilities.get(key)
        if abilities is None:
            abilities = self._try_out()
            _abilities[key] = abilities
        return abilities

    def _try_out(self) -> Abilities:
        name = probe_name()
        age_s = None
        try:
            self.put(name, b"probe")
            with contextlib.suppress(FileNotFoundError):
                age_s = self._age_by_our_clock_s(name)
            self.delete(name)
            file = self.open_to_write(name, len(b"probe"))
            try:
                self.call("trying to write", file.write, b"probe")
                shows_open_files = self.exists(name)
            finally:
                discard(file)
            return Abilities(shows_open_files, clock_ahead_s=-(age_s or 0.0))
        finally:
            with contextlib.suppress(LevelError):
                self.delete(name)

    # ---------------------------------------------------------------- writing and reading

    def create(self, path: str, size_bytes: int) -> "FsspecWriter":
        """Open the file."""
        return FsspecWriter(self, path, size_bytes)

    def put(self, path: str, data: bytes) -> None:
        """Upload a small object."""
        self.reach("put", path)
        action = f"uploading {path}"
        if is_probe(path) or not self.abilities().shows_open_files:
            self._make(action, path, "pipe_file", data)
        else:
            temp = temp_path(path)
            self._make(action, temp, "pipe_file", data)
            self.rename(temp, path)
        self.reach("put_done", path)

    def get(self, path: str) -> bytes:
        """Download a small object."""
        size = self.size(path)
        if size > MAX_SMALL_BYTES:
            raise FormatError(f"{self.url}/{path}: {size} bytes, a manifest has at most {MAX_SMALL_BYTES}")
        return bytes(self._call(f"reading {path}", "cat_file", self._path(path)))

    def reader(self, path: str) -> "FsspecReader":
        """Return a reader. Nothing is opened."""
        return FsspecReader(self, path)

    def read_range(self, path: str, offset: int, out: memoryview) -> None:
        """Download one range. Raises: FormatError, if the object ends before."""
        if not len(out):
            return
        end = offset + len(out)
        try:
            data = self._call(f"reading {path} at {offset}", "cat_file", self._path(path), start=offset, end=end)
        except LevelError:
            if self.size(path) >= end:
                raise
            data = b""  # some drivers fail where others return fewer bytes
        if len(data) != len(out):
            raise FormatError(f"{self.url}/{path}: ends before byte {end}")
        out[:] = data

    def _info(self, path: str, method: str) -> Any:
        """Return the driver's facts about an object, from the place: a cached listing may be old."""
        self._filesystem().invalidate_cache()
        return self._call(f"looking at {path}", method, self._path(path))

    def size(self, path: str) -> int:
        """Return the bytes of an object."""
        size = self._info(path, "size")
        if size is None:
            raise FormatError(f"{self.url}/{path}: not an object with a size")
        return int(size)

    def _age_by_our_clock_s(self, path: str) -> float | None:
        try:
            modified = self._info(path, "modified")
        except LevelError:
            return None  # a driver without times
        if not isinstance(modified, datetime.datetime):
            return None
        if modified.tzinfo is None:
            modified = modified.replace(tzinfo=datetime.timezone.utc)
        return time.time() - modified.timestamp()

    def _age_s(self, path: str) -> float | None:
        """See ``Storage._age_s``. A test write measures the place's clock."""
        age_s = self._age_by_our_clock_s(path)
        if age_s is None:
            return None
        return age_s + self.abilities().clock_ahead_s

    # ---------------------------------------------------------------- deleting

    def is_link(self, path: str) -> bool:
        """True if the driver reports the directory as a link; ``sftp://`` has links, for example."""
        try:
            facts = self._call(f"looking at {path}", "info", self._path(path.partition("/")[0]))
        except FileNotFoundError:
            return False
        return bool(facts.get("islink")) or facts.get("type") == "link"

    def delete(self, path: str) -> None:
        """Delete an object."""
        self.reach("delete", path)
        try:
            self._call(f"deleting {path}", "rm_file", self._path(path))
        except FileNotFoundError:
            return
        self.reach("deleted", path)

    def delete_directory(self, path: str) -> None:
        """Remove an empty directory where the backend has such a thing."""
        if not self.list(path):
            try:
                self._filesystem().rmdir(self._path(path))
            except Exception:  # noqa: BLE001  object stores have no directories, and raise errors of many types
                return

    # Defined last, because it hides the type ``list`` from later annotations.
    def list(self, path: str = "") -> list[str]:
        """Return the names in a directory."""
        self._filesystem().invalidate_cache()
        try:
            paths = self._call(f"listing {path or '.'}", "ls", self._path(path), detail=False)
        except FileNotFoundError:
            return []
        directory = self._path(path).rstrip("/")
        names = []
        for driver_path in paths:
            entry = str(driver_path).rstrip("/")
            if entry and entry != directory:  # some places list a directory in itself
                names.append(entry.rsplit("/", 1)[-1])
        return sorted(names)


class FsspecReader:
    """Ranges of one object; see ``levels.storage.Reader``."""

    def __init__(self, storage: FsspecStorage, path: str) -> None:
        self._storage = storage
        self._path = path

    def read_into(self, offset: int, out: memoryview) -> None:
        """Download one range."""
        self._storage.read_range(self._path, offset, out)

    def close(self) -> None:
        """Do nothing: nothing is open."""


class FsspecWriter:
    """Streams one object; see ``levels.storage.Writer``. Blocks must come in order."""

    def __init__(self, storage: FsspecStorage, path: str, size_bytes: int) -> None:
        self._storage = storage
        self._path = path
        self._size = size_bytes
        self._done = 0
        self._temp = ""
        """The temporary name, until the object has its own."""
        self._file: Any = None
        if storage.abilities().shows_open_files:
            self._temp = temp_path(path)
        try:
            self._file = storage.open_to_write(self._temp or path, size_bytes)
        except BaseException:
            self.close()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Send the next block."""
        if offset != self._done:
            raise ValueError(f"{self._storage.url}/{self._path}: block at {offset}, expected at {self._done}")
        block = data[: max(0, self._size - offset)]
        self._storage.reach("write", self._path)
        # A copy, because not every driver takes a memoryview, or sends it before it returns.
        self._storage.call(f"writing {self._path} at {offset}", self._file.write, bytes(block))
        self._done += len(block)

    def publish(self) -> None:
        """Close the file, rename it if it has a temporary name, and compare its size."""
        storage = self._storage
        path = self._path
        if self._done != self._size:
            raise FormatError(f"{storage.url}/{path}: {self._done} bytes were written of {self._size}")
        storage.reach("upload", path)
        storage.call(f"ending {path}", self._file.close)
        if self._temp:
            storage.rename(self._temp, path)
            self._temp = ""
        storage.reach("uploaded", path)
        try:
            size = storage.size(path)
            if size != self._size:
                raise LevelError(f"{storage.url}/{path}: {size} bytes arrived, {self._size} were sent")
        except (LevelError, FormatError):
            storage.delete(path)
            raise
        self._file = None

    def close(self) -> None:
        """Discard an object that is not published. May be called twice. A published one stays."""
        file = self._file
        self._file = None
        if file is not None:
            discard(file)
        temp = self._temp
        self._temp = ""
        if temp:
            with contextlib.suppress(LevelError):  # the level does not answer: the next sweep removes the file
                self._storage.delete(temp)
