"""The slots that a trainer has mapped, and those that it can write at full speed.

::

    keeper ──descriptor──> mapped ──populate, make_ready, in the background──> ready ──remove──> unmapped
                                            └──fails: again after a pause

Slots stay mapped when their keeper dies: the next one gets them.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection

from lazysnap.errors import FormatError
from lazysnap.memory.slots import TrainerSlot

logger = logging.getLogger(__name__)

_JOIN_S = 5.0
_AGAIN_S = 5.0
"""Seconds until populating a slot is retried: other processes may end."""


class MappedSlots:
    """The slots of one trainer. Thread-safe.

    Example::

        slots = MappedSlots(on_ready=changed.set)  # a threading.Event
        slots.map(descriptor)
        slots.want()
    """

    def __init__(self, on_ready: Callable[[], None]) -> None:
        """``on_ready``: called in the background, without a lock, when a slot became ready, or there is a problem."""
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self.all: tuple[TrainerSlot, ...] = ()
        """Every slot, unordered. Replaced as a whole, so any thread may read it without a lock."""
        self.ready: tuple[TrainerSlot, ...] = ()
        """The slots whose pages are in the tables of this process. Replaced as a whole, too."""
        self.newest_sequence = 0
        """The greatest sequence number in a slot when it was mapped."""
        self.make_ready: Callable[[TrainerSlot], None] = _do_nothing
        """Called in the background for a populated slot, before it counts as ready."""
        self._waiting: list[TrainerSlot] = []
        """Slots that are not populated yet."""
        self._mapping_problem = ""
        """The reason why a slot of this connection cannot be mapped."""
        self._populating_problem = ""
        """The reason why the last slot could not be populated; empty if no slot waits."""
        self._is_wanted = False
        self._populating: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def problem(self) -> str:
        """Return the reason why a slot of the keeper is unusable now; empty if there is none. Hot."""
        return self._mapping_problem or self._populating_problem

    def begin_connection(self) -> None:
        """Record that a keeper will send all of its slots: mapping may succeed now."""
        self._mapping_problem = ""

    def map(self, descriptor: int, returned: Collection[int] = ()) -> None:
        """Map a slot, unless it is mapped already. A slot that cannot be mapped is a ``problem``.

        Args:
            descriptor: descriptor of the slot, which belongs to this object from now on.
            returned: ids of slots that are not wanted any more.
        """
        try:
            slot = TrainerSlot.attach(descriptor)
        except (FormatError, OSError) as error:
            self._mapping_problem = f"a slot of the keeper cannot be mapped: {error}"
            return
        with self._lock:
            mapped_ids = {mapped.slot_id for mapped in self.all}
            is_new = slot.slot_id not in mapped_ids and slot.slot_id not in returned
            if is_new:
                self.newest_sequence = max(self.newest_sequence, slot.view().sequence)
                self.all = (*self.all, slot)
                self._waiting.append(slot)
                self._begin_populating()
        if not is_new:
            slot.close()

    def want(self) -> None:
        """Populate slots in the background from now on, because captures will come.

        Not earlier: during a restart it takes a processor and the lock of the address space. A restore of 1.2 GB took
        twice as long.
        """
        with self._lock:
            self._is_wanted = True
            self._begin_populating()

    def remove(self, slot: TrainerSlot) -> bool:
        """Remove a slot. It is unmapped when nobody uses it any more. Returns: False if it is not mapped."""
        with self._lock:
            if slot not in self.all:
                return False
            self.all = _without(self.all, slot)
            self.ready = _without(self.ready, slot)
            self._waiting = [waiting for waiting in self._waiting if waiting is not slot]
        # Not ``close``, because another thread may still read its words.
        weakref.finalize(slot, os.close, slot.descriptor).atexit = False
        return True

    def close(self) -> None:
        """Unmap all slots, which must be unused. Blocks: at most some seconds, while one is being populated."""
        with self._lock:
            slots = self.all
            self.all = ()
            self.ready = ()
            self._waiting = []
            populating = self._populating
        self._closed.set()
        if populating is not None:
            populating.join(_JOIN_S)
        for slot in slots:
            slot.close()

    def _begin_populating(self) -> None:
        """Begin the background work, if any. The caller has the lock."""
        if not self._is_wanted or not self._waiting or self._populating is not None:
            return
        thread = threading.Thread(target=self._populate_all, name="lazysnap-populate", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started; the next request retries
            self._populating_problem = f"slots cannot be made ready: {error}"
            return
        self._populating = thread

    def _populate_all(self) -> None:
        """Make slots ready, one after the other, until none is waiting."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._populating = None
                    self._populating_problem = ""
                    return
                slot = self._waiting.pop(0)
            problem = self._populate(slot)
            with self._lock:
                if slot not in self.all:  # it was removed meanwhile
                    problem = ""
                elif problem:
                    self._waiting.append(slot)
                else:
                    self.ready = (*self.ready, slot)
                self._populating_problem = problem
            del slot  # it may have been removed, and must not stay mapped
            self._on_ready()
            if problem:
                self._closed.wait(_AGAIN_S)

    def _populate(self, slot: TrainerSlot) -> str:
        """Populate a slot. Returns: the reason if that is impossible now; empty on success."""
        try:
            slot.populate()
        except (OSError, ValueError) as error:  # no memory for page tables, or closed meanwhile
            return f"a slot cannot be mapped in full: {error}; free memory, or use a larger machine"
        try:
            self.make_ready(slot)
        except Exception as error:  # noqa: BLE001  the last handler of the thread: a capture tries once more
            logger.warning("a slot could not be made ready: %s: %s", type(error).__name__, error)
        return ""


def _without(slots: tuple[TrainerSlot, ...], removed: TrainerSlot) -> tuple[TrainerSlot, ...]:
    return tuple(slot for slot in slots if slot is not removed)


def _do_nothing(slot: TrainerSlot) -> None:
    """The default of ``make_ready``."""
