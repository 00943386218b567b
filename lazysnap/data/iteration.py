"""One iteration of a data loader: begins at a position, yields batches, and records how to reach its position again."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lazysnap.data.iterators import follow
from lazysnap.data.layout import is_first_rank, length_of
from lazysnap.data.own_state import (
    drop_early_iterator,
    has_early_iterator,
    is_stateful,
    keeps_loaded_state,
    rest_of,
    saves_position,
)
from lazysnap.data.parts import base_of, is_iterable
from lazysnap.data.plan import IterationPlan
from lazysnap.data.streams import NOT_SEARCHED

if TYPE_CHECKING:
    from lazysnap.data.position import Position

logger = logging.getLogger(__name__)

_NOT_NOTED = ("given", "now", "checkpoint", "layout", "at_end", "was_left")
"""Fields of a position that change during its iteration."""
_LONG_S = 1.0
_NO_ORDER = (
    "%s: with in_order=False the order of the batches depends on the speed of the workers: a restart trains some "
    "samples twice, and leaves others out; set in_order=True"
)
_STATEFUL_COLLATE = (
    "%s: its collate_fn keeps a state from batch to batch, which is in no snapshot: batches after a restart differ; "
    "keep samples in the dataset instead, whose state_dict() is saved"
)
_READ_AGAIN = (
    "%s saves no position: a restart reads the epoch again and drops the batches that were trained. That is exact only "
    "if it gives the same samples each time. An order from the clock, the process id or a server is not, nor is one "
    "that it draws from the global random generators as it goes: let it draw from a generator of its own, or in "
    "workers. state_dict() and load_state_dict() make it exact, and quick"
)
_NOT_BEGUN_THERE = (
    "%s saves its position, but its loader cannot begin there (dispatch_batches=True, which Accelerate sets for "
    "iterable datasets, or an iterator of its own): a restart reads the epoch again and drops the batches that were "
    "trained. That is exact only if it gives the same samples each time. In a training of one process "
    "dispatch_batches=False lets the loader begin there"
)
_clock = itertools.count(1)


def tick() -> int:
    """Return the next number of a clock that counts events: a later event has a greater number."""
    return next(_clock)


class Iteration:
    """One iteration of the loader of ``position``; ``make`` makes the loader's own iterator."""

    def __init__(self, position: "Position", make: Callable[[], Iterator[Any]]) -> None:
        self._position = position
        self._make = make
        self._base = base_of(position.loader)
        self._plan = IterationPlan(position)
        # In Accelerate's dispatching loader one rank reads for all.
        self._can_follow = type(position.loader).__name__ != "DataLoaderDispatcher"
        self._can_pass = self._can_follow and isinstance(self._base, DataLoader) and not is_iterable(self._base)
        """True if indices of a map-style dataset can be skipped in the sampler."""
        self._inner: Any = iter(())
        self.began = tick()
        self.given = 0
        self.is_over = False
        self.before: dict[str, Any] | None = None
        """The position before the last batch, if the consumer still holds that batch."""

    def __iter__(self) -> "Iteration":
        return self

    @property
    def notes(self) -> dict[str, Any]:
        """Records since the iteration began."""
        return self._plan.notes

    def record(self, *, is_at_end: bool) -> dict[str, Any]:
        """Return the records, the number of batches, and the newest checkpoint.

        ``is_at_end``: the last batch was given.
        """
        record = {**self.notes, "given": self.given}
        checkpoint = self._plan.checkpoint_behind(self.given, is_at_end=is_at_end)
        if checkpoint is not None:
            record["checkpoint"] = checkpoint
        return record

    # ---------------------------------------------------------------- batches

    def __next__(self) -> Any:
        position = self._position
        if position.before_fetch is not None:
            position.before_fetch()
        if position.is_held:
            self.before = position.state_with(self.record(is_at_end=False))
        try:
            batch = self._next()
        except StopIteration:
            self.is_over = True
            position.note_end()
            raise
        self.given += 1
        return batch

    def _next(self) -> Any:
        """Return the next batch of the loader's own iterator."""
        plan = self._plan
        if not plan.follows:
            if not self.given:
                plan.pass_over(self._inner)
            plan.read = self.given
            plan.before_batch()
        return next(self._inner)

    @property
    def _only_rereads(self) -> bool:
        """True if a position can only be reached by reading the data again."""
        if self._plan.is_asked or self._can_pass:
            return False
        return not (self._plan.follows and saves_position(getattr(self._base, "dataset", None)))

    # ---------------------------------------------------------------- its beginning

    def begin(self, batches: int = 0) -> None:
        """Begin a new iteration after ``batches``. May draw random numbers."""
        plan = self._plan
        if self._can_pass:
            plan.passes = self._without_last(batches)
        self._start()
        self.notes.update(self._position.counts())
        self.notes["layout"] = self._position.layout()
        self._read_again(batches - plan.passes)
        self.given = batches

    def resume(self, state: dict[str, Any]) -> None:
        """Continue after ``state["given"]`` batches, with the random generators of that position."""
        if "at_iter" not in state:  # nothing was read
            self.begin()
            return
        position = self._position
        plan = self._plan
        num_given = int(state["given"])
        plan.origin = state
        plan.notes.update({name: value for name, value in state.items() if name not in _NOT_NOTED})
        plan.start = dict(state.get("checkpoint") or {})
        at = self._choose_start(num_given)
        plan.read = at
        plan.has_ended = plan.start.get("has_ended", False)
        plan.rereads = at < num_given
        self._start()
        begins_there = plan.follows or plan.has_ended or "loader" in plan.start
        if not begins_there:  # only the iterator of torch skips indices, or begins at the state of its dataset
            at = 0
            plan.read = 0
            plan.rereads = num_given > 0
        if plan.reads_ahead and not plan.workers and "ahead" in state:
            if plan.follows:
                plan.streams_before[num_given + 1] = state["ahead"]
                if not plan.rereads:
                    plan.streams_before[num_given + 2] = None
            else:
                plan.streams_before[num_given] = state["ahead"]
        self._read_again(num_given - at)
        self.given = num_given
        self.notes["layout"] = position.layout()
        position.streams.watch([position.loader, self._base])  # samplers make generators when they are iterated
        position.streams.restore(state["now"])

    def _choose_start(self, num_given: int) -> int:
        """Choose where the loader begins. Returns: the number of batches before that."""
        plan = self._plan
        at = int(plan.start.get("at", 0))
        if "loader" in plan.start or not self._can_pass:
            return at
        # Other workers draw other augmentation, even if they read the earlier batches again.
        if not plan.workers or self._position.has_other_workers:
            at = self._without_last(num_given)
        plan.passes = at
        return at

    def _without_last(self, batches: int) -> int:
        """Return ``batches``, without the last one of an epoch if Accelerate's loaders must yield it to count the
        epoch.
        """
        is_whole_epoch = batches > 0 and batches == length_of(self._position.loader)
        if self._plan.reads_ahead and is_whole_epoch:
            return batches - 1
        return batches

    def _start(self) -> None:
        """Make the loader's own iterator."""
        plan = self._plan
        position = self._position
        base = self._base
        position.streams.watch([position.loader, base])
        has_ended = plan.start.get("has_ended", False)
        plan.follows = self._can_follow and not plan.is_asked and not has_ended and follow(plan)
        self._warn_of_inexact()
        if not plan.follows:
            plan.passes = 0
            if not plan.is_asked:
                self._choose_iterator()
            plan.begin()
        if has_ended:
            if not keeps_loaded_state(base.dataset):
                base.dataset.load_state_dict(plan.start["dataset"])
        elif "loader" in plan.start:
            base.load_state_dict(plan.start["loader"])
            self._inner = rest_of(base, self._make)
            self._begin_nodes()
        else:
            self._inner = self._make()

    def _choose_iterator(self) -> None:
        """Begin the epoch as before the restart: with an early iterator, or with a new one."""
        plan = self._plan
        base = self._base
        if plan.origin is not None:
            drop_early_iterator(base)
            if plan.origin.get("is_early"):
                base.state_dict()  # makes it, and draws its seed: the generators are restored later
        elif has_early_iterator(base):
            plan.notes["is_early"] = True

    def _begin_nodes(self) -> None:
        """Let nodes of torchdata, which prefetch, draw their order with the generators of the beginning."""
        if not hasattr(self._inner, "has_next"):
            return
        has_next = self._inner.has_next()
        self._inner._cached_state_dict = None  # otherwise it would be their later state
        if has_next:
            self._plan.begin()
            self._base.load_state_dict(self._plan.start["loader"])
            self._inner = rest_of(self._base, self._make)

    def _warn_of_inexact(self) -> None:
        """Warn once about what this loader does not resume exactly."""
        base = self._base
        position = self._position
        if not is_first_rank():
            return
        if self._plan.workers and not getattr(base, "in_order", True):
            position.warn_once(_NO_ORDER, base)
        if is_iterable(base) and self._only_rereads:
            text = _READ_AGAIN
            if saves_position(base.dataset):
                text = _NOT_BEGUN_THERE
            position.warn_once(text, base.dataset)
        if is_stateful(getattr(base, "collate_fn", None)):
            position.warn_once(_STATEFUL_COLLATE, base)
        if not position.streams.is_complete:
            position.warn_once(NOT_SEARCHED, base)

    def _read_again(self, batches: int) -> None:
        """Read ``batches`` and drop them. Blocks; one line reports the duration, if it is more than some seconds."""
        started_s = time.monotonic()
        is_reported = False
        first = self.given
        for number in range(1, batches + 1):
            try:
                self._next()
            except StopIteration:
                missing = batches - number + 1
                logger.warning("the data ends %d batches before the position where it should continue", missing)
                return
            self.given += 1
            elapsed_s = time.monotonic() - started_s
            if not is_reported and elapsed_s > _LONG_S and is_first_rank():
                is_reported = True
                logger.warning(
                    "%s: %d batches are read again, to continue after them: about %.0f s (%s)",
                    type(self._base).__name__,
                    batches,
                    elapsed_s / number * batches,
                    self._reason_of_reading(),
                )
        self.given = first

    def _reason_of_reading(self) -> str:
        if is_iterable(self._base):
            name = type(self._base.dataset).__name__
            if saves_position(self._base.dataset):
                return f"its loader cannot begin at the position that {name} saves"
            return f"{name} does not save its position: state_dict() and load_state_dict() would"
        return "its batches cannot be skipped by index"
