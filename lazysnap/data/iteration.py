"""One iteration of a data loader: gives the batches of the loader's own iterator, and notes how to get there again.

Where a restart can only read batches again, it does so with the random generators as they were then.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lazysnap.data.digests import digest_of
from lazysnap.data.parts import base_of, is_iterable
from lazysnap.data.reading import Course, follow
from lazysnap.data.share import is_first_rank, length_of
from lazysnap.data.stateful import (
    begin_anew,
    drop_early_iterator,
    is_driven,
    load_loader,
    rest_of,
    saves_position,
    state_of_loader,
)
from lazysnap.data.workers import keep_streams

if TYPE_CHECKING:
    from lazysnap.data.position import Position

logger = logging.getLogger(__name__)

NOT_RECORDED = ("given", "now", "own", "mark", "share", "at_end", "was_left")
"""Fields of a position that are not noted when its iteration begins."""
_SAID_AFTER_S = 1.0
_NO_ORDER = (
    "%s: with in_order=False the order of the batches depends on the speed of the workers: a restart trains some "
    "samples twice, and leaves others out; set in_order=True"
)
_NOT_SEARCHED = (
    "%s: its dataset has so many parts that not all were searched for random generators: those deep inside are in no "
    "snapshot, and what they draw (augmentation) is not resumed exactly; keep the generator in an attribute of the "
    "dataset itself"
)
_READ_AGAIN = (
    "%s saves no position: a restart reads the epoch again and drops the batches that were trained. That is exact only "
    "if it gives the same samples each time (an order that comes from the clock, the process id or a server is not); "
    "state_dict() and load_state_dict() make it exact, and quick"
)
_OTHER_DATA = (
    "%s gave another first batch than before the restart, reading the same epoch again: this training does not resume "
    "exactly. Its order or its samples come from something that no snapshot holds (a generator that is made with the "
    "clock, another number of workers, other files); state_dict() and load_state_dict() of the dataset make it exact"
)
_clock = itertools.count(1)


def tick() -> int:
    """The next number of a clock that counts events: what came later has a greater one."""
    return next(_clock)


class Iteration:
    """One iteration of the loader of ``position``; ``make`` makes the loader's own iterator.

    It has many attributes: what is noted of each batch until the batch is over.
    """

    def __init__(self, position: "Position", make: Callable[[], Iterator[Any]]) -> None:
        self._position = position
        self._make = make
        self._base = base_of(position.loader)
        self._looks_ahead = hasattr(type(position.loader), "adjust_state_dict_for_prefetch")
        # Only one rank reads for all.
        self._can_follow = type(position.loader).__name__ != "DataLoaderDispatcher"
        self._owns: list[tuple[int, Any]] = []
        """Own states of a loader that is read ahead, by the number of batches that it gave."""
        self._loaded: tuple[int, Any] = -1, None
        """The state of its own that was loaded, and the batches behind which it is; -1: none."""
        self._inner: Any = iter(())
        self._course = Course(position, looks_ahead=self._looks_ahead)
        self._has_own = saves_position(self._base) and (
            bool(self._course.workers) or not (self._looks_ahead or is_driven(self._base))
        )
        self._follows = False
        """True if the iterator of torch takes the course; else this one notes what it can."""
        self.began = tick()
        self.given = 0
        self.is_over = False
        self.before: dict[str, Any] | None = None
        """The position before the last batch, where the consumer holds that one."""

    def __iter__(self) -> "Iteration":
        return self

    @property
    def recorded(self) -> dict[str, Any]:
        """The notes since it began."""
        return self._course.recorded

    def place(self, *, is_at_end: bool) -> dict[str, Any]:
        """Return where it stands: the notes, and the loader's ``own`` state or a ``mark`` of its course, if it has one.

        ``is_at_end``: it gave its last batch.
        """
        found: dict[str, Any] = {}
        # Before the first batch a loader's own state may be that of the epoch before, at its end.
        if self._has_own and self.given and not self._looks_ahead:
            at, loaded = self._loaded
            found = {"own": loaded if self.given == at else state_of_loader(self._base)}
        elif self._owns:
            # At its end one batch is left: with none, Accelerate's loaders would not count the epoch.
            most = self.given - is_at_end
            found = next(({"own": own, "own_at": at} for at, own in reversed(self._owns) if at <= most), {})
        elif (mark := self._course.mark_at(self.given, is_at_end=is_at_end)) is not None:
            found = {"mark": mark}
        return {**self.recorded, "given": self.given, **found}

    def __next__(self) -> Any:
        position = self._position
        if position.before_fetch is not None:
            position.before_fetch()
        if position.is_held:
            self.before = position.state_at(self.place(is_at_end=False))
        try:
            batch = self._next()
        except StopIteration:
            self.is_over = True
            position.note_end()
            raise
        self.given += 1
        return batch

    def _next(self) -> Any:
        """The next batch of the loader's own iterator; where that takes no course, what it reads ahead is noted."""
        if not self._follows:
            if not self.given:
                self._course.pass_over(self._inner)
            self._course.read = self.given
            if self._has_own and self._looks_ahead and self.given:
                # Accelerate's loader has asked for as many batches as it gave, and one more.
                self._owns = [*self._owns[-1:], (self.given + 1, state_of_loader(self._base))]
            else:
                self._course.before_batch()
        batch = next(self._inner)
        if not self.given and self._is_only_read_again:
            self._note_first_batch(batch)
        return batch

    @property
    def _is_only_read_again(self) -> bool:
        """True if nothing but reading the data again leads back to a place in them."""
        if self._has_own or self._can_pass():
            return False
        return not saves_position(getattr(self._base, "dataset", None))

    def _note_first_batch(self, batch: Any) -> None:
        """Note a digest of the epoch's first batch; after a restart compare it with that of before."""
        digest = digest_of(batch)
        before = (self._course.origin or {}).get("first_batch")
        is_other = before is not None and before != digest
        if is_other and not self._position.is_recounted and is_first_rank():
            dataset = getattr(self._base, "dataset", self._base)
            logger.warning(_OTHER_DATA, type(dataset).__name__)
        self.recorded["first_batch"] = digest

    # ---------------------------------------------------------------- its beginning

    def begin(self, batches: int = 0) -> None:
        """Begin a new iteration behind ``batches``. May draw random numbers."""
        if self._can_pass():
            self._course.passes = self._without_last(batches)
        self._start()
        self.recorded.update(self._position.counts(), share=self._position.share())
        self._read_again(batches - self._course.passes)
        self.given = batches

    def _without_last(self, batches: int) -> int:
        """Return ``batches``, less the last one of an epoch where Accelerate's loaders must give it to count that."""
        return batches - (self._looks_ahead and batches > 0 and batches == length_of(self._position.loader))

    def land(self, state: dict[str, Any]) -> None:
        """Go on behind ``state["given"]`` batches, with the random generators as they were there."""
        position, course, given = self._position, self._course, int(state["given"])
        if "at_iter" not in state:  # nothing was read
            self.begin()
            return
        course.origin = state
        course.recorded = {name: value for name, value in state.items() if name not in NOT_RECORDED}
        at = self._set_off(state, given)
        if "own" in state:
            self._loaded = at, state["own"]
        course.is_read_again = at < given
        passes = course.passes
        self._start(state.get("own"))
        if passes and not self._follows:  # only the iterator of torch passes over indices
            at, course.read, course.is_read_again = 0, 0, True
        if not course.workers:
            ahead = [state["ahead"]] if self._looks_ahead and "ahead" in state else []
            after = [None] if ahead and self._follows and not course.is_read_again else []
            course.before = dict(enumerate([*ahead, *after], given + self._follows))
        self._read_again(given - at)
        self.given = given
        course.recorded["share"] = position.share()
        position.streams.watch([position.loader, self._base])  # samplers make generators when they are iterated
        position.streams.restore(state["now"])

    def _set_off(self, state: dict[str, Any], given: int) -> int:
        """Choose where the loader begins; return behind how many batches."""
        course = self._course
        if "own" in state:
            course.mark = {"at": int(state.get("own_at", given))}
        else:
            course.mark = dict(state.get("mark") or {})
        at = int(course.mark.get("at", 0))
        if "own" not in state and self._can_pass():
            # Other workers draw other augmentation, whether they read the batches of before again or not.
            needs_no_reading = not course.workers or self._position.has_other_workers
            if needs_no_reading and "collate" not in course.mark:
                at = self._without_last(given)
            course.passes = at
        course.read, course.has_ended = at, course.mark.get("has_ended", False)
        return at

    def _can_pass(self) -> bool:
        """True if the sampler alone can be driven over batches of a map-style dataset."""
        return self._can_follow and isinstance(self._base, DataLoader) and not is_iterable(self._base)

    def _start(self, own: Any = None) -> None:
        """Make the loader's own iterator; ``own``: the state with which the loader goes on."""
        course, position, base = self._course, self._position, self._base
        position.streams.watch([position.loader, base])
        has_ended = course.mark.get("has_ended", False)
        self._follows = self._can_follow and not self._has_own and not has_ended and follow(course)
        if course.workers and not getattr(base, "in_order", True):
            position.warn_once(_NO_ORDER, base)
        if is_iterable(base) and self._is_only_read_again and is_first_rank():
            position.warn_once(_READ_AGAIN, base.dataset)
        if not position.streams.is_complete and is_first_rank():
            position.warn_once(_NOT_SEARCHED, base)
        keep_streams([base] if self._has_own else [])
        if not self._follows:
            course.passes = 0
            if not self._has_own:
                drop_early_iterator(base)
            course.begin()
        if own is not None:
            load_loader(base, own)
        elif self._has_own:
            begin_anew(getattr(base, "dataset", None))
        if has_ended:
            begin_anew(base.dataset, course.mark["dataset"])
            self._inner = iter(())
        else:
            self._inner = self._make() if own is None else rest_of(base, self._make)
            if own is not None and hasattr(self._inner, "has_next"):  # nodes of torchdata read ahead
                is_ahead = self._inner.has_next()
                self._inner._cached_state_dict = None  # else it would be their state from here on
                if is_ahead:
                    course.begin()
                    load_loader(base, own)
                    self._inner = rest_of(base, self._make)

    def _read_again(self, batches: int) -> None:
        """Read ``batches`` and drop them. Blocks; one line says how long, if that is more than seconds."""
        started, is_said = time.monotonic(), False
        first = self.given
        for number in range(batches):
            try:
                self._next()
            except StopIteration:
                logger.warning("the data ends %d batches before the place where it was to go on", batches - number)
                return
            self.given += 1
            seconds = time.monotonic() - started
            if not is_said and seconds > _SAID_AFTER_S and is_first_rank():
                is_said = True
                logger.warning(
                    "%s: %d batches are read again, to go on behind them: about %.0f s (%s)",
                    *(type(self._base).__name__, batches, seconds / (number + 1) * batches, self._why()),
                )
        self.given = first

    def _why(self) -> str:
        dataset = getattr(self._base, "dataset", self._base)
        if is_iterable(self._base):
            return f"{type(dataset).__name__} does not save its position: state_dict() and load_state_dict() would"
        return "its batches cannot be passed over by index"
