"""A local (or mounted) directory: temporary names, large direct writes, fsync, rename.

``O_DIRECT`` in blocks of several MiB from two threads is as fast as anything on this path, at a fifth of the
processor time of buffered writes, and leaves the page cache to training (docs/architecture.md).

A writer holds an ``flock`` on its file from its creation until the snapshot is committed. The kernel drops it with
the process, so whoever can take the lock knows that the writer is dead: no guess about process ids, which are
reused and mean nothing in another container or on another host.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time

from lazysnap import faults
from lazysnap.errors import ShardCorrupt
from lazysnap.levels.files import (
    PAGE,
    TEMP_MARK,
    allocate,
    make_directories,
    open_direct,
    open_regular,
    pread_all,
    pwrite_all,
    sync_directory,
    temp_name,
)
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.storage import ABANDONED_AFTER_S, MAX_SMALL_BYTES, level_error

__all__ = ["PAGE", "TEMP_MARK", "LocalStorage", "map_anonymous"]

_CREATE_ATTEMPTS = 5


def _lock(handle: int) -> bool | None:
    """Whether this open file got the lock; ``None`` where the file system knows no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
            return None
        raise
    return True


class LocalWriter:
    """Writes one file under a temporary name; see ``levels.storage.Writer``."""

    def __init__(self, root: str, path: str, size_bytes: int) -> None:
        self._root = root
        self._final = os.path.join(root, path)
        self._directory = os.path.dirname(self._final)
        self._size = size_bytes
        self._buffered = self._direct = -1
        self._to_remove = ""
        try:
            self._create()
            faults.point("level.local.created")
            # Early ENOSPC, and no metadata updates while the blocks are written.
            allocate(self._buffered, size_bytes)
            self._direct = open_direct(self._to_remove, os.O_WRONLY)
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        for _ in range(_CREATE_ATTEMPTS):
            make_directories(self._directory)
            temp = os.path.join(self._directory, temp_name(os.path.basename(self._final)))
            faults.point("level.local.create")
            try:
                self._buffered = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # somebody's sweep took the empty directory
            self._to_remove = temp
            if _lock(self._buffered) is not False and os.fstat(self._buffered).st_nlink:
                return
            self.close()  # a sweep was quicker than the lock
        raise OSError(errno.EBUSY, "the directory is removed again and again", self._directory)

    def write(self, offset: int, data: memoryview) -> None:
        """Write at ``offset``, directly where the alignment allows."""
        try:
            faults.point("level.local.write")
            if self._direct >= 0 and offset % PAGE == 0 and len(data) % PAGE == 0:
                try:
                    pwrite_all(self._direct, offset, data)
                    return
                except OSError as error:
                    if error.errno != errno.EINVAL:  # memory that is not aligned
                        raise
            pwrite_all(self._buffered, offset, data)
        except OSError as error:
            raise level_error(self._root, f"writing {self._final} at {offset}", error) from error

    def publish(self) -> None:
        """fdatasync, rename, fsync of the directory and of the one that holds it."""
        try:
            # Cuts off the padding of the last block.
            os.ftruncate(self._buffered, self._size)
            faults.point("level.local.sync")
            os.fdatasync(self._buffered)
            faults.point("level.local.rename")
            os.rename(self._to_remove, self._final)
            self._to_remove = self._final
            faults.point("level.local.renamed")
            sync_directory(self._directory)
            # Also if it was not made just now: whoever made it may have died before this.
            sync_directory(os.path.dirname(self._directory))
            self._to_remove = ""
            faults.point("level.local.published")
        except OSError as error:
            raise level_error(self._root, f"publishing {self._final}", error) from error

    def close(self) -> None:
        """Remove what is not published, under whichever name it stands, then close, and so unlock."""
        name, self._to_remove = self._to_remove, ""
        if name:
            with contextlib.suppress(OSError):  # the directory may be gone with it; else the next sweep gets it
                os.unlink(name)
        handles, self._buffered, self._direct = (self._buffered, self._direct), -1, -1
        for handle in handles:
            if handle >= 0:
                with contextlib.suppress(OSError):  # NFS reports here what fsync reported before
                    os.close(handle)


