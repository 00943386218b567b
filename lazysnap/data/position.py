"""The position of a data loader in its epoch, and how a restart reaches it again.

``ResumableLoader`` and the integrations iterate a loader by its position (``Iteration``). A restart begins where the
loader's or the dataset's own state says, or behind the indices that were trained; else it reads batches again, with
the random generators as they were then. Then all generators are put back as they were when the snapshot was taken:
order, augmentation and everything that training draws go on exactly.

With another number of ranks the loader goes on in the same epoch behind the samples that were trained, with other
random numbers: see ``lazysnap.data.share``. What is exact, and what is not, stands in ``docs/data.md``.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from lazysnap.data.digests import SubsetDigest
from lazysnap.data.iteration import Iteration, tick
from lazysnap.data.parts import base_of, counts_of, held, is_iterable, parts_of, set_counts
from lazysnap.data.share import Share, changes_in, has_other_workers, is_first_rank, length_of, passed_in, share_of
from lazysnap.data.streams import RandomStreams
from lazysnap.errors import ConfigError

__all__ = ["Position", "make_resumable", "position_in", "tick"]

logger = logging.getLogger(__name__)


class Position:
    """The position of one loader.

    ``state_dict`` and ``load_state_dict`` make it part of a snapshot; ``iterate`` is the loader's iteration. Not
    thread-safe. It is large because a loader, its samplers, its workers and the iterations of it have one position.
    """

    is_data_position = True

    def __init__(self, loader: Any, *, is_owned: bool = False) -> None:
        """``is_owned``: the loader holds this position, so it is referred to weakly."""
        self._refer: Callable[[], Any] = weakref.ref(loader) if is_owned else lambda: loader
        self.streams = RandomStreams()
        self._subset_digest = SubsetDigest()
        """The global random generators, and those that the loader owns."""
        self._running: weakref.ref[Iteration] | None = None
        self._stepped: dict[str, Any] | None = None
        """Place of the iteration at the last optimizer step, until it ends or another one begins."""
        self._pending: dict[str, Any] | None = None
        self.skipped = 0
        """Batches that the next iteration begins behind, where it does not go on in the middle of a recorded one."""
        self.may_draw = True
        """True until it is known that its order may depend on draws from the global generators."""
        self._warned: set[str] = set()
        """Texts that were logged: once is enough."""
        self.is_recounted = False
        """True if the position that was loaded counts other batches than it did when it was recorded."""
        self.has_other_workers = False
        """True if the position that was loaded is in an epoch that another number of worker processes read."""
        self.before_fetch: Callable[[], None] | None = None
        """Called before every batch is fetched: then nothing of the next step has begun."""
        self.is_held = False
        """True if the consumer holds one batch that was not trained: the position is then the one before that batch."""
        self._at_boundary: dict[str, Any] | None = None
        """The position at the last boundary that captured nothing, if that was within a loop."""
        self._has_ended = False
        """True if the training is over: a loop that was left goes on at its last boundary."""
        self.at_end: Callable[[], None] | None = None
        """Called when an iteration gave its last batch, before the loop over it ends."""
        self.counted_epochs: Callable[[], dict[str, int]] | None = None
        """Returns the program's own counters of epochs, by name."""

    @property
    def loader(self) -> Any:
        """The loader; ``None``, if it does not exist any more."""
        return self._refer()

    @property
    def _loaders(self) -> list[Any]:
        """The loader, and the loader of torch inside it."""
        return [self.loader, base_of(self.loader)]

    # ---------------------------------------------------------------- state

    @property
    def given(self) -> int | None:
        """Batches that the running iteration has given, or is about to go on behind; ``None`` between two."""
        if self._pending is not None:
            return int(self._pending["given"])
        running = self._iteration()
        return None if running is None else running.given

    @property
    def is_iterated(self) -> bool:
        """True if an iterator over the loader exists that has not given its last batch."""
        return self._iteration() is not None

    @property
    def began(self) -> int | None:
        """When the running iteration began, by ``tick``; ``None`` between two."""
        running = self._iteration()
        return None if running is None else running.began

    def state_dict(self) -> dict[str, Any]:
        """Return the current position as plain values: some tens of KB."""
        if self._pending is not None:
            return dict(self._pending)
        if self._has_ended and self._at_boundary is not None:
            return dict(self._at_boundary)
        running = self._iteration()
        if running is not None and running.before is not None:
            return dict(running.before)
        if running is not None:
            return self.state_at(running.place(is_at_end=self._is_at_end(running.given)))
        stepped = self._stepped
        if stepped is None or _raised(stepped["epochs"], self.epochs()):
            return self.state_at(None)
        return {**self.state_at(stepped), "was_left": True}  # by a break, and the program may go on in this epoch

    def state_at(self, place: dict[str, Any] | None) -> dict[str, Any]:
        """Return the position at a place of ``Iteration``, or between two iterations (``None``), with the present state
        of the generators.
        """
        if place is None or place["given"] < 2:  # samplers make generators when they are iterated, none later
            self.streams.watch(self._loaders)
        state = {"given": None, "now": self.streams.collect(), **self.counts(), "share": self.share()}
        if place is None:
            return {**state, "skip": self.skipped}
        return {**state, **place, "at_end": self._is_at_end(place["given"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at ``state``."""
        set_counts(self._loaders, state)
        if self._iteration() is not None and is_first_rank():
            logger.warning(
                "%s: its position is restored inside a loop over it, which goes on as it was: restore before the loop, "
                "so that the loop begins where the snapshot stands",
                type(self._loaders[-1]).__name__,
            )
        self._running = self._stepped = self._at_boundary = None
        self.streams.watch(self._loaders)
        share = self.share()
        passed = passed_in(state, share)
        changes = changes_in(state, share, passed)
        self.has_other_workers = has_other_workers(state, share) and state["share"]["ranks"] == share["ranks"]
        if self.has_other_workers:
            changes.append(self._other_workers(state["share"]["workers"], share["workers"]))
            # The states of the workers before fit no others, and others give another first batch.
            of_workers = ("own", "own_at", "mark", "first_batch")
            state = {name: value for name, value in state.items() if name not in of_workers}
        self._say(changes)
        self.is_recounted = passed is not None
        if passed is not None and state["share"]["ranks"] != share["ranks"]:
            self._pending, self.skipped = None, passed
            return
        self._pending = self._recounted(state, share, passed) if state["given"] is not None else None
        if state["given"] is not None:
            self.skipped = 0
        elif passed is None:
            self.skipped = state["skip"]
        else:
            self.skipped = passed
        self.streams.restore_owned(state["now"])

    @staticmethod
    def _recounted(state: dict[str, Any], share: Share, passed: int | None) -> dict[str, Any]:
        """Return ``state`` with the batches that now hold the samples which were trained."""
        if passed is None:
            return dict(state)
        kept = {name: value for name, value in state.items() if name not in ("own", "own_at", "mark")}
        recounted = {**kept, "given": passed, "share": share}
        # The first batch that is fetched draws the order of the epoch: also where it comes next, or is looked at ahead.
        if passed < 2 and "at_first" in state:
            recounted["now" if passed == 0 else "ahead"] = state["at_first"]
        return recounted

    def given_in(self, state: dict[str, Any]) -> int | None:
        """Return the batches of this loader behind which ``state`` stands; ``None``, if it is between two epochs."""
        passed = passed_in(state, self.share()) if state["given"] is not None else None
        return state["given"] if passed is None else passed

    def _say(self, changes: list[str]) -> None:
        if changes and is_first_rank():
            logger.warning("%s: %s", type(self._loaders[-1]).__name__, "; ".join(changes))

    def _other_workers(self, before: int | None, now: int | None) -> str:
        text = f"num_workers is {now}, in the snapshot {before}: "
        if is_iterable(base_of(self.loader)):
            return text + (
                "workers divide the data of an iterable dataset among them, so this epoch is read again with other "
                "shares: some samples are trained twice, others not at all; change num_workers between two epochs"
            )
        return text + (
            "the order of the samples is resumed exactly, random numbers drawn in workers (augmentation) are not, "
            "until this epoch ends"
        )

    def skip(self, batches: int) -> None:
        """Let the next iteration begin behind ``batches``, unless it goes on elsewhere after ``load_state_dict``.

        None at all, where the epoch that was restored is at its end, or the loop over it was left: then the next one
        begins, as the caller counts.
        """
        pending = self._pending
        if pending is None:
            self.skipped = batches
        elif batches == 0 and (pending.get("was_left") or pending["given"] == length_of(self.loader)):
            self._leave_epoch(pending)  # the program may have been done with it
        elif batches != pending["given"]:
            logger.warning(
                "the loader goes on behind batch %d, as restored; %d batches were to be skipped", self.given, batches
            )

    def epochs(self) -> dict[str, int]:
        """Return the program's counters of epochs."""
        return {} if self.counted_epochs is None else self.counted_epochs()

    def note_step(self) -> None:
        """An optimizer stepped: an iteration that runs now is one of training."""
        running, self._stepped = self._iteration(), None
        if running is not None:
            running.recorded["epochs"] = self.epochs()
            self._stepped = running.place(is_at_end=self._is_at_end(running.given))

    def _is_at_end(self, given: int) -> bool:
        """True if the running iteration has given its last batch."""
        # Accelerate's loaders look one batch ahead, and know their end also where the length is not known.
        return given > 0 and (given == length_of(self.loader) or bool(held(self.loader).get("end_of_dataloader")))

    def _leave_epoch(self, pending: dict[str, Any]) -> None:
        """Let the next iteration begin the epoch after the one that ``pending`` is at the end of."""
        counters = {name: count + 1 for name, count in pending["counters"].items()}
        set_counts(self._loaders, {**pending, "counters": counters})
        self._pending = None

    def _settle(self) -> None:
        """Decide, when the loader is iterated, which epoch a loaded position belongs to.

        Behind the last optimizer step of an epoch the program may have counted the next one already. The loop that it
        enters now is then the one of that epoch, and nothing is left of the one before.
        """
        pending = self._pending
        if pending is not None and pending.get("at_end") and _raised(pending.get("epochs", {}), self.epochs()):
            self._leave_epoch(pending)

    def note_boundary(self) -> None:
        """A boundary captured nothing. One behind ``end`` is the last one again."""
        if not self._has_ended:
            self._at_boundary = None if self._iteration() is None else self.state_dict()

    def end(self) -> None:
        """Go back to the last boundary: the loop was left since, maybe with a batch that was not trained."""
        self._has_ended = True

    def note_end(self) -> None:
        """The running iteration gave its last batch."""
        self._stepped = self._at_boundary = None
        if self.at_end is not None:
            self.at_end()

    def note_draws(self, what: str) -> None:
        """``what`` drew from the global generators between two batches: warn, once."""
        if self.may_draw:
            self.may_draw = False
            logger.warning(
                "%s draws from the global random generators while it is read. If the order of its data depends on "
                "that, a training that is resumed in mid-epoch reads other data: let it draw from a generator of its "
                "own (torch.Generator, random.Random), or in workers. Random augmentation alone is resumed exactly",
                what,
            )

    def warn_once(self, text: str, of: object) -> None:
        """Log a text about the class of ``of``, unless it was logged before."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, type(of).__name__)

    def share(self) -> Share:
        """Return this rank's share of the data."""
        loaders = self._loaders
        parts = [*loaders, *parts_of(loaders), held(self.loader).get("state")]
        dataset = held(loaders[-1]).get("dataset")
        share = share_of([held(part) for part in parts], length_of(self.loader), length_of(dataset))
        return {**share, "subset": self._subset_digest.of(dataset)}

    def counts(self) -> dict[str, Any]:
        """Return counters and seeds of the loader and its samplers."""
        return counts_of(self._loaders)

    # ---------------------------------------------------------------- iteration

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The loader's iteration, over the iterator that ``make`` makes: from the start, or from what was loaded."""
        iteration = Iteration(self, make)
        self._settle()
        pending, self._pending = self._pending, None
        self._running, self._stepped = weakref.ref(iteration), None
        self._at_boundary, self._has_ended = None, False
        if pending is not None:
            iteration.land(pending)
        else:
            skipped, self.skipped = self.skipped, 0
            iteration.begin(min(skipped, length_of(self.loader) or skipped))
        return iteration

    def _iteration(self) -> Iteration | None:
        running = None if self._running is None else self._running()
        return running if running is not None and not running.is_over else None


def position_in(state: Mapping[str, Any]) -> str:
    """Describe where the first loader in a training state stands, whose position is part of it; else nothing."""
    for value in state.values():
        if isinstance(value, dict) and isinstance(value.get("given"), int) and "at_iter" in value:
            counters = value["counters"]
            epoch = counters.get("iteration", counters.get("_num_iter_calls"))
            return f"batch {value['given']}" if epoch is None else f"epoch {epoch}, batch {value['given']}"
    return ""


def make_resumable(loader: Any) -> Position:
    """Let iterations of ``loader`` be recorded and resumed, in place: it stays the same object. Idempotent.

    For a ``DataLoader`` or what Accelerate made of one. Raises: ConfigError, for anything else.
    """
    known = held(loader).get("_lazysnap_position")
    if isinstance(known, Position):
        return known
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"a torch.utils.data.DataLoader is needed, got {type(loader).__qualname__}")
    # Accelerate's loaders pretend to be of torch's class, by a property that cannot be set.
    object.__dict__["__class__"].__set__(loader, _resumable(type(loader)))  # type: ignore[arg-type]
    loader._lazysnap_position = position = Position(loader, is_owned=True)
    return position


@functools.cache
def _resumable(kind: type) -> type:
    """A subclass of a loader's class whose iterations are recorded by the loader's position."""

    def __iter__(self: Any) -> Iterator[Any]:
        return self._lazysnap_position.iterate(lambda: kind.__iter__(self))  # type: ignore[no-any-return,attr-defined]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle, or copy, as the loader that it was: the position belongs to this one."""
        stock: Any = object.__new__(kind)
        stock.__dict__.update({name: value for name, value in vars(self).items() if name != "_lazysnap_position"})
        return stock.__reduce_ex__(protocol)

    methods = {"__iter__": __iter__, "__reduce_ex__": __reduce_ex__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), methods)


def _raised(before: dict[str, int], now: dict[str, int]) -> bool:
    """True if a count in ``before`` is greater by one in ``now``."""
    return any(now.get(name) == count + 1 for name, count in before.items())
