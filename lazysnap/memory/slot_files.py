"""Unnamed, fully allocated files on a local disk, for slots when memory does not suffice.

A file has no name, so it ends with the last process that holds or maps it, as memory does. Its blocks are allocated
before use, so a disk that becomes full cannot end a process that writes into the mapping.
"""

import contextlib
import ctypes
import fcntl
import os
import struct
import tempfile
from collections.abc import Sequence
from urllib.parse import urlsplit

from rich.filesize import decimal

from lazysnap.config import MemoryLevel, PersistentLevel
from lazysnap.memory.budget import MemoryBoundExceeded

_RESERVE_BYTES = 256 << 20
"""Space on the disk that slots leave to others."""
_LOCAL_DISKS = {0xEF53: "ext4", 0x58465342: "XFS", 0x9123683E: "btrfs", 0xF2F52010: "F2FS", 0x794C7630: "overlay"}
"""File systems, by ``statfs.f_type``, on which allocated space stays allocated and no server has to answer."""
_BTRFS = 0x9123683E
_GET_FLAGS = 0x80086601
_SET_FLAGS = 0x40086602
_NO_COPY_ON_WRITE = 0x00800000
_libc = ctypes.CDLL(None, use_errno=True)


def spill_dir(memory: MemoryLevel, levels: Sequence[PersistentLevel]) -> str | None:
    """Return the directory for slots as files, if any."""
    if memory.spill_dir is not None:
        return memory.spill_dir or None
    for level in levels:
        if not urlsplit(level.url).scheme:
            return level.url
    return None


def check_room(directory: str, size_bytes: int) -> None:
    """Raise MemoryBoundExceeded if slots of that size in total cannot be files in ``directory``."""
    folder = _existing(directory)
    try:
        kind = _kind(folder)
        facts = os.statvfs(folder)
    except OSError as error:
        raise MemoryBoundExceeded(f"{directory} cannot hold slots as files: {error.strerror}") from error
    if kind not in _LOCAL_DISKS:
        raise MemoryBoundExceeded(
            f"{directory} cannot hold slots as files: it is on no local disk with one of the file systems "
            f"{', '.join(_LOCAL_DISKS.values())}; name such a directory with MemoryLevel(spill_dir=...)"
        )
    free = max(0, facts.f_bavail * facts.f_frsize - _RESERVE_BYTES)
    if size_bytes > free:
        raise MemoryBoundExceeded(
            f"{directory} cannot hold slots as files: they need {size_bytes} bytes ({decimal(size_bytes)}), its disk "
            f"has {free} ({decimal(free)}) to spare; free space, or name another disk with MemoryLevel(spill_dir=...)"
        )


def make_file(directory: str, size_bytes: int) -> int:
    """Return a descriptor of a new file without a name, with all its blocks allocated. Blocks: asks the disk.

    Raises: MemoryBoundExceeded, if there is no room, or no file can be made there.
    """
    check_room(directory, size_bytes)
    try:
        fd = _nameless(_existing(directory))
        try:
            _keep_in_place(fd)
            os.posix_fallocate(fd, 0, size_bytes)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise MemoryBoundExceeded(f"{directory} cannot hold slots as files: {error.strerror}") from error
    return fd


def is_allocated(fd: int) -> bool:
    """True if the file ``fd`` has no name and all its blocks: nobody can open it by name, and writes cannot fail for
    space.
    """
    facts = os.fstat(fd)
    return facts.st_nlink == 0 and facts.st_blocks * 512 >= facts.st_size


def _existing(directory: str) -> str:
    """Return the directory, or its nearest existing parent: an unnamed file needs no directory of its own."""
    while not os.path.lexists(directory) and os.path.dirname(directory) != directory:
        directory = os.path.dirname(directory)
    return directory


def _kind(file: str | int) -> int:
    """Return ``statfs.f_type`` of a path, or of an open file by its descriptor. Raises: OSError."""
    facts = ctypes.create_string_buffer(512)
    if isinstance(file, int):
        result = _libc.fstatfs(file, facts)
    else:
        path = os.fsencode(file)
        result = _libc.statfs(path, facts)
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return ctypes.c_ulong.from_buffer(facts).value & 0xFFFFFFFF


def _nameless(folder: str) -> int:
    with contextlib.suppress(OSError):  # a file system without them: overlay, before Linux 6.3
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fd, name = tempfile.mkstemp(prefix=".lazysnap-slot-", dir=folder)
    os.unlink(name)
    return fd


def _keep_in_place(fd: int) -> None:
    """Make btrfs write into allocated blocks instead of new ones, which a full disk lacks. Raises: OSError."""
    if _kind(fd) == _BTRFS:
        [flags] = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, struct.pack("l", 0)))
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags | _NO_COPY_ON_WRITE))
