"""A local or mounted directory: temporary names, large direct writes, fsync, a rename to the final name.

``O_DIRECT`` in blocks of several MiB from two threads is as fast as anything on this path. It takes a fifth of the
processor time of buffered writes, and leaves the page cache to training (docs/architecture.md).

A writer holds an ``flock`` on its file from its creation until the snapshot is committed. The kernel drops the lock
with the process: a process that can take the lock knows that the writer is dead. Process ids cannot show that: they are
reused, and are different in another container or on another host. Over NFS ``flock`` becomes a lock of the whole file
at the server, so it works between hosts (and conflicts with ``lockf`` of the same process). Taking a lock never waits.

==================  =========  ==================================================================================
who                 lock       from, to
==================  =========  ==================================================================================
writer              exclusive  creation of its file, publication
writer              shared     publication, end of its commit: over NFS this takes a lost lock again
sweep               exclusive  an instant, to see whether a writer lives
==================  =========  ==================================================================================

A file whose write or fsync failed is never published: the kernel forgets the bytes it could not write, so a second
fsync would succeed. No descriptor outlives one file, so the next snapshot sees the present state of a mount.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator

from lazysnap import faults
from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.files import (
    allocate,
    close,
    is_file,
    local_error,
    make_directories,
    open_direct,
    open_regular,
    pread_all,
    pwrite_all,
    sync_directory,
    sync_handle,
    temp_name,
)
from lazysnap.levels.storage import MAX_SMALL_BYTES, Storage, no_beat
from lazysnap.shard.layout import PAGE

logger = logging.getLogger(__name__)

_CREATE_ATTEMPTS = 5
_NOT_OURS = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENXIO,
    errno.ENOTDIR,
)
"""Errors of files that no writer of this format left: deleted, of another user, or behind a symbolic link."""
_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TO_LOCK = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def _lock(handle: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Take the lock of an open file. True if it was taken; ``None`` where the file system has no locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # EBADF: NFS wants a descriptor open for writing for an exclusive lock, and the file is not ours to write.
        if error.errno in (*_NO_LOCKS, errno.EBADF):
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
        self._temp = ""
        self._may_have_final = False
        self._failure: OSError | None = None
        try:
            self._create()
            faults.point("level.local.created")
            # Early ENOSPC, and no metadata updates while the blocks are written.
            allocate(self._buffered, size_bytes)
            self._direct = open_direct(self._temp, os.O_WRONLY)
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        for _ in range(_CREATE_ATTEMPTS):
            os.stat(self._root)  # only ``LocalStorage.create`` makes the level's directory
            make_directories(self._directory)
            temp = os.path.join(self._directory, temp_name(os.path.basename(self._final)))
            faults.point("level.local.create")
            try:
                self._buffered = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # a sweep removed the empty directory
            self._temp = temp
            if _lock(self._buffered) is not False and os.fstat(self._buffered).st_nlink:
                return
            self.close()  # a sweep removed the file before it was locked
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
            self._failure = error
            raise local_error(self._root, f"writing {self._final} at {offset}", error) from error

    def publish(self) -> None:
        """Call fdatasync, rename to the final name, call fsync for the directory and its parent.

        Raises: LevelError, also if a write or an earlier attempt failed.
        """
        if self._failure is not None:
            raise LevelError(f"{self._root}: {self._final} is not published, it failed before: {self._failure}")
        try:
            # Cuts off the padding of the last block.
            os.ftruncate(self._buffered, self._size)
            faults.point("level.local.sync")
            os.fdatasync(self._buffered)
            # Over NFS this also takes the lock again, if the server restarted and lost it.
            if _lock(self._buffered, fcntl.LOCK_SH) is False:
                raise OSError(errno.EBUSY, "a sweep took the file while it was published", self._temp)
            faults.point("level.local.rename")
            self._may_have_final = True
            try:
                os.rename(self._temp, self._final)
            except FileNotFoundError:
                # A reply that NFS lost: the request was done, and repeated.
                if not is_file(self._buffered, self._final):
                    raise
            self._temp = ""
            faults.point("level.local.renamed")
            sync_directory(self._directory)
            if self._directory != self._root:  # the name of the level itself is durable since ``create``
                # Also if this process did not make the directory: the one that did may have died before this.
                sync_directory(os.path.dirname(self._directory))
            self._may_have_final = False
            faults.point("level.local.published")
        except OSError as error:
            self._failure = error
            raise local_error(self._root, f"publishing {self._final}", error) from error

    def close(self) -> None:
        """Delete a file that is not published, under each of its names, and close it, which unlocks."""
        # The next sweep deletes a file that cannot be deleted here, because the level does not answer, for example.
        if self._may_have_final:
            self._may_have_final = False
            with contextlib.suppress(OSError):
                if is_file(self._buffered, self._final):
                    os.unlink(self._final)
        buffered = self._buffered
        direct = self._direct
        self._buffered = self._direct = -1
        close(buffered, direct)
        temp = self._temp
        self._temp = ""
        if temp:
            with contextlib.suppress(OSError):
                os.unlink(temp)


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
        """Fill ``out``. Parts that are not page aligned go through the page cache."""
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
            if error.errno == errno.ESTALE and not os.path.lexists(self._name):  # another client of an NFS deleted it
                raise FileNotFoundError(errno.ENOENT, "deleted while it was read", self._name) from error
            raise local_error(self._root, f"reading {self._name} at {offset}", error) from error
        if done != len(out):
            raise FormatError(f"{self._name}: ends after {offset + done} bytes, expected {offset + len(out)}")

    def close(self) -> None:
        """Close both descriptors."""
        buffered = self._buffered
        direct = self._direct
        self._buffered = self._direct = -1
        close(buffered, direct)


class LocalStorage(Storage):
    """See ``levels.storage.Storage``."""

    parallel_writes = 2

    def __init__(self, root: str) -> None:
        self.url = root
        self._is_root_durable = False
        """True once the directory exists and its name is durable, until an operation fails. Writes make it only while
        this is False: if a program deletes the directory, the write in progress fails and makes no part of it again,
        and the next snapshot makes it again."""
        self._has_written = False
        """True once this object made the directory, or found it: from then on the directory above it must exist. If
        that is missing, nothing is written. This notices a disk that is not mounted only if the level is at least two
        directories below the mount point (docs/storage.md)."""

    def _path(self, path: str) -> str:
        return os.path.join(self.url, path)

    @contextlib.contextmanager
    def _naming(self, action: str) -> Iterator[None]:
        """Turn OSError into LevelError within the context. FileNotFoundError stays."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._error(action, error) from error

    def _error(self, action: str, error: OSError) -> LevelError:
        """Return an OSError as a LevelError. The next write checks the directory again, because it may have been
        replaced.
        """
        self._is_root_durable = False
        return local_error(self.url, action, error)

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        """Start a file. A full disk is an error here, where the file system can allocate."""
        try:
            if not self._is_root_durable:
                if self._has_written:
                    os.stat(os.path.dirname(self.url))
                make_directories(self.url)
                with contextlib.suppress(PermissionError):  # a parent that is not ours to read
                    sync_directory(os.path.dirname(self.url))
                self._is_root_durable = True
                self._has_written = True
            if self.is_link(path):
                raise LevelError(f"{self.url}: {path} is, or is behind, a symbolic link: nothing is written through it")
            return LocalWriter(self.url, path, size_bytes)
        except OSError as error:
            raise self._error(f"creating {path} of {size_bytes} bytes", error) from error

    def _path_exists(self, path: str) -> bool:
        """True if a path exists, like ``lexists``. Raises: OSError, if the level does not answer."""
        try:
            os.lstat(self._path(path))
        except FileNotFoundError:
            return False
        return True

    def put(self, path: str, data: bytes) -> None:
        """Write a temporary file, call fsync, rename, call fsync for the directory."""
        writer = self.create(path, len(data))
        try:
            writer.write(0, memoryview(data))
            writer.publish()
        finally:
            writer.close()

    def link(self, path: str, new_path: str, beat: Callable[[], object] = no_beat) -> bool:
        """Make a hard link: first under a temporary name, for the new one may exist. Durable on return."""
        if not self.exists(path) or self.is_link(path) or self.is_link(new_path):
            return False
        directory = os.path.dirname(self._path(new_path))
        temp = os.path.join(directory, temp_name(os.path.basename(new_path)))
        try:
            make_directories(directory)
            faults.point("level.local.link")
            os.link(self._path(path), temp)
            try:
                os.rename(temp, self._path(new_path))
                sync_directory(directory)
            finally:
                with contextlib.suppress(FileNotFoundError):  # rename leaves it if both are one file already
                    os.unlink(temp)
        except OSError as error:
            logger.info("%s: %s is written once more: %s", self.url, new_path, error)
            return False
        return True

    def get(self, path: str) -> bytes:
        """Read a small file whole."""
        name = self._path(path)
        with self._naming(f"reading {path}"), open(open_regular(name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_SMALL_BYTES:
                raise FormatError(f"{name}: {size} bytes, a manifest has at most {MAX_SMALL_BYTES}")
            return file.read(MAX_SMALL_BYTES)

    def reader(self, path: str) -> LocalReader:
        """Open a file. It stays readable after it is deleted."""
        with self._naming(f"opening {path}"):
            return LocalReader(self.url, path)

    def _stat(self, path: str) -> os.stat_result:
        with self._naming(f"looking at {path}"):
            return os.stat(self._path(path))

    def size(self, path: str) -> int:
        """Return the bytes of a file."""
        return self._stat(path).st_size

    def stamp(self, path: str) -> object:
        """Return inode, size and both times."""
        facts = self._stat(path)
        return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns

    def list(self, path: str = "") -> list[str]:
        """Return the names in a directory, sorted, without ``.nfs*``: files that NFS keeps while they are open."""
        try:
            return sorted(name for name in os.listdir(self._path(path)) if not name.startswith(".nfs"))
        except FileNotFoundError:
            return []
        except OSError as error:
            if path and isinstance(error, NotADirectoryError):
                return []  # a file among the snapshots is ignored; a file instead of the level is an error
            raise self._error(f"listing {path or '.'}", error) from error

    def is_link(self, path: str) -> bool:
        """True for a link below the level's directory; that directory itself may be a link."""
        name = self.url
        is_missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with self._naming(f"looking at {path}"), is_missing:
            for part in path.split("/"):
                name = os.path.join(name, part)
                if stat.S_ISLNK(os.lstat(name).st_mode):
                    return True
        return False

    def _age_s(self, path: str) -> float:
        """See ``Storage._age_s``."""
        with self._naming(f"looking at {path}"):
            return self._age_of(os.lstat(self._path(path)))

    def _age_of(self, facts: os.stat_result) -> float:
        """Return the seconds since the later of both times: a copy may have the time of its original.

        The clock is that of the file system, which may be on another host: a new file shows its time.
        """
        try:
            with tempfile.TemporaryFile(dir=self.url) as probe:
                now_s = os.fstat(probe.fileno()).st_mtime
        except OSError:
            now_s = time.time()  # a process that may not write to the directory deletes nothing either
        return now_s - max(facts.st_mtime, facts.st_ctime)

    @contextlib.contextmanager
    def _directory(self, path: str) -> Iterator[int]:
        """Yield a descriptor of the directory that holds ``path``. Symbolic links below the level are not followed."""
        handle = os.open(self.url, _DIRECTORY)
        try:
            for name in path.split("/")[:-1]:
                outer = handle
                handle = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
                os.close(outer)
            yield handle
        finally:
            os.close(handle)

    def delete(self, path: str) -> None:
        """Unlink a file and make that durable."""
        with (
            contextlib.suppress(FileNotFoundError),
            self._naming(f"deleting {path}"),
            self._directory(path) as directory,
        ):
            faults.point("level.local.delete")
            os.unlink(os.path.basename(path), dir_fd=directory)
            faults.point("level.local.deleted")
            sync_handle(directory)

    def delete_abandoned(self, path: str, *, unless: str | None = None) -> bool:
        """Delete a file if no process holds its lock; on file systems without locks, if it is old."""
        try:
            with self._directory(path) as directory:
                handle = os.open(os.path.basename(path), _TO_LOCK, dir_fd=directory)
        except OSError as error:
            if error.errno in _NOT_OURS:
                return False
            raise self._error(f"sweeping {path}", error) from error
        try:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                return False
            is_locked = _lock(handle)
            if is_locked is False or (is_locked is None and self._age_of(facts) < self.abandoned_after_s):
                return False
            # Checked under the lock, which a writer releases only after its commit.
            if unless is not None and self._path_exists(unless):
                return False
            if not is_file(handle, self._path(path)):
                return False  # a writer has just replaced it
            self.delete(path)
            return True
        except OSError as error:
            raise self._error(f"sweeping {path}", error) from error
        finally:
            with contextlib.suppress(OSError):
                os.close(handle)

    def delete_directory(self, path: str) -> None:
        """Remove a directory if it is empty; NFS keeps one in which a deleted file (``.nfs*``) is still read."""
        with contextlib.suppress(OSError):  # it is not empty, or does not exist
            os.rmdir(self._path(path))
