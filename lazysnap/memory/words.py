"""The words that trainers and their keeper share: one page in each slot, and one page for the node.

A word has 8 bytes and exactly one writer. Any process may load any word, so no requests are needed.

==================  ========  =========================================================================================
word of a slot      writer    meaning
==================  ========  =========================================================================================
``MAGIC``           creator   layout and version
``SLOT_ID``         creator   random number that names the slot in messages
``META_CAPACITY``   creator   bytes for metadata
``IMAGE_CAPACITY``  creator   bytes for the image
``END``             trainer   equal to ``BEGIN`` once the capture is whole
``BEGIN``           trainer   step + 1 of the capture in the slot; 0: the slot is empty
``SEQUENCE``        trainer   number of the capture, from 1, over all starts of the job; orders the slots by age
``START``           trainer   id of the start that made the capture, 64 bits
``META_BYTES``      trainer   bytes of the metadata
``META_SUM``        trainer   checksum of the metadata
``IMAGE_BYTES``     trainer   bytes of the image
``WATERMARK``       trainer   image bytes [0, ``WATERMARK``) are copied
``COPIED``          trainer   nanoseconds that the copy took; for people
``REACHED``         trainer   step + 1 of the last step boundary, in the slot of the newest capture; for people
``HELD``            keeper    ``SEQUENCE`` of the capture that is being read; 0: none
``VOID``            keeper    ``SEQUENCE`` of a capture that will never be whole, since its trainer died
``REPEATABLE``      trainer   1: a restart may train the step of the capture again, to prove itself
==================  ========  =========================================================================================

The node page has one word, ``AWAITED``, written by the keeper: see ``NodePage``.

``HELD`` and ``VOID`` name a capture by its sequence number, not by its step: after a rollback or a restart the same
step may be captured again in the same slot, and a hold or a void must never apply to the later capture.
"""

import contextlib
import enum
import fcntl
import mmap
import os
import struct
import threading
import weakref

from lazysnap import faults
from lazysnap.errors import FormatError

PAGE_BYTES = mmap.PAGESIZE
"""Bytes of a page of words. Mappings begin at a multiple of it."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of shared memory: a mapping must not lose its pages because another process changes the size."""

_NODE_MAGIC = 0x3145444F4E4E5341


