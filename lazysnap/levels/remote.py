"""Any fsspec URL as a place for snapshots: object stores and network file systems, through one thin layer.

Objects are assembled in a local spool file (in ``TMPDIR``) and uploaded whole on ``publish``: an object store shows
nothing before, and drivers repeat a part that failed.
"""

import contextlib
import datetime
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec

from lazysnap import faults
from lazysnap.errors import LevelUnavailable, ShardCorrupt
from lazysnap.levels.files import pwrite_all
from lazysnap.levels.storage import ABANDONED_AFTER_S, MAX_SMALL_BYTES, level_error


class RemoteWriter:
    """Collects an object in an unnamed temporary file, then uploads it."""

    def __init__(self, storage: "FsspecStorage", path: str, size_bytes: int) -> None:
        self._storage = storage
        self._path = path
        self._size = size_bytes
        self._is_published = self._is_uploading = False
        with self._naming("making a spool file"):
            self._spool = tempfile.TemporaryFile(prefix="lazysnap-")  # noqa: SIM115  closed in close

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f"{what} for {self._path} in {tempfile.gettempdir()} (set TMPDIR to a larger place)"
            raise level_error(self._storage.url, where, error) from error

    def write(self, offset: int, data: memoryview) -> None:
        """Write into the spool file."""
        with self._naming("writing the spool file"):
            faults.point("level.remote.write")
            pwrite_all(self._spool.fileno(), offset, data)

    def publish(self) -> None:
        """Upload the object, and ask whether all of it arrived."""
        with self._naming("ending the spool file"):
            self._spool.truncate(self._size)
        self._is_uploading = True
        self._storage.upload(self._path, f"/proc/self/fd/{self._spool.fileno()}")
        size = self._storage.size(self._path)
        if size != self._size:
            raise LevelUnavailable(f"{self._storage.url}: {self._path}: {size} bytes arrived, {self._size} were sent")
        self._is_published = True

    def close(self) -> None:
        """Forget the spool file, and what an upload that failed may have left."""
        self._spool.close()
        if self._is_uploading and not self._is_published:
            self._is_uploading = False
            with contextlib.suppress(LevelUnavailable):  # the level is away: the next sweep gets it
                self._storage.delete(self._path)


class FsspecReader:
    """Ranges of one object."""

    def __init__(self, storage: "FsspecStorage", path: str) -> None:
        self._storage = storage
        self._path = path

    def read_into(self, offset: int, out: memoryview) -> None:
        """Download one range."""
        self._storage.read_into(self._path, offset, out)

    def close(self) -> None:
        """Nothing is open."""


class FsspecStorage:
    """See ``levels.storage.Storage``."""

    parallel_writes = 1
    checks_writes = False

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        try:
            filesystem, root = fsspec.core.url_to_fs(url, **(options or {}))
        except (ImportError, ValueError) as error:
            raise LevelUnavailable(f"{url}: fsspec cannot open it: {error}; install the package it names") from error
        self._fs: Any = filesystem
        self._root: str = root.rstrip("/")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _call(self, what: str, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(self._fs, method)(*arguments, **options)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise level_error(self.url, what, error) from error
        except Exception as error:  # drivers raise their own types: whatever it is, it is this level's failure
            raise LevelUnavailable(f"{self.url}: {what}: {type(error).__name__}: {error}") from error

    def _pass(self, point: str) -> None:
        try:
            faults.point(point)
        except OSError as error:
            raise level_error(self.url, point, error) from error

    def begin(self, path: str, size_bytes: int) -> RemoteWriter:
        """Start an object."""
        return RemoteWriter(self, path, size_bytes)

    def upload(self, path: str, local: str) -> None:
        """Upload a local file as one object."""
        self._call(f"creating the directory of {path}", "makedirs", os.path.dirname(self._path(path)), exist_ok=True)
        self._pass("level.remote.upload")
        self._call(f"uploading {path}", "put_file", local, self._path(path))
        self._pass("level.remote.uploaded")

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """Upload a small object."""
        self._call(f"creating the directory of {path}", "makedirs", os.path.dirname(self._path(path)), exist_ok=True)
        self._pass("level.remote.put")
        self._call(f"uploading {path}", "pipe_file", self._path(path), data)
        self._pass("level.remote.put_done")

    def get(self, path: str) -> bytes:
        """Download a small object."""
        size = self.size(path)
        if size > MAX_SMALL_BYTES:
            raise ShardCorrupt(f"{self.url}/{path}: {size} bytes, a manifest has at most {MAX_SMALL_BYTES}")
        return bytes(self._call(f"reading {path}", "cat_file", self._path(path)))

    def reader(self, path: str) -> FsspecReader:
        """Nothing is opened."""
        return FsspecReader(self, path)

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Download one range."""
        data = self._call(
            f"reading {path} at {offset}", "cat_file", self._path(path), start=offset, end=offset + len(out)
        )
        if len(data) != len(out):
            raise ShardCorrupt(f"{self.url}/{path}: ends after {offset + len(data)} bytes")
        out[:] = data

    def size(self, path: str) -> int:
        """Bytes of an object."""
        size = self._call(f"looking at {path}", "size", self._path(path))
        if size is None:
            raise ShardCorrupt(f"{self.url}/{path}: not an object with a size")
        return int(size)

    def stamp(self, path: str) -> object:
        """None: asking costs as much as reading a manifest."""
        return None

    def abort_stale(self, path: str = "") -> list[str]:
        """Nothing: fsspec does not show unfinished uploads."""
        return []

    def list(self, path: str = "") -> list[str]:
        """Names below a prefix."""
        self._fs.invalidate_cache()
        try:
            found = self._call(f"listing {path or '.'}", "ls", self._path(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in found)

    def lease(self, path: str) -> contextlib.AbstractContextManager[None]:
        """To be built."""
        return contextlib.nullcontext()

    def is_leased(self, path: str) -> bool:
        """To be built."""
        return False

    def delete(self, path: str) -> None:
        """Delete an object."""
        self._pass("level.remote.delete")
        try:
            self._call(f"deleting {path}", "rm_file", self._path(path))
        except FileNotFoundError:
            return
        self._pass("level.remote.deleted")

    def delete_abandoned(self, path: str, *, unless: str | None = None) -> bool:
        """Delete what is old; a place that does not tell the age of things keeps them."""
        try:
            modified: datetime.datetime = self._fs.modified(self._path(path))
            if modified.tzinfo is None:
                modified = modified.replace(tzinfo=datetime.timezone.utc)
            if time.time() - modified.timestamp() < ABANDONED_AFTER_S:
                return False
        except Exception:  # noqa: BLE001  drivers without times raise their own types, and the object may be gone
            return False
        if unless is not None and unless.rsplit("/", 1)[-1] in self.list(os.path.dirname(unless)):
            return False
        self.delete(path)
        return True

    def delete_directory(self, path: str) -> None:
        """Remove an empty directory where the backend has such a thing."""
        if not self.list(path):
            try:
                self._fs.rmdir(self._path(path))
            except Exception:  # noqa: BLE001  object stores have no directories, and say so in many ways
                return
