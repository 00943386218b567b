"""A slot: a memfd, or a file where memory does not suffice, that holds one shard; trainer and keeper share it.

It is anonymous (``memfd_create``, ``slot_files``). Processes pass it on as a descriptor; it is freed when the last one
closes it. A slot describes itself: its words show which snapshot it holds, and whether that is whole (DataStates-LLM,
section 4; REFT, section 3)::

    0                   control words, u64 little-endian, one page
    PAGE                small state: the snapshot's metadata as JSON, written before the first byte is copied
    PAGE + meta_capacity    image: the bytes of the shard file, page aligned

One writer (the trainer, between ``begin`` and ``commit``) and any number of readers. A writer that is killed between
any two stores leaves a slot that is empty or torn, never whole. ``END`` is written last, by the copy thread.
"""

import contextlib
import ctypes
import enum
import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from lazysnap.errors import FormatError
from lazysnap.memory.slot_files import is_allocated, make_file
from lazysnap.shard.checksum import Checksums

PAGE = 4096
_MAGIC = 0x31504E53595A414C  # "LAZYSNP1"
SLACK_BYTES = 8 << 20
_POPULATE_BYTES = 16 << 20
_MADV_POPULATE_WRITE = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Word(enum.IntEnum):
    """Index of each control word in the first page."""

    MAGIC = 0
    META_CAPACITY = 1
    IMAGE_CAPACITY = 2
    BEGIN = 3  # step + 1 of the capture that was begun; 0: empty
    END = 4  # step + 1 of the capture that is whole; equal to BEGIN when whole
    SEQUENCE = 5  # number of the capture in this job; orders the slots
    META_BYTES = 6
    META_CHECKSUM = 7
    IMAGE_BYTES = 8
    WATERMARK = 9  # image bytes [0, WATERMARK) are copied
    PIN = 10  # step + 1 of the capture that storage reads, or is going to; 0: none. See ``KEEP``
    GRANT = 15  # step + 1 that storage takes next, in every slot of the node; 0: none
    HOLD = 16  # step + 1 of the capture that parity on other nodes counts on; 0: none. The keeper's own, see ``take``
    VOID = 11  # the capture was, or may have been, torn
    READY = 12  # pages are populated
    PLAN = 13  # checksum of the header in the image, 0: none
    TAKEN = 17  # Unix time in ns when the capture began; with the next two for people, not for decisions
    COPIED = 18  # ns that the copy took, written before END
    WAITED = 19  # ns that this training had waited for captures in all when this one began
    REACHED = 20  # step + 1 of the last boundary, in the slot of the newest capture


KEEP = 1 << 63
"""Added to ``Word.PIN`` by a trainer: the step must be stored, so the pin stays until that is answered."""


class SlotPhase(enum.Enum):
    """EMPTY -> CAPTURING -> WHOLE, or -> VOID from the last two; ``begin`` starts again with CAPTURING."""

    EMPTY = "empty"
    CAPTURING = "capturing"
    WHOLE = "whole"
    VOID = "void"


@dataclass(frozen=True)
class SlotStatus:
    """The control words at one moment."""

    phase: SlotPhase
    step: int | None
    sequence: int
    image_bytes: int
    watermark: int
    pinned_step: int | None
    """The step that the slot is pinned for; ``None``: it is not pinned."""
    ready: bool
    held: bool = False
    """True if parity on other nodes depends on it."""

    @property
    def pinned(self) -> bool:
        """True if the slot must not be reused: storage reads it or will, or other nodes depend on it."""
        return self.pinned_step is not None or self.held


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def capacity_fits(capacity_bytes: int, needed_bytes: int) -> bool:
    """True if a slot's image is large enough for a capture, and not wastefully larger."""
    return needed_bytes <= capacity_bytes <= needed_bytes + needed_bytes // 20 + SLACK_BYTES


