"""The plan of one iteration of a loader: where it begins, and what it notes so that a restart can begin there again.

Three ways lead to a position in the data:

* *Indices.* Indices of a map-style dataset are passed over in the sampler; no sample is fetched.
* *Own state.* A loader or an iterable dataset that saves its own state is asked for it.
* *Reading again.* Anything else is read from the start, and the batches that were trained are dropped.

A *checkpoint* is a place behind ``at`` batches where an iteration can begin: the state of the loader, of the dataset,
or of the worker processes. From there, batches are read again as far as the position. All of it happens with the
random generators as they were then.
"""

import itertools
import logging
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from lazysnap.data.digests import digest_of
from lazysnap.data.layout import is_first_rank
from lazysnap.data.own_state import is_asked, load_loader, saves_position, state_of_loader
from lazysnap.data.parts import attributes_of, base_of, is_iterable

if TYPE_CHECKING:
    from lazysnap.data.position import Position

logger = logging.getLogger(__name__)

Checkpoint = dict[str, Any]
"""``at``, and ``loader``; or ``dataset`` and ``has_ended``; or ``seed`` and states of the ``workers``."""

_OTHER_ORDER = (
    "the sampler of %s gives this epoch in another order than before the restart: some samples are skipped and others "
    "trained twice. Its order comes from something that no snapshot holds; seed it from torch, NumPy or random, or "
    "from a generator that it keeps in an attribute"
)


class IterationPlan:
    """Where one iteration of a loader begins, and what was noted on its way.

    It has many attributes: what is noted of each batch until the batch is over.
    """

    def __init__(self, position: "Position") -> None:
        # A loader may keep its iterator, and that keeps this; a cycle would keep worker processes.
        self._position = weakref.ref(position)
        self._base = weakref.ref(base_of(position.loader))
        self.streams = position.streams
        self.reads_ahead = hasattr(type(position.loader), "adjust_state_dict_for_prefetch")
        """True for Accelerate's loaders: they fetch one batch before they give the one before it."""
        self.is_asked = is_asked(self.base)
        """True if the loader is asked for its own state."""
        self.notes: dict[str, Any] = {}
        """Random generators as they were when the iteration began, before its first batch and before the last one."""
        self.checkpoints: deque[Checkpoint] = deque(maxlen=2)
        self.read = 0
        """Batches that the iterator of torch has read or passed over."""
        self.passes = 0
        """Batches to pass over by their indices."""
        self.start: Checkpoint = {}
        """The checkpoint at which the iteration begins."""
        self.origin: dict[str, Any] | None = None
        """The position with whose generators it begins; ``None``: with those of the program."""
        self.rereads = False
        """True if batches are read again: the generators of the program are put back behind them."""
        self.streams_before: dict[int, dict[str, Any] | None] = {}
        """Generators to put back before a batch is read, by its number; ``None``: those of the program."""
        self.has_ended = False
        """True if the iterable dataset gave its last sample: its own state is that of the next epoch."""
        self._streams_at_first: dict[str, Any] | None = None
        self._order_noted = False

    @property
    def base(self) -> Any:
        """The loader of torch."""
        return self._base()

    @property
    def workers(self) -> int:
        """Worker processes of the loader."""
        return int(getattr(self.base, "num_workers", 0))

    @property
    def may_draw(self) -> bool:
        """True until it is known that the order of the data may depend on the global generators."""
        position = self._position()
        return position is not None and position.may_draw

    def note_draws(self, what: str) -> None:
        """``what`` drew from them between two batches."""
        position = self._position()
        if position is not None:
            position.note_draws(what)

    # ---------------------------------------------------------------- beginning

    def begin(self, *, stayed: bool = False) -> None:
        """The iterator of torch is made, or begins another epoch with workers that ``stayed``."""
        if self.origin is None:
            self.notes["at_iter"] = self.streams.collect()
            self.notes["stayed"] = stayed
        else:
            self.streams.restore(self.origin["at_iter"])

    def load_own(self) -> None:
        """Give the loader the state of its own with which it begins."""
        load_loader(self.base, self.start["loader"])

    def pass_over(self, iterator: Any) -> None:
        """Before the first index is taken from the sampler: pass over ``passes`` batches."""
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
        indices = iterator._sampler_iter
        taken = 0
        for index in itertools.islice(indices, self.passes):
            self.note_order(index)
            taken += 1
        if taken < self.passes:
            logger.warning("the data ends before batch %d, where it was to continue", self.passes)
        for name in ("_num_yielded", "_sampler_iter_yielded"):
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

    def note_order(self, index: Any) -> None:
        """Note a digest of the epoch's first indices; after a restart compare it with that of before."""
        if self._order_noted or is_iterable(self.base):
            return
        self._order_noted = True
        digest = digest_of(index)
        self.notes["order"] = digest
        digest_before = (self.origin or {}).get("order")
        position = self._position()
        if digest_before in (None, digest) or position is None or position.is_recounted:
            return
        if is_first_rank():
            logger.warning(_OTHER_ORDER, type(self.base.dataset).__name__)

    def before_batch(self) -> None:
        """The indices of the next batch are taken, and it is read then."""
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
            at += 1  # counted are the batches that Accelerate's loader gave: it has fetched one more
        checkpoint = self._checkpoint_here(at)
        if checkpoint is not None:
            self.checkpoints.append(checkpoint)

    def _checkpoint_here(self, at: int) -> Checkpoint | None:
        """Return the state that the loader, or the dataset in this process, saves behind ``at`` batches."""
        if self.is_asked:
            return {"at": at, "loader": state_of_loader(self.base)}
        if not self.workers and is_iterable(self.base) and saves_position(self.base.dataset):
            return {"at": at, "dataset": self.base.dataset.state_dict(), "has_ended": self.has_ended}
        return None

    def checkpoint_behind(self, given: int, *, is_at_end: bool) -> Checkpoint | None:
        """Return the newest checkpoint behind at most ``given`` batches. ``is_at_end``: they are the whole epoch."""
        if given and self.start.get("at") == given:
            return self.start  # nothing was given since
        # Before the first batch a loader's own state may be that of the epoch before, at its end.
        if given and not self.reads_ahead and (self.is_asked or given == self.read):
            checkpoint = self._checkpoint_here(given)
            if checkpoint is not None:
                return checkpoint
        most = given
        if is_at_end and self.reads_ahead:
            most = given - 1  # with no batch left, Accelerate's loaders would not count the epoch
        for checkpoint in reversed(self.checkpoints):
            if checkpoint["at"] <= most:
                return checkpoint
        return None
