"""Any fsspec URL as a place for snapshots: object stores and network file systems, through one thin layer.

Objects are assembled in a local spool file and uploaded whole on ``publish``: an object store shows nothing before.
"""

import os
import tempfile
from typing import Any

import fsspec

from lazysnap import faults
from lazysnap.errors import LevelUnavailable, ShardCorrupt
from lazysnap.levels.storage import level_error


class RemoteWriter:
    """Collects an object in an unnamed temporary file, then uploads it."""

    def __init__(self, storage: "FsspecStorage", path: str, size_bytes: int) -> None:
        self._storage = storage
        self._path = path
        self._size = size_bytes
        self._spool = tempfile.TemporaryFile(prefix="lazysnap-")  # noqa: SIM115  closed in publish or abort

    def write(self, offset: int, data: memoryview) -> None:
        """Write into the spool file."""
        faults.point("level.remote.write")
        try:
            os.pwrite(self._spool.fileno(), data, offset)
        except OSError as error:
            raise level_error(self._storage.url, f"spooling {self._path}", error) from error

    def publish(self) -> None:
        """Upload the object."""
        self._spool.truncate(self._size)
        self._storage.upload(self._path, f"/proc/self/fd/{self._spool.fileno()}")
        self._spool.close()

    def abort(self) -> None:
        """Forget the spool file; nothing was visible."""
        self._spool.close()


class FsspecStorage:
    """See ``levels.storage.Storage``."""

    parallel_writes = 1

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            filesystem, root = fsspec.core.url_to_fs(url)
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

    def begin(self, path: str, size_bytes: int) -> RemoteWriter:
        """Start an object."""
        return RemoteWriter(self, path, size_bytes)

    def upload(self, path: str, local: str) -> None:
        """Upload a local file as one object."""
        self._call(f"creating the directory of {path}", "makedirs", os.path.dirname(self._path(path)), exist_ok=True)
        faults.point("level.remote.upload")
        self._call(f"uploading {path}", "put_file", local, self._path(path))
        faults.point("level.remote.uploaded")

    def put(self, path: str, data: bytes) -> None:
        """Upload a small object."""
        self._call(f"creating the directory of {path}", "makedirs", os.path.dirname(self._path(path)), exist_ok=True)
        self._call(f"uploading {path}", "pipe_file", self._path(path), data)

    def get(self, path: str) -> bytes:
        """Download a small object."""
        return bytes(self._call(f"reading {path}", "cat_file", self._path(path)))

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
        return int(self._call(f"looking at {path}", "size", self._path(path)))

    def list(self, path: str = "") -> list[str]:
        """Names below a prefix."""
        self._fs.invalidate_cache()
        try:
            found = self._call(f"listing {path or '.'}", "ls", self._path(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in found)

    def delete(self, path: str) -> None:
        """Delete an object."""
        try:
            self._call(f"deleting {path}", "rm_file", self._path(path))
        except FileNotFoundError:
            return

    def delete_directory(self, path: str) -> None:
        """Remove an empty directory where the backend has such a thing."""
        if not self.list(path):
            try:
                self._fs.rmdir(self._path(path))
            except Exception:  # noqa: BLE001  object stores have no directories, and say so in many ways
                return
