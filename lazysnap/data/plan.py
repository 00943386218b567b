"""The plan of one iteration of a loader: where it begins, and what it records for a restart.

There are three ways to reach a position in the data:

* *Indices.* Indices of a map-style dataset are skipped in the sampler; no sample is fetched.
* *Own state.* A loader or an iterable dataset that saves its own state is asked for it.
* *Reading again.* Anything else is read from the start, and the batches that were trained are dropped.

A *checkpoint* is a place after ``at`` batches where an iteration can begin: the state of the loader, of the dataset, or
of the worker processes. From there, batches are read again up to the position, always with the random generators of
that time.
"""

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lazysnap.data.own_state import is_asked, saves_position
from lazysnap.data.parts import attributes_of, base_of, is_iterable

if TYPE_CHECKING:
    from lazysnap.data.position import Position

logger = logging.getLogger(__name__)

Checkpoint = dict[str, Any]
"""``at``, and ``loader``; or ``dataset`` and ``has_ended``; or ``seed`` and states of the ``workers``."""

_COUNTERS = ("_num_yielded", "_sampler_iter_yielded")
"""Counters of batches that iterators keep."""


def _reference_to(base: Any) -> Callable[[], Any]:
    """Return a weak reference, or the object itself for a list, which has no weak references and keeps no iterator."""
    try:
        return weakref.ref(base)
    except TypeError:
        return lambda: base


class IterationPlan:
    """Plan of one iteration: its beginning, and the records of its batches.

    Many attributes are records of single batches.
    """

    def __init__(self, position: "Position") -> None:
        # A loader may reference its iterator, which references this; a cycle would keep worker processes alive.
        self._position = weakref.ref(position)
        self._base = _reference_to(base_of(position.loader))
        self.streams = position.streams
        self.reads_ahead = hasattr(type(position.loader), "adjust_state_dict_for_prefetch")
        """True for Accelerate's loaders: they fetch one batch ahead."""
        self.is_asked = is_asked(self.base)
        """True if the loader's own state is used."""
        self.follows = False
        """True if the iterator of torch follows this plan; otherwise ``Iteration`` records what it can."""
        self.notes: dict[str, Any] = {}
        """Random generators at the beginning of the iteration, before its first batch and before the last one."""
        self.checkpoints: deque[Checkpoint] = deque(maxlen=2)
        self.read = 0
        """Batches that the iterator of torch has read or skipped."""
        self.passes = 0
        """Batches to skip by their indices."""
        self.start: Checkpoint = {}
        """The checkpoint at which the iteration begins."""
        self.origin: dict[str, Any] | None = None
        """The position with whose generators it begins; ``None``: with those of the program."""
        self.rereads = False
        """True if batches are read again: the generators of the program are restored after them."""
        self.streams_before: dict[int, dict[str, Any] | None] = {}
        """Generators to restore before a batch is read, by its number; ``None``: those of the program."""
        self.has_ended = False
        """True if the iterable dataset gave its last sample: its own state is that of the next epoch."""
        self._streams_at_first: dict[str, Any] | None = None

    @property
    def base(self) -> Any:
        """The loader of torch."""
        return self._base()

    @property
    def workers(self) -> int:
        """Worker processes of the loader."""
        return int(getattr(self.base, "num_workers", 0))

    # ---------------------------------------------------------------- beginning

    def begin(self, *, stayed: bool = False) -> None:
        """Record or restore the generators at the beginning; ``stayed``: the workers are those of the last epoch."""
        if self.origin is None:
            self.notes["at_iter"] = self.streams.collect()
            self.notes["stayed"] = stayed
        else:
            self.streams.restore(self.origin["at_iter"])

    def pass_over(self, iterator: Any) -> None:
        """Skip ``passes`` batches, before the first index is taken from the sampler."""
        self._watch()
        streams_here = self.streams.collect()
        self._streams_at_first = streams_here
        if self.origin is None or "at_first" not in self.origin:  # or it was captured before its first batch
            self._note_streams()
        elif not self.workers or self._has_other_workers():
            self.streams.restore(self.origin["at_first"])
        self.read = self.passes or self.start.get("at", 0)
        if self.passes:
            self._pass_over_indices(iterator)
        if self.origin is not None and not self.workers and not self.rereads:
            self.streams.restore(streams_here)

    def _pass_over_indices(self, iterator: Any) -> None:
        num_passed = sum(1 for _ in itertools.islice(iterator._sampler_iter, self.passes))
        if num_passed < self.passes:
            logger.warning("the data ends before batch %d, where it should continue", self.passes)
        for name in _COUNTERS:
            if name in attributes_of(iterator):
                setattr(iterator, name, self.passes)

    def _has_other_workers(self) -> bool:
        position = self._position()
        return position is not None and position.has_other_workers

    def _watch(self) -> None:
        position = self._position()
        if position is not None:
            self.streams.watch([position.loader, self.base])

    # ---------------------------------------------------------------- notes of each batch

    def before_batch(self) -> None:
        """Prepare to read the next batch, whose indices were taken."""
        number = self.read + 1
        if number in self.streams_before:
            streams = self.streams_before.pop(number) or self._streams_at_first
            assert streams is not None
            self._watch()
            self.streams.restore(streams)
        if self.reads_ahead:
            self._note_streams()
            self._note_checkpoint()

    def _note_streams(self) -> None:
        streams = self.streams.collect()
        self.notes["ahead"] = streams
        self.notes.setdefault("at_first", streams)

    def _note_checkpoint(self) -> None:
        if not self.read:
            return
        at = self.read
        if self.is_asked:
            at += 1  # counts the batches that Accelerate's loader gave, which has fetched one more
        checkpoint = self._checkpoint_here(at)
        if checkpoint is not None:
            self.checkpoints.append(checkpoint)

    def _checkpoint_here(self, at: int) -> Checkpoint | None:
        """Return the state that the loader, or the dataset in this process, saves after ``at`` batches."""
        if self.is_asked:
            return {"at": at, "loader": self.base.state_dict()}
        # If the iterator of torch does not follow, the dataset may be prefetched, and nothing begins at its state.
        if self.follows and not self.workers and is_iterable(self.base) and saves_position(self.base.dataset):
            return {"at": at, "dataset": self.base.dataset.state_dict(), "has_ended": self.has_ended}
        return None

    def checkpoint_behind(self, num_given: int, *, is_at_end: bool) -> Checkpoint | None:
        """Return the newest checkpoint at or before batch ``num_given``. ``is_at_end``: these are the whole epoch."""
        if num_given and self.start.get("at") == num_given:
            return self.start  # nothing was given since
        # Before the first batch a loader's own state may be that of the end of the last epoch.
        if num_given and not self.reads_ahead and (self.is_asked or num_given == self.read):
            checkpoint = self._checkpoint_here(num_given)
            if checkpoint is not None:
                return checkpoint
        limit = num_given
        if is_at_end and self.reads_ahead:
            limit = num_given - 1  # with no batch left, Accelerate's loaders would not count the epoch
        for checkpoint in reversed(self.checkpoints):
            if checkpoint["at"] <= limit:
                return checkpoint
        return None
