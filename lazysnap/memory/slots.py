"""A slot: shared memory, or a file where memory does not suffice, that holds one capture of one rank.

It has no name. Processes pass it on as a descriptor, and it is freed when the last process closes it. A slot describes
itself::

    0                       words (memory.words)
    page                    metadata of the capture, JSON
    page + META_CAPACITY    image: the bytes of the shard file; begins at a page

The metadata is complete before the capture can be seen, and the image is the shard file byte for byte.

Three classes share the code, one for each role: ``TrainerSlot`` stores the words of a trainer, ``KeeperSlot`` those of
the keeper, and ``Slot`` stores none. The trainer's stores, in order; it may die between any two::

    BEGIN = 0                                   the slot is empty, the capture before is lost
    SEQUENCE, END = 0, START ... META_SUM       the slot is empty
    BEGIN = step + 1                            the capture is incomplete, and readable up to WATERMARK
    bytes of the image, WATERMARK               the same
    COPIED, WATERMARK = IMAGE_BYTES             the same
    END = BEGIN                                 the capture is whole
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

import xxhash

from lazysnap.errors import FormatError
from lazysnap.memory.slot_choice import SlotPhase, SlotView, is_untouchable
from lazysnap.memory.slot_files import is_allocated, make_file
from lazysnap.memory.words import PAGE_BYTES, SEALS, SlotWord, WordPage, has_fixed_size, word_bytes

_MAGIC = 0x32544F4C53505A4C
_CHUNK_BYTES = 16 << 20
_VIEW_ATTEMPTS = 3
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_libc.pwritev.restype = ctypes.c_ssize_t

AnySlot = TypeVar("AnySlot", bound="Slot")


class Slot(WordPage):
    """A slot that this process reads. Only the words and the metadata stay mapped; see ``read``.

    Example::

        slot = Slot.attach(descriptor)
        if slot.view().phase is SlotPhase.WHOLE:
            header = bytes(slot.read(0, 4096))
    """

    def __init__(self, descriptor: int, head: mmap.mmap) -> None:
        self.descriptor = descriptor
        self._head = head
        self._bytes = memoryview(head)
        super().__init__(self._bytes[:PAGE_BYTES])
        self._meta = self._bytes[PAGE_BYTES:]
        # Loaded once: sizes that were checked must not change under a reader.
        self.slot_id = self.load(SlotWord.SLOT_ID)
        self.meta_capacity_bytes = self.load(SlotWord.META_CAPACITY)
        self.image_capacity_bytes = self.load(SlotWord.IMAGE_CAPACITY)
        self._image_offset = PAGE_BYTES + self.meta_capacity_bytes
        self.is_file = not has_fixed_size(descriptor)

    @classmethod
    def attach(cls: type[AnySlot], descriptor: int) -> AnySlot:
        """Map a slot. Owns ``descriptor`` from then on, and closes it if it cannot be mapped.

        Raises: FormatError, if the descriptor is no slot of this version, or its size could change; OSError.
        """
        try:
            meta_capacity_bytes = _check_slot(descriptor)
            access_mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            protection = mmap.PROT_READ
            if access_mode == os.O_RDWR:
                protection |= mmap.PROT_WRITE
            head = mmap.mmap(descriptor, PAGE_BYTES + meta_capacity_bytes, prot=protection)
            return cls(descriptor, head)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def size_bytes(self) -> int:
        """Return the bytes that the slot takes."""
        return self._image_offset + self.image_capacity_bytes

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of shared memory that the slot takes: none if it is a file."""
        if self.is_file:
            return 0
        return self.size_bytes

    def view(self) -> SlotView:
        """Return a consistent copy of the words.

        A trainer that begins a capture sets BEGIN to 0, then SEQUENCE, then the other words, then BEGIN. So if SEQUENCE
        is the same before and after, and BEGIN was not 0, all words between are of the capture with that number. The
        second load also orders later reads of the caller after the words, such as bytes below the watermark.

        If captures begin faster than the words can be read, the slot is reported as empty.
        """
        for _ in range(_VIEW_ATTEMPTS):
            sequence = self.load(SlotWord.SEQUENCE)
            begin = self.load(SlotWord.BEGIN)
            view = self._read(sequence, begin)
            if self.load(SlotWord.SEQUENCE) == sequence:
                return view
        return self._read(sequence, 0)

    def _read(self, sequence: int, begin: int) -> SlotView:
        step = None
        if begin != 0:
            step = begin - 1
        reached_step = None
        reached = self.load(SlotWord.REACHED)
        if reached != 0:
            reached_step = reached - 1
        is_held = begin != 0 and self.load(SlotWord.HELD) == sequence
        return SlotView(
            slot_id=self.slot_id,
            meta_capacity_bytes=self.meta_capacity_bytes,
            image_capacity_bytes=self.image_capacity_bytes,
            phase=self._phase(sequence, begin),
            step=step,
            start=self.load(SlotWord.START),
            sequence=sequence,
            image_bytes=self.load(SlotWord.IMAGE_BYTES),
            watermark_bytes=self.load(SlotWord.WATERMARK),
            copied_ns=self.load(SlotWord.COPIED),
            reached_step=reached_step,
            is_held=is_held,
            is_repeatable=self.load(SlotWord.REPEATABLE) == 1,
        )

    def _phase(self, sequence: int, begin: int) -> SlotPhase:
        if begin == 0:
            return SlotPhase.EMPTY
        if self.load(SlotWord.END) == begin:
            return SlotPhase.WHOLE
        if self.load(SlotWord.VOID) == sequence:
            return SlotPhase.VOID
        return SlotPhase.CAPTURING

    def read_meta(self) -> bytes:
        """Return the metadata of the capture.

        Raises: FormatError, if its checksum differs: another capture began, or memory is damaged.
        """
        length = self.load(SlotWord.META_BYTES)
        checksum = self.load(SlotWord.META_SUM)
        meta = bytes(self._meta[:length])
        if xxhash.xxh3_64_intdigest(meta) != checksum:
            raise FormatError("the metadata in a slot does not agree with its checksum")
        return meta

    def read(self, offset: int, length: int) -> memoryview:
        """Return bytes ``[offset, offset + length)`` of the image, or fewer where it ends.

        They are mapped while the result is used. A keeper reads the slots of all ranks of a node. If it kept them
        mapped, the kernel would kill it first when memory runs out. The mapping is private: writes into the result stay
        in this process. (torch and ISA-L need writable buffers.)
        """
        stop = min(offset + length, self.image_capacity_bytes)
        if offset >= stop:
            return memoryview(b"")
        first = offset - offset % PAGE_BYTES
        mapping_offset = self._image_offset + first
        mapping = mmap.mmap(self.descriptor, stop - first, flags=mmap.MAP_PRIVATE, offset=mapping_offset)
        return memoryview(mapping)[offset - first :]

    def reading_descriptor(self) -> int:
        """Return a read-only descriptor of the slot. The caller closes it.

        Raises: OSError, without /proc.
        """
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap and close. The memory lives as long as another process, or a result of ``read``, has it."""
        super().close()
        self._meta.release()
        self._bytes.release()
        self._head.close()
        os.close(self.descriptor)


class TrainerSlot(Slot):
    """A slot that this process captures into. The image stays mapped until ``close``.

    One thread begins captures, one other thread may copy and commit them.

    Example::

        slot.begin(start, step=7, sequence=1, image_bytes=len(shard), meta=meta.to_bytes())
        slot.image[: len(shard)] = shard
        slot.commit(copied_ns=1_000_000)
    """

    def __init__(self, descriptor: int, head: mmap.mmap) -> None:
        super().__init__(descriptor, head)
        self._image_mapping = mmap.mmap(descriptor, self.image_capacity_bytes, offset=self._image_offset)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._image_mapping.madvise(mmap.MADV_HUGEPAGE)
        self.image = memoryview(self._image_mapping)
        """The bytes of the shard, then unused capacity."""
        self.before_unmap: Callable[[], object] = _do_nothing
        """Called once before the image is unmapped, to unregister it from a device."""

    def populate(self) -> None:
        """Populate the page tables of this process for the image, so that no copy has to.

        Blocks: seconds for a large slot; other threads run meanwhile. Raises: OSError, if there is no memory for it.
        """
        for offset in range(0, self.image_capacity_bytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, self.image_capacity_bytes - offset)
            first = ctypes.c_char.from_buffer(self._image_mapping, offset)  # keeps the image mapped during the call
            # ``mmap.madvise`` would hold the interpreter lock.
            if _libc.madvise(ctypes.addressof(first), length, _MADV_POPULATE_WRITE) == 0:
                continue
            error_number = ctypes.get_errno()
            if error_number == errno.EINVAL:
                return  # a kernel before 5.14: the first copy faults the pages in
            raise OSError(error_number, os.strerror(error_number))

    def begin(self, start: int, step: int, *, sequence: int, image_bytes: int, meta: bytes) -> None:
        """Begin a capture. The previous contents of the slot are lost.

        Args:
            start: id of this start of the training.
            step: step of the capture.
            sequence: a number greater than that of every earlier capture of this rank, over all starts.
            image_bytes: bytes of the image, which the caller copies into ``image`` after this call.
            meta: metadata of the capture.

        Raises: FormatError, if the capture does not fit. Then the slot is as before.
        """
        if len(meta) > self.meta_capacity_bytes or image_bytes > self.image_capacity_bytes:
            raise FormatError(
                f"a capture of {len(meta)} + {image_bytes} bytes does not fit a slot of "
                f"{self.meta_capacity_bytes} + {self.image_capacity_bytes} bytes"
            )
        # SEQUENCE is stored before all other words of the capture: see ``view``.
        self.store(SlotWord.BEGIN, 0)
        self.store(SlotWord.SEQUENCE, sequence)
        self.store(SlotWord.END, 0)
        self.store(SlotWord.START, start)
        self.store(SlotWord.IMAGE_BYTES, image_bytes)
        self.store(SlotWord.WATERMARK, 0)
        self.store(SlotWord.COPIED, 0)
        self.store(SlotWord.REACHED, 0)
        self.store(SlotWord.REPEATABLE, 0)
        self._meta[: len(meta)] = meta
        self.store(SlotWord.META_BYTES, len(meta))
        self.store(SlotWord.META_SUM, xxhash.xxh3_64_intdigest(meta))
        self.store(SlotWord.BEGIN, step + 1)

    def gather(self, offset: int, length: int, pieces: "array[int]") -> None:
        """Copy pieces of this process's memory into the image, one after the other. Other threads run meanwhile.

        Args:
            offset: offset of the first byte in the image.
            length: bytes of all pieces together.
            pieces: address and length of each, of at most 1,024.

        Raises: OSError, also if an address is not mapped. Then any part of the bytes is copied.
        """
        address, num_words = pieces.buffer_info()
        written = _libc.pwritev(self.descriptor, address, num_words // 2, self._image_offset + offset)
        if written != length:
            error_number = errno.EFAULT
            if written == -1:
                error_number = ctypes.get_errno()
            raise OSError(error_number, f"copied {written} of {length} bytes: {os.strerror(error_number)}")

    def advance(self, watermark_bytes: int) -> None:
        """Publish that the image is copied up to here. Call it after the bytes were written."""
        self.store(SlotWord.WATERMARK, watermark_bytes)

    def commit(self, *, copied_ns: int) -> None:
        """Mark the capture as whole. The last store of a capture."""
        self.store(SlotWord.COPIED, copied_ns)
        self.store(SlotWord.WATERMARK, self.load(SlotWord.IMAGE_BYTES))
        self.store(SlotWord.END, self.load(SlotWord.BEGIN))

    def discard(self, sequence: int) -> bool:
        """Empty the slot, whether the capture is whole or not; ``False`` if it has another capture.

        A whole capture must not be discarded between the choice of a slot and ``begin``: see ``slot_choice``.
        """
        view = self.view()
        if view.sequence != sequence or view.phase is SlotPhase.EMPTY:
            return False
        self.store(SlotWord.BEGIN, 0)
        return True

    def reach(self, step: int) -> None:
        """Publish that training passed the boundary of ``step``."""
        self.store(SlotWord.REACHED, step + 1)

    def allow_repeat(self, *, is_repeatable: bool) -> None:
        """Publish whether a restart may repeat the step of the capture: see ``SlotView.is_repeatable``."""
        self.store(SlotWord.REPEATABLE, int(is_repeatable))

    def close(self) -> None:
        """Unmap and close. Tensors that still use the image keep it mapped."""
        self.before_unmap()
        with contextlib.suppress(BufferError):
            self.image.release()
            self._image_mapping.close()
        super().close()


class KeeperSlot(Slot):
    """A slot whose captures this process holds for readers.

    Holds of an earlier keeper stay until the core releases them.
    """

    def hold(self, sequence: int, rank_slots: Sequence[Slot], kept: int) -> bool:
        """Keep a capture from being overwritten until ``release``. The core reads the result from the words.

        Args:
            sequence: number of the capture.
            rank_slots: all slots of the rank.
            kept: number of newest whole captures that the trainer never overwrites.

        Returns: True if the trainer certainly sees the hold before it can choose the slot. False if that is uncertain,
        or the slot has another capture; then nothing is held.
        """
        self.store(SlotWord.HELD, sequence)
        views = [slot.view() for slot in rank_slots if slot.slot_id != self.slot_id]
        # Last: if the capture is still in the slot then, all other slots were read before the trainer could begin here.
        view = self.view()
        views.append(view)
        if view.sequence == sequence and is_untouchable(view, views, kept):
            return True
        self.release()
        return False

    def release(self) -> None:
        """Let the trainer overwrite the slot again."""
        self.store(SlotWord.HELD, 0)

    def void(self, sequence: int) -> None:
        """Mark an incomplete capture as void: it will never be whole. Call it only after its trainer died."""
        self.store(SlotWord.VOID, sequence)


def slot_bytes(meta_capacity_bytes: int, image_capacity_bytes: int) -> int:
    """Return the bytes that a slot of these capacities takes."""
    return PAGE_BYTES + _round_up(meta_capacity_bytes) + _round_up(image_capacity_bytes)


def make_slot(
    meta_capacity_bytes: int,
    image_capacity_bytes: int,
    directory: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> KeeperSlot:
    """Make an empty slot and allocate all of its memory.

    Blocks: as long as the kernel needs to find the memory. Other threads run meanwhile.

    Args:
        meta_capacity_bytes: bytes for metadata, rounded up to pages.
        image_capacity_bytes: bytes for the image, rounded up to pages.
        directory: the directory for a slot that is a file; ``None``: shared memory.
        progress: called with the number of bytes after each piece of shared memory. Its errors end the call.

    Raises: OSError, if the machine has no memory for it; MemoryBoundExceeded, if no file can be made.
    """
    size_bytes = slot_bytes(meta_capacity_bytes, image_capacity_bytes)
    if directory is not None:
        descriptor = make_file(directory, size_bytes)
    else:
        descriptor = os.memfd_create("lazysnap-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if directory is None:
            _allocate(descriptor, size_bytes, progress)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        # Invariant: the sequence number 0 is of no capture, so a new slot holds none and is held by none.
        capacities = (_round_up(meta_capacity_bytes), _round_up(image_capacity_bytes))
        os.pwrite(descriptor, word_bytes(_MAGIC, secrets.randbits(64), *capacities), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return KeeperSlot.attach(descriptor)


def _do_nothing() -> None:
    return


def _allocate(descriptor: int, size_bytes: int, progress: Callable[[int], None] | None) -> None:
    """Allocate the pages of shared memory without mapping them: mapped ones would count as the keeper's own."""
    for offset in range(0, size_bytes, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size_bytes - offset)
        os.posix_fallocate(descriptor, offset, length)
        if progress is not None:
            progress(length)


def _check_slot(descriptor: int) -> int:
    """Return the bytes for metadata. Raises: FormatError, if this is no slot, or one that could lose pages."""
    size_bytes = os.fstat(descriptor).st_size
    fields = memoryview(os.pread(descriptor, 32, 0).ljust(32, b"\0")).cast("Q")
    magic, _, meta_capacity_bytes, image_capacity_bytes = fields
    is_layout = PAGE_BYTES + meta_capacity_bytes + image_capacity_bytes == size_bytes
    if magic != _MAGIC or not is_layout or meta_capacity_bytes % PAGE_BYTES:
        raise FormatError(
            f"shared memory of {size_bytes} bytes is no slot of this version (magic {magic:#x}, "
            f"capacities {meta_capacity_bytes} + {image_capacity_bytes}); restart the keeper of this job"
        )
    if not _is_memory(descriptor):
        if not is_allocated(descriptor):
            raise FormatError("a file that has a name, or not all of its blocks, is no slot")
    elif not has_fixed_size(descriptor):
        raise FormatError("shared memory whose size another process could change is no slot")
    return meta_capacity_bytes


def _is_memory(descriptor: int) -> bool:
    """True if the descriptor is of shared memory, which can be sealed; files cannot."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