def _is_memory(fd: int) -> bool:
    """True if ``fd`` is of memory, which can be sealed; files cannot."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


class Slot:
    """One mapped slot. Not thread-safe: one writer; readers see each word as a whole.

    It has many small methods: one for each act on its words, so that their order stands in one place.
    """

    def __init__(self, fd: int, buffer: mmap.mmap) -> None:
        self.fd = fd
        self.is_file = not _is_memory(fd)
        self._buffer = buffer
        self._bytes = memoryview(buffer)
        self._words = self._bytes[:PAGE].cast("Q")
        self.meta_capacity = int(self._words[Word.META_CAPACITY])
        self.image_capacity = int(self._words[Word.IMAGE_CAPACITY])
        self.image_offset = PAGE + self.meta_capacity
        self.before_unmap: Callable[[], object] = lambda: None
        """Called once before the memory is unmapped, to unregister it from a device."""
        self._checksums: tuple[int, Checksums] | None = None
        """Sequence number and checksums of a capture, once this process computed them."""

    @classmethod
    def create(cls, meta_capacity: int, image_capacity: int, directory: str | None = None) -> "Slot":
        """Make an empty slot; capacities in bytes, rounded up to pages. No page is touched but the first.

        ``directory``: make it a file there, not memory. Raises: OSError; MemoryBoundExceeded, if that fails.
        """
        meta_capacity, image_capacity = _round_up(meta_capacity), _round_up(image_capacity)
        size = PAGE + meta_capacity + image_capacity
        if directory is not None:
            fd = make_file(directory, size)
        else:
            fd = os.memfd_create("lazysnap-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            os.pwrite(fd, struct.pack("<3Q", _MAGIC, meta_capacity, image_capacity), 0)
            if directory is None:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls.attach(fd)

    @classmethod
    def attach(cls, fd: int) -> "Slot":
        """Map the slot behind ``fd``, which the slot owns from then on; it is closed if it cannot be mapped.

        Of a descriptor that was opened for reading, what is written stays in this process.
        Raises: FormatError, if the memory is no slot of this version, or its size could change; OSError, if there is no
        room for a mapping.
        """
        try:
            size = os.fstat(fd).st_size
            magic, meta_capacity, image_capacity = struct.unpack("<3Q", os.pread(fd, 24, 0).ljust(24, b"\0"))
            if magic != _MAGIC or PAGE + meta_capacity + image_capacity != size:
                raise FormatError(
                    f"shared memory of {size} bytes is no arena slot of this version (magic {magic:#x}, "
                    f"capacities {meta_capacity} + {image_capacity}); restart the keeper of this job"
                )
            if not _is_memory(fd):
                if not is_allocated(fd):
                    raise FormatError("a file that has a name, or not all of its blocks, is no slot")
            elif fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise FormatError("shared memory whose size another process could change is no slot")
            is_readable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            # Private, and not PROT_READ alone: torch warns of buffers that it could not write to.
            buffer = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE if is_readable else mmap.MAP_SHARED)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                buffer.madvise(mmap.MADV_HUGEPAGE)
            return cls(fd, buffer)
        except BaseException:
            os.close(fd)
            raise

    def reading_fd(self) -> int:
        """Return another descriptor of the memory, through which it can be mapped for reading alone.

        The caller closes it. Raises: OSError, without /proc.
        """
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    @staticmethod
    def bytes_for(meta_capacity: int, image_capacity: int) -> int:
        """Bytes that a slot of these capacities takes."""
        return PAGE + _round_up(meta_capacity) + _round_up(image_capacity)

    @property
    def size_bytes(self) -> int:
        """Bytes that this slot takes."""
        return PAGE + self.meta_capacity + self.image_capacity

    @property
    def memory_bytes(self) -> int:
        """Bytes of shared memory that this slot takes: none, if it is a file."""
        return 0 if self.is_file else self.size_bytes

    @property
    def buffer(self) -> memoryview:
        """The whole mapping, writable."""
        return self._bytes

    @property
    def image(self) -> memoryview:
        """The shard's bytes: header and data, then unused capacity (page aligned at both ends)."""
        return self._bytes[self.image_offset : self.image_offset + self.image_capacity]

    def read(self, offset: int, length: int) -> memoryview:
        """Bytes ``[offset, offset + length)`` of the image."""
        return self.image[offset : offset + length]

    def word(self, word: Word) -> int:
        """Read one control word."""
        return int(self._words[word])

    def set_word(self, word: Word, value: int) -> None:
        """Write one control word."""
        self._words[word] = value

    def status(self) -> SlotStatus:
        """Read the control words: END before BEGIN, so that a capture that begins now does not look whole."""
        end, void, begin = self.word(Word.END), self.word(Word.VOID), self.word(Word.BEGIN)
        pin = self.word(Word.PIN) & ~KEEP
        if begin == 0:
            phase = SlotPhase.EMPTY
        elif void:
            phase = SlotPhase.VOID
        else:
            phase = SlotPhase.WHOLE if end == begin else SlotPhase.CAPTURING
        return SlotStatus(
            phase=phase,
            step=begin - 1 if begin else None,
            sequence=self.word(Word.SEQUENCE),
            image_bytes=self.word(Word.IMAGE_BYTES),
            watermark=self.word(Word.WATERMARK),
            pinned_step=pin - 1 if pin else None,
            ready=bool(self.word(Word.READY)),
            held=bool(self.word(Word.HOLD)),
        )

    def take(self) -> bool:
        """Void the content, for a capture to begin; ``False``, and it is as before, if its keeper holds it now.

        The keeper stores ``HOLD``, then looks whether the capture is whole; this looks the other way round. So a
        capture that the keeper saw whole after it held it stays.
        """
        end = self.word(Word.END)
        self.set_word(Word.END, 0)
        if self.word(Word.HOLD):
            self.set_word(Word.END, end)
            return False
        return True

    def begin(self, step: int, *, sequence: int, image_bytes: int, meta: bytes, pin: bool) -> None:
        """Begin a capture; the previous content is lost. ``meta`` is complete before any byte is copied.

        Raises: FormatError, if ``meta`` or the image does not fit (the caller re-plans with larger slots).
        """
        if len(meta) > self.meta_capacity or image_bytes > self.image_capacity:
            raise FormatError(
                f"a capture of {len(meta)} + {image_bytes} bytes does not fit a slot of "
                f"{self.meta_capacity} + {self.image_capacity} bytes"
            )
        words = self._words
        words[Word.END] = 0
        words[Word.META_CHECKSUM] = 0  # until all below is there, no metadata can be read: not that of before either
        words[Word.BEGIN] = step + 1
        words[Word.VOID] = 0
        words[Word.WATERMARK] = 0
        words[Word.REACHED] = 0
        words[Word.SEQUENCE] = sequence
        words[Word.TAKEN] = time.time_ns()
        words[Word.IMAGE_BYTES] = image_bytes
        self._bytes[PAGE : PAGE + len(meta)] = meta
        words[Word.META_BYTES] = len(meta)
        words[Word.META_CHECKSUM] = xxhash.xxh3_64_intdigest(meta)
        words[Word.PIN] = step + 1 if pin else 0

    def is_granted(self, step: int) -> bool:
        """True if the levels are to store this step next."""
        return self.word(Word.GRANT) == step + 1

    def pin(self, step: int, *, until_stored: bool = False) -> None:
        """Keep the capture of ``step``, which is in the slot, from being written over: a level is to read it.

        ``until_stored``: True to keep the pin until the keeper knows the outcome of the step.
        """
        self._words[Word.PIN] = (step + 1) | (KEEP if until_stored else 0)

    @property
    def kept_step(self) -> int | None:
        """The step that it is pinned for ``until_stored``; ``None``: for none."""
        pin = self.word(Word.PIN)
        return (pin & ~KEEP) - 1 if pin & KEEP else None

    def advance(self, watermark: int) -> None:
        """Publish that image bytes below ``watermark`` are copied."""
        self._words[Word.WATERMARK] = watermark

    def commit(self) -> None:
        """Mark the capture as whole; the last store."""
        self._words[Word.WATERMARK] = self._words[Word.IMAGE_BYTES]
        self._words[Word.END] = self._words[Word.BEGIN]

    def discard(self) -> None:
        """Mark the capture as torn: no reader uses it."""
        self._words[Word.VOID] = 1

    def drop(self, sequence: int) -> bool:
        """Discard the capture ``sequence``; ``False``, if it is no longer in the slot or was discarded before."""
        status = self.status()
        if status.sequence != sequence or status.phase not in (SlotPhase.WHOLE, SlotPhase.CAPTURING):
            return False
        self.discard()
        return True

    @property
    def checksums(self) -> Checksums | None:
        """Checksums of the capture in the slot, if this process computed them."""
        known = self._checksums
        return known[1] if known is not None and known[0] == self.word(Word.SEQUENCE) else None

    def set_checksums(self, sequence: int, checksums: Checksums) -> None:
        """The checksums of the capture with that sequence number are known."""
        self._checksums = sequence, checksums

    def unpin(self) -> None:
        """No level reads this slot any more."""
        self._words[Word.PIN] = 0

    def read_meta(self) -> bytes:
        """The metadata of the capture in this slot.

        Raises: FormatError, if its checksum does not agree (a capture is being started).
        """
        meta = bytes(self._bytes[PAGE : PAGE + min(self.word(Word.META_BYTES), self.meta_capacity)])
        if xxhash.xxh3_64_intdigest(meta) != self.word(Word.META_CHECKSUM):
            raise FormatError("the metadata in an arena slot does not agree with its checksum")
        return meta

    def populate(self, *, progress: Callable[[int], None] = lambda count: None) -> None:
        """Fault all pages in, so that no copy pays for it. Blocks; other threads run meanwhile.

        The keeper populates memory for writing (allocates); a trainer populates its own page tables. Files are only
        populated by trainers: the first write to a page takes ten times as long as later ones.
        ``progress``: called after each chunk with its bytes. Raises: OSError(ENOMEM), if the machine has not got the
        memory; what ``progress`` raises.
        """
        for start in range(0, self.size_bytes, _POPULATE_BYTES):
            count = min(_POPULATE_BYTES, self.size_bytes - start)
            try:
                self._populate(start, count)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a kernel before 5.14 faults pages in on first use instead
                    raise
                return
            progress(count)

    def _populate(self, start: int, length: int) -> None:
        """Call madvise. ``mmap.madvise`` would hold the interpreter lock: no thread of the process could run."""
        first = ctypes.c_char.from_buffer(self._buffer, start)  # keeps the memory mapped during the call
        if _libc.madvise(ctypes.addressof(first), length, _MADV_POPULATE_WRITE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Unmap and close. Views that others still hold keep the memory alive."""
        self.before_unmap()
        # A tensor may still use the memory: then the last view ends the mapping.
        with contextlib.suppress(BufferError):
            self._words.release()
            self._bytes.release()
            self._buffer.close()
        os.close(self.fd)