class LocalReader:
    """Reads ranges of one file, directly where the alignment allows; see ``levels.storage.Reader``."""

    def __init__(self, root: str, path: str) -> None:
        self._root = root
        self._name = os.path.join(root, path)
        self._buffered = self._direct = -1
        self._buffered = open_regular(self._name)
        self._direct = open_direct(self._name, os.O_RDONLY)
        if self._direct >= 0 and not os.path.sameopenfile(self._buffered, self._direct):
            os.close(self._direct)  # replaced between the two
            self._direct = -1

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out``; what is not page aligned goes through the page cache."""
        try:
            done = 0
            aligned = len(out) // PAGE * PAGE
            if self._direct >= 0 and aligned and offset % PAGE == 0:
                try:
                    done = pread_all(self._direct, offset, out[:aligned])
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            done += pread_all(self._buffered, offset + done, out[done:])
        except OSError as error:
            raise level_error(self._root, f"reading {self._name} at {offset}", error) from error
        if done != len(out):
            raise ShardCorrupt(f"{self._name}: ends after {offset + done} bytes, expected {offset + len(out)}")

    def close(self) -> None:
        """Close both descriptors."""
        handles, self._buffered, self._direct = (self._buffered, self._direct), -1, -1
        for handle in handles:
            if handle >= 0:
                os.close(handle)


class LocalStorage:
    """See ``levels.storage.Storage``."""

    parallel_writes = 2
    checks_writes = False

    def __init__(self, root: str) -> None:
        self.url = root
        self._is_root_durable = False

    def _path(self, path: str) -> str:
        return os.path.join(self.url, path)

    def begin(self, path: str, size_bytes: int) -> LocalWriter:
        """Start a file; ENOSPC shows here where the file system can allocate."""
        try:
            if not self._is_root_durable:
                make_directories(self.url)
                with contextlib.suppress(PermissionError):  # a parent that is not ours to read
                    sync_directory(os.path.dirname(self.url))
                self._is_root_durable = True
            return LocalWriter(self.url, path, size_bytes)
        except OSError as error:
            raise level_error(self.url, f"creating {path} of {size_bytes} bytes", error) from error

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """Temporary file, fsync, rename, fsync of the directory."""
        writer = self.begin(path, len(data))
        try:
            writer.write(0, memoryview(data))
            writer.publish()
        finally:
            writer.close()

    def get(self, path: str) -> bytes:
        """Read a small file whole."""
        name = self._path(path)
        try:
            with open(open_regular(name), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_SMALL_BYTES:
                    raise ShardCorrupt(f"{name}: {size} bytes, a manifest has at most {MAX_SMALL_BYTES}")
                return file.read(MAX_SMALL_BYTES)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise level_error(self.url, f"reading {path}", error) from error

    def reader(self, path: str) -> LocalReader:
        """Open a file; it stays readable when it is deleted."""
        try:
            return LocalReader(self.url, path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise level_error(self.url, f"opening {path}", error) from error

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Read one range."""
        with contextlib.closing(self.reader(path)) as reader:
            reader.read_into(offset, out)

    def _stat(self, path: str) -> os.stat_result:
        try:
            return os.stat(self._path(path))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise level_error(self.url, f"looking at {path}", error) from error

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self._stat(path).st_size

    def stamp(self, path: str) -> object:
        """Inode, size and both times."""
        facts = self._stat(path)
        return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns

    def abort_stale(self, path: str = "") -> list[str]:
        """Nothing: what is not finished is a file."""
        return []

    def list(self, path: str = "") -> list[str]:
        """Names in a directory, sorted; NFS's ``.nfs*`` leftovers of open files are not ours to see."""
        try:
            return sorted(name for name in os.listdir(self._path(path)) if not name.startswith(".nfs"))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise level_error(self.url, f"listing {path or '.'}", error) from error

    def lease(self, path: str) -> contextlib.AbstractContextManager[None]:
        """To be built."""
        return contextlib.nullcontext()

    def is_leased(self, path: str) -> bool:
        """To be built."""
        return False

    def delete(self, path: str) -> None:
        """Unlink a file and make that durable."""
        try:
            faults.point("level.local.delete")
            os.unlink(self._path(path))
            faults.point("level.local.deleted")
            sync_directory(os.path.dirname(self._path(path)))
        except FileNotFoundError:
            return
        except OSError as error:
            raise level_error(self.url, f"deleting {path}", error) from error

    def delete_abandoned(self, path: str, *, unless: str | None = None) -> bool:
        """Delete under the lock, if nobody holds it; without locks by age."""
        try:
            handle = os.open(self._path(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False  # gone, or of another user: not ours to delete
        try:
            facts = os.fstat(handle)
            locked = _lock(handle) if stat.S_ISREG(facts.st_mode) else False
            if locked is False or (locked is None and time.time() - facts.st_mtime < ABANDONED_AFTER_S):
                return False
            # Asked under the lock: a writer lets go of it after its commit only.
            if unless is not None and os.path.lexists(self._path(unless)):
                return False
            self.delete(path)
            return True
        except OSError as error:
            raise level_error(self.url, f"sweeping {path}", error) from error
        finally:
            os.close(handle)

    def delete_directory(self, path: str) -> None:
        """Remove a directory if it is empty."""
        with contextlib.suppress(OSError):  # not empty or not there: both are fine
            os.rmdir(self._path(path))
