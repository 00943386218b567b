"""The sources that a keeper serves to others: slots, its node's part of a snapshot, and parity that it holds for
others.

A source keeps its slots: a slot that the loop frees stays mapped until the source is released.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import xxhash

from lazysnap.keeper.node_part import NodePart, find_capture
from lazysnap.keeper.parity import ParityStore
from lazysnap.keeper.slot_table import NodeSlots
from lazysnap.levels.source import MemorySource
from lazysnap.memory.capture_reader import CaptureAborted, CaptureReader
from lazysnap.memory.slot_choice import SlotPhase
from lazysnap.memory.slots import Slot
from lazysnap.peers.messages import NotYet, ParityOf, PartOf, SlotOf, Subject
from lazysnap.peers.reads import OpenedSource

MAX_OPENED = 16
"""Maximum sources that stay open between two reads."""

PresentSlots = Callable[[], NodeSlots]
"""Returns the current slots of the keeper, by local rank and slot id. Called on any thread."""


class KeeperSources:
    """See ``peers.reads.ServedSources``. Opening a source parses metadata, so a few stay open."""

    def __init__(self, slots: PresentSlots, num_ranks: Callable[[int], int], store: ParityStore) -> None:
        """Open nothing yet.

        Args:
            slots: returns the current slots.
            num_ranks: returns the number of ranks of the node in that start; 0 if it is not the current one: then
                the ranks with a capture of it count.
            store: the parity that the keeper holds.
        """
        self._slots = slots
        self._num_ranks = num_ranks
        self._store = store
        self._opened: OrderedDict[Subject, OpenedSource] = OrderedDict()
        """Open sources, the last read one last."""
        self._num_clears = 0
        """Number of calls of ``clear``."""
        self._lock = threading.Lock()

    def open(self, subject: Subject) -> OpenedSource:
        """See ``ServedSources.open``."""
        if isinstance(subject, ParityOf):
            return self._parity(subject)
        with self._lock:
            source = self._opened.get(subject)
            if source is not None:
                self._opened.move_to_end(subject)
                return source
            num_clears = self._num_clears
        source = self._open(subject)
        with self._lock:
            if num_clears == self._num_clears:  # otherwise a slot of it may have been freed
                self._opened[subject] = source
            if len(self._opened) > MAX_OPENED:
                self._opened.popitem(last=False)
        return source

    def forget(self, subject: Subject) -> None:
        """See ``ServedSources.forget``."""
        with self._lock:
            self._opened.pop(subject, None)

    def clear(self) -> None:
        """Release all slots: one of them was freed, and its memory must be returned to the machine."""
        with self._lock:
            self._opened.clear()
            self._num_clears += 1

    def _open(self, subject: PartOf | SlotOf) -> OpenedSource:
        if isinstance(subject, PartOf):
            return self._part(subject)
        return self._slot(subject)

    def _parity(self, subject: ParityOf) -> OpenedSource:
        parity = self._store.find(subject.start, subject.step)
        file = None if parity is None else parity.files.get(subject.stripe)
        if parity is None or file is None:
            raise CaptureAborted(
                f"no parity of stripe {subject.stripe} of step {subject.step} of start {subject.start} is held"
            )

        def check() -> None:
            if self._store.find(subject.start, subject.step) is not parity:
                raise CaptureAborted(f"parity of step {subject.step} was freed")

        return OpenedSource(MemorySource(file, len(file)), parity.identity, check)

    def _part(self, subject: PartOf) -> OpenedSource:
        try:
            start = int(subject.start, 16)
        except ValueError as error:
            raise CaptureAborted(f"{subject} is not in memory any more: {error}") from error
        readers = []
        for slot, sequence in self._captures(start, subject.step):
            readers.append(CaptureReader(slot, sequence, _raise_not_yet))
        part = NodePart(readers, subject.most_lost)
        sequences = [(reader.meta.rank, reader.sequence) for reader in readers]
        return OpenedSource(part, xxhash.xxh3_64_intdigest(repr(sequences).encode()), part.check)

    def _captures(self, start: int, step: int) -> list[tuple[Slot, int]]:
        """Return slot and sequence number of that step, of all ranks. Raises: NotYet; CaptureAborted."""
        slots = self._slots()
        ranks: Sequence[int] = range(self._num_ranks(start))
        if not ranks:
            ranks = [rank for rank in sorted(slots) if _has_capture_of(start, slots[rank].values())]
        captures = []
        for rank in ranks:
            capture = find_capture(slots.get(rank, {}).values(), start, step)
            if capture is None:
                raise NotYet(f"step {step} is not captured by all ranks of this node")
            slot, view = capture
            captures.append((slot, view.sequence))
        if not captures:
            raise CaptureAborted(f"step {step} is not in memory: this keeper has no slots")
        return captures

    def _slot(self, subject: SlotOf) -> OpenedSource:
        for slot in self._slots().get(subject.local_rank, {}).values():
            view = slot.view()
            if view.sequence == subject.sequence and view.phase is SlotPhase.WHOLE:
                return _open_slot(slot, subject)
        raise CaptureAborted(f"capture {subject.sequence} of local rank {subject.local_rank} is not in memory any more")


def _open_slot(slot: Slot, subject: SlotOf) -> OpenedSource:
    """Return the source of a whole capture in this slot."""
    reader = CaptureReader(slot, subject.sequence, _raise_not_yet)
    if subject.part == "image":
        return OpenedSource(reader, slot.slot_id, reader.check)
    meta = slot.read_meta()
    reader.check()
    return OpenedSource(MemorySource(memoryview(meta), len(meta)), slot.slot_id, reader.check)


def _raise_not_yet() -> None:
    raise NotYet("it is not copied yet")


def _has_capture_of(start: int, slots: Iterable[Slot]) -> bool:
    """True if any slot has a capture of that start."""
    return any(slot.view().start == start for slot in slots)