def fence() -> None:
    """Order memory on every processor: earlier accesses of this thread stay before its later ones.

    Trainer and keeper share memory without a common lock. x86-64 keeps stores in order, ARM64 does not: a reader could
    see a watermark before the bytes below it. Python has no fence, but releasing a lock and acquiring it again is one.
    No earlier access moves after the release, no later one moves before the acquire, and the acquire stays behind the
    release:

    * ARM64: ``po; [L]``, ``[A]; po`` and ``[L]; po; [A]`` are all in *bob*, "barrier-ordered-before", of Arm's own
    model (herdtools7, ``herd/libdir/aarch64hwreqs.cat``). An acquire followed by a release would not do: accesses from
    both sides may move between the two and pass each other there.
    * x86-64: either is a ``LOCK CMPXCHG``, which alone is a full fence.
    * CPython up to 3.12: ``threading.Lock`` is a semaphore (``Python/thread_pthread.h``). glibc releases and acquires
    it by compare-and-exchange (``nptl/sem_post.c``, ``nptl/sem_waitcommon.c``). From 3.13 on it is a ``PyMutex``
    (``Python/lock.c``), whose compare-and-exchange is sequentially consistent.

    A system call would not do either: it need not contain a barrier. The lock is a new one each time, so no thread ever
    waits for another, also after a fork.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class SlotWord(enum.IntEnum):
    """Index of each word in the page of a slot. The docstring of the module names their writers."""

    MAGIC = 0
    SLOT_ID = 1
    META_CAPACITY = 2
    IMAGE_CAPACITY = 3
    END = 4
    BEGIN = 5
    SEQUENCE = 6
    START = 7
    META_BYTES = 8
    META_SUM = 9
    IMAGE_BYTES = 10
    WATERMARK = 11
    COPIED = 12
    REACHED = 13
    HELD = 14
    VOID = 15
    REPEATABLE = 16


class WordPage:
    """One mapped page of words. Each access takes place after everything that this thread accessed before it."""

    def __init__(self, page: memoryview) -> None:
        # An aligned item of this format is copied as 8 bytes at once, so no reader sees half a word.
        self._cells = page.cast("Q")

    def load(self, word: int) -> int:
        """Return the value of a word."""
        fence()
        return self._cells[word]

    def store(self, word: int, value: int) -> None:
        """Set a word. Only its writer may do so."""
        fence()
        faults.point("memory.store")
        self._cells[word] = value

    def close(self) -> None:
        """Release the page, so that it can be unmapped."""
        self._cells.release()


AWAITED = 1
"""Index of the word AWAITED in the page of a node. The word before it is the magic number."""
_AWAITED_NONE = (1 << 64) - 1


class NodePage(WordPage):
    """The page of a node, whose word AWAITED names the captures for which the keeper must be woken, and its eventfd.

    AWAITED is step + 1 of the first step that any level waits for, or the greatest number if none is awaited; in a new
    page every capture is awaited. Later captures wake the keeper, too. A trainer that begins a capture stores its words
    first and loads AWAITED then; the keeper stores AWAITED first and reads the slots then. So at least one of the two
    sees the store of the other, and no awaited capture is missed.

    Example::

        page = NodePage.create()
        page.set_awaited_step(7)
        trainer_page = NodePage.attach(*map(os.dup, page.descriptors))
        trainer_page.wake(7)  # writes to the eventfd
    """

    def __init__(self, descriptor: int, mapping: mmap.mmap, event_descriptor: int) -> None:
        super().__init__(memoryview(mapping))
        self.descriptor = descriptor
        self.event_descriptor = event_descriptor
        # Not only by ``close``: another thread of a trainer may still use the page of a keeper that is gone.
        self._finalizer = weakref.finalize(self, _close, self._cells, mapping, (descriptor, event_descriptor))
        self._finalizer.atexit = False

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors that a keeper sends to each trainer."""
        return self.descriptor, self.event_descriptor

    @classmethod
    def create(cls) -> "NodePage":
        """Make a page that awaits every capture. Raises: OSError."""
        event_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        descriptor = os.memfd_create("lazysnap-node", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            os.pwrite(descriptor, word_bytes(_NODE_MAGIC), 0)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(descriptor)
            os.close(event_descriptor)
            raise
        return cls.attach(descriptor, event_descriptor)

    @classmethod
    def attach(cls, descriptor: int, event_descriptor: int) -> "NodePage":
        """Map a page. It owns both descriptors from then on, which are closed if it cannot be mapped.

        Raises: FormatError, if the descriptor is no node page of this version, or its size could change; OSError.
        """
        try:
            is_page = has_fixed_size(descriptor) and os.fstat(descriptor).st_size == PAGE_BYTES
            if not is_page or os.pread(descriptor, 8, 0) != word_bytes(_NODE_MAGIC):
                raise FormatError("shared memory is no node page of this version; restart the keeper of this job")
            return cls(descriptor, mmap.mmap(descriptor, PAGE_BYTES), event_descriptor)
        except BaseException:
            os.close(descriptor)
            os.close(event_descriptor)
            raise

    # The keeper

    def set_awaited_step(self, step: int | None) -> None:
        """Have trainers wake the keeper for the capture of ``step``, and later ones. None: for no capture."""
        word = _AWAITED_NONE
        if step is not None:
            word = step + 1
        self.store(AWAITED, word)

    # The trainers

    def is_awaited(self, step: int) -> bool:
        """True if the keeper is to be woken for the capture of ``step``, whose words were stored before this call."""
        return step + 1 >= self.load(AWAITED)

    def wake(self, step: int) -> None:
        """Wake the keeper if it awaits the capture of ``step``: see ``is_awaited``. Hot."""
        if self.is_awaited(step):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self.event_descriptor, 1)

    def close(self) -> None:
        """Unmap and close. The page lives as long as another process has it."""
        self._finalizer()


def _close(cells: memoryview, mapping: mmap.mmap, descriptors: tuple[int, int]) -> None:
    cells.release()
    mapping.close()
    for descriptor in descriptors:
        os.close(descriptor)


def has_fixed_size(descriptor: int) -> bool:
    """True if this is shared memory whose size no process can change."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # a file
        return False
    return seals & SEALS == SEALS


def word_bytes(*values: int) -> bytes:
    """Return words in the byte order of memory."""
    return struct.pack(f"{len(values)}Q", *values)
