"""The position of a data loader in its epoch: recorded at every batch, and reached again by a replay.

A restart makes the loader's iterator as the epoch made it, with the random generators as they were then, and drives it
forward to the batch that comes next. Batches in between are not read where nothing can tell the difference (a map-style
dataset without workers: the sampler alone is driven); else they are read again and dropped. Then all generators are put
back as they were when the snapshot was taken: order, augmentation and everything that training draws go on exactly.

With another number of ranks the loader goes on in the same epoch behind the samples that were trained, with other
random numbers: see ``lazysnap.data.share``.

Not exact: an order or batches that depend on global random numbers drawn *between* batches, where training draws from
the same generator: iterable datasets in the main process, and samplers that draw from the global generator as they go.
Random augmentation in persistent workers (``persistent_workers=True``); a warning says so.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from lazysnap.data.share import Share, changes_in, is_first_rank, length_of, passed_in, share_of
from lazysnap.data.stateful import load_loader, state_of_loader
from lazysnap.data.streams import RandomStreams, collect_rng, has_drawn
from lazysnap.data.workers import running_workers, start_workers
from lazysnap.errors import ConfigError

logger = logging.getLogger(__name__)

_INNER = ("base_dataloader", "_dataloader")
"""Attributes in which Accelerate's and Fabric's loaders hold the one of torch."""
_COUNTERS = ("iteration", "_num_iter_calls")
"""Counters of iterations of such a loader; their samplers are seeded with them."""
_SAMPLERS = ("batch_sampler", "sampler")
_NOW = ("given", "now", "own", "share", "at_end", "was_left")
"""Fields of a position that are not recorded when its iteration begins."""
_SEEDS = ("epoch", "seed", "initial_seed")
_DEPTH = 4
_END = object()
_clock = itertools.count(1)


def tick() -> int:
    """The next number of a clock that counts events: what came later has a greater one."""
    return next(_clock)


class Position:
    """The position of one loader.

    ``state_dict`` and ``load_state_dict`` make it part of a snapshot; ``iterate`` is the loader's iteration.
    ``asks_loader``: resume by the loader's own ``load_state_dict``, without a replay. Not thread-safe.
    """

    is_data_position = True

    def __init__(self, loader: Any, *, asks_loader: bool = False, is_owned: bool = False) -> None:
        """``is_owned``: the loader holds this position, so it is referred to weakly."""
        self._refer: Callable[[], Any] = weakref.ref(loader) if is_owned else lambda: loader
        self._asks_loader = asks_loader
        self._looks_ahead = hasattr(type(loader), "adjust_state_dict_for_prefetch")
        self._streams = RandomStreams()
        self._running: weakref.ref[_Iteration] | None = None
        self._stepped: _Place | None = None
        """Where the iteration stood in which the last optimizer step was, until it ends or another one begins."""
        self._pending: dict[str, Any] | None = None
        self._skipped = 0
        self.may_draw = any(map(_is_read_here, _bases(loader)))
        """True if draws of its dataset from the global generators would go unnoticed."""
        self.is_recounted = False
        """True if the position that was loaded counts other batches than it did when it was recorded."""
        self.before_fetch: Callable[[], None] | None = None
        """Called before every batch is fetched: then nothing of the next step has begun."""
        self.is_held = False
        """True if the consumer holds one batch that was not trained: the position is then the one before that batch."""
        self.at_end: Callable[[], None] | None = None
        """Called when an iteration gave its last batch, before the loop over it ends."""
        self.counted_epochs: Callable[[], dict[str, int]] | None = None
        """Returns the program's own counters of epochs, by name."""

    @property
    def _loader(self) -> Any:
        return self._refer()

    @property
    def _bases(self) -> list[Any]:
        return _bases(self._loader)

    @property
    def is_alive(self) -> bool:
        """True if the loader still exists."""
        return self._loader is not None

    # ---------------------------------------------------------------- state

    @property
    def given(self) -> int | None:
        """Batches that the running iteration has given, or is about to go on behind; ``None`` between two."""
        if self._pending is not None:
            return int(self._pending["given"])
        running = self._iteration()
        return None if running is None else running.given

    @property
    def began(self) -> int | None:
        """When the running iteration began, by ``tick``; ``None`` between two."""
        running = self._iteration()
        return None if running is None else running.began

    def state_dict(self) -> dict[str, Any]:
        """Return the current position as plain values: some tens of KB."""
        if self._pending is not None:
            return dict(self._pending)
        running = self._iteration()
        if running is not None and running.before is not None:
            return dict(running.before)
        if running is not None:
            return self._state(running.place)
        stepped = self._stepped
        if stepped is None or _raised(stepped.recorded["epochs"], self.epochs()):
            return self._state(None)
        return {**self._state(stepped), "was_left": True}  # by a break, and the program may go on in this epoch

    def _state(self, place: "_Place | None") -> dict[str, Any]:
        if place is None or place.given < 2:  # samplers make generators when they are iterated, none later
            self._streams.watch([self._loader, *self._bases])
        state: dict[str, Any] = {
            "given": None,
            "now": self._streams.collect(),
            **self._counts(),
        }
        if place is None:
            state.update(share=self._share(), skip=self._skipped)
        else:
            state.update(place.recorded, given=place.given, at_end=self._is_at_end(place.given))
            # Before the first batch a loader's own state may be that of the epoch before, at its end.
            if self._asks_loader and place.given:
                state["own"] = state_of_loader(self._loader)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at ``state``."""
        _set_counts(self._loader, self._bases, state)
        if self._iteration() is not None and is_first_rank():
            logger.warning(
                "%s: its position is restored inside a loop over it, which goes on as it was: restore before the loop, "
                "so that the loop begins where the snapshot stands",
                type(self._bases[0]).__name__,
            )
        self._running = self._stepped = None
        self._streams.watch([self._loader, *self._bases])
        share = self._share()
        passed = passed_in(state, share)
        self._say(changes_in(state, share, passed))
        self.is_recounted = passed is not None
        if passed is not None and state["share"]["ranks"] != share["ranks"]:
            self._pending, self._skipped = None, passed
            return
        self._pending = self._recounted(state, share, passed) if state["given"] is not None else None
        self._skipped = state.get("skip", 0) if passed is None or state["given"] is not None else passed
        self._streams.restore_owned(state["now"])

    @staticmethod
    def _recounted(state: dict[str, Any], share: Share, passed: int | None) -> dict[str, Any]:
        """Return ``state`` with the batches that now hold the samples which were trained."""
        if passed is None:
            return dict(state)
        recounted = {name: value for name, value in state.items() if name != "own"} | {"given": passed, "share": share}
        # The first batch that is fetched draws the order of the epoch: also where it comes next, or is looked at ahead.
        if passed < 2 and "at_first" in state:
            recounted["now" if passed == 0 else "ahead"] = state["at_first"]
        return recounted

    def given_in(self, state: dict[str, Any]) -> int | None:
        """Return the batches of this loader behind which ``state`` stands; ``None``, if it is between two epochs."""
        passed = passed_in(state, self._share()) if state["given"] is not None else None
        return state["given"] if passed is None else passed

    def _say(self, changes: list[str]) -> None:
        if changes and is_first_rank():
            logger.warning("%s: %s", type(self._bases[0]).__name__, "; ".join(changes))

    @property
    def skipped(self) -> int:
        """Batches that the next iteration begins behind, where it does not go on in the middle of a recorded one."""
        return self._skipped

    def skip(self, batches: int) -> None:
        """Let the next iteration begin behind ``batches``, unless it goes on elsewhere after ``load_state_dict``.

        None at all, where the epoch that was restored is at its end, or the loop over it was left: then the next one
        begins, as the caller counts.
        """
        if self._pending is None:
            self._skipped = batches
        elif batches == 0 and self._is_done(self._pending):
            self._leave_epoch(self._pending)
        elif batches != self._pending["given"]:
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
            self._stepped = _Place(dict(running.recorded), running.given)

    def _is_done(self, pending: dict[str, Any]) -> bool:
        """True if the program may have been done with the epoch that ``pending`` is in."""
        return bool(pending.get("was_left")) or pending["given"] == length_of(self._loader)

    def _is_at_end(self, given: int) -> bool:
        """True if the running iteration has given its last batch."""
        # Accelerate's loaders look one batch ahead, and know their end also where the length is not known.
        return given > 0 and (given == length_of(self._loader) or bool(_held(self._loader).get("end_of_dataloader")))

    def _leave_epoch(self, pending: dict[str, Any]) -> None:
        """Let the next iteration begin the epoch after the one that ``pending`` is at the end of."""
        counters = {name: count + 1 for name, count in pending["counters"].items()}
        _set_counts(self._loader, self._bases, {**pending, "counters": counters})
        self._pending = None

    def _settle(self) -> None:
        """Decide, when the loader is iterated, which epoch a loaded position belongs to.

        Behind the last optimizer step of an epoch the program may have counted the next one already. The loop that it
        enters now is then the one of that epoch, and nothing is left of the one before.
        """
        pending = self._pending
        if pending is not None and pending.get("at_end") and _raised(pending.get("epochs", {}), self.epochs()):
            self._leave_epoch(pending)

    def note_draws(self, before: dict[str, Any]) -> None:
        """A batch of an iterable dataset was read: warn, once, if that drew from the global generators."""
        if has_drawn(before):
            self.may_draw = False
            logger.warning(
                "%s draws from the global random generators while it is read. If the order of its data depends on "
                "that, a training that is resumed in mid-epoch reads other data: let it draw from a generator of its "
                "own (torch.Generator, random.Random), or in workers. Random augmentation alone is resumed exactly",
                type(self._bases[0].dataset).__name__,
            )

    def _share(self) -> dict[str, int | None]:
        parts = [self._loader, *self._bases, *_parts((self._loader, *self._bases)), _held(self._loader).get("state")]
        data = length_of(_held(self._bases[0]).get("dataset"))
        return share_of([_held(part) for part in parts], length_of(self._loader), data)

    def _counts(self) -> dict[str, Any]:
        loaders = (self._loader, *self._bases)
        counters = {name: _held(one)[name] for one in loaders for name in _COUNTERS if name in _held(one)}
        return {"counters": counters, "samplers": [_seeds(sampler) for sampler in _samplers(loaders)]}

    # ---------------------------------------------------------------- iteration

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The loader's iteration, over the iterator that ``make`` makes: from the start, or from what was loaded."""
        iteration = _Iteration(self, make)
        self._settle()
        pending, self._pending = self._pending, None
        self._running, self._stepped = weakref.ref(iteration), None
        if pending is not None:
            iteration.land(pending)
        else:
            skipped, self._skipped = self._skipped, 0
            iteration.begin(min(skipped, length_of(self._loader) or skipped))
        return iteration

    def _iteration(self) -> "_Iteration | None":
        running = None if self._running is None else self._running()
        return running if running is not None and not running.is_over else None


@dataclass(frozen=True)
class _Place:
    """A place in an iteration, and what a replay needs to reach it."""

    recorded: dict[str, Any]
    given: int


class _Iteration:
    """One iteration: gives the batches of the loader's own, and records what a replay needs."""

    def __init__(self, position: Position, make: Callable[[], Iterator[Any]]) -> None:
        self._position = position
        self._make = make
        self._inner: Iterator[Any] = iter(())
        self.began = tick()
        self.given = 0
        self.is_over = False
        self.recorded: dict[str, Any] = {}
        self.before: dict[str, Any] | None = None
        """The position before the last batch, where the consumer holds that one."""

    def __iter__(self) -> "_Iteration":
        return self

    @property
    def place(self) -> _Place:
        """Where it stands."""
        return _Place(self.recorded, self.given)

    def __next__(self) -> Any:
        position = self._position
        if position.before_fetch is not None:
            position.before_fetch()
        if position.is_held:
            self.before = position._state(self.place)
        if not self.given or position._looks_ahead:
            self._note_streams()
        # The first batch may fill a buffer, and set up what is drawn from later.
        before = collect_rng() if self.given == 1 and position.may_draw else None
        try:
            batch = next(self._inner)
        except StopIteration:
            self.is_over = True
            position._stepped = None
            if position.at_end is not None:
                position.at_end()
            raise
        self.given += 1
        if before is not None:
            position.note_draws(before)
        return batch

    def _note_streams(self) -> None:
        streams = self._position._streams.collect()
        self.recorded["ahead"] = streams
        self.recorded.setdefault("at_first", streams)

    def begin(self, batches: int = 0, state: dict[str, Any] | None = None) -> None:
        """Make the loader's own iterator and drive it over ``batches``; by ``state`` with the random generators as they
        were then. May draw random numbers.
        """
        position = self._position
        streams, bases = position._streams, position._bases
        streams.watch([position._loader, *bases])
        self.recorded = {
            "at_iter": streams.collect(),
            "had_workers": running_workers(bases),
            "had_iterator": [_has_iterator(base) for base in bases],
            "share": position._share(),
            **position._counts(),
        }
        can_skip = batches > 0 and type(position._loader).__name__ != "DataLoaderDispatcher"
        with _reading_less(bases, can_skip=can_skip) as skip:
            self._inner = self._make()
            self._drive(batches, skip, state)
        self.given = batches

    def land(self, state: dict[str, Any]) -> None:
        """Go on behind ``state["given"]`` batches, with the random generators as they were there."""
        position = self._position
        streams, bases = position._streams, position._bases
        if "own" in state:
            load_loader(position._loader, state["own"])
            self._inner, self.given = self._make(), state["given"]
        else:
            self._replay(state)
        streams.watch([position._loader, *bases])  # samplers make generators when they are iterated
        streams.restore(state["now"])
        self.recorded = {name: value for name, value in state.items() if name not in _NOW}
        self.recorded["share"] = position._share()

    def _replay(self, state: dict[str, Any]) -> None:
        position = self._position
        streams, bases = position._streams, position._bases
        start_workers(bases, state["had_workers"])
        for base, had in zip(bases, state["had_iterator"], strict=False):
            _set_iterator(base, had)
        streams.watch([position._loader, *bases])
        streams.restore(state["at_iter"])
        self.begin(state["given"], state)

    def _drive(self, batches: int, skip: "_Skip", state: dict[str, Any] | None) -> None:
        position, streams = self._position, self._position._streams
        if batches and not skip.is_possible:
            logger.info("reading %d batches again, to go on behind them", batches)
        for number in range(1, batches + 1):
            # What a loader that looks ahead fetches with the last batch is still to come.
            is_needed = position._looks_ahead and number == batches
            if state is not None and number == 1:
                streams.restore(state["at_first"])
            if state is not None and is_needed:
                streams.restore(state["ahead"])
            if state is None and (number == 1 or is_needed):
                self._note_streams()
            skip.is_on = not is_needed
            if next(self._inner, _END) is _END:
                logger.warning("the data ends after %d batches, %d were to be skipped", number - 1, batches)
                break


class _Skip:
    """The way to pass over batches: by reading them, or by driving the sampler alone."""

    def __init__(self) -> None:
        self.is_on = False
        self.is_possible = False


@contextmanager
def _reading_less(bases: list[Any], *, can_skip: bool) -> Iterator[_Skip]:
    """Within it iterators of ``bases`` give empty batches while ``is_on``, where that leaves them in the same state."""
    skip, [base, *_] = _Skip(), bases
    is_plain = can_skip and isinstance(base, DataLoader) and base.num_workers == 0
    if not is_plain or base._dataset_kind != _DatasetKind.Map:
        yield skip
        return
    skip.is_possible = True

    def may_skip(iterator: Any) -> Any:
        fetcher = iterator._dataset_fetcher
        read = fetcher.fetch
        fetcher.fetch = lambda index: () if skip.is_on else read(index)
        fetchers.append(fetcher)
        return iterator

    fetchers: list[Any] = []
    if _has_iterator(base):
        may_skip(base._iterator)
    base._get_iterator = lambda: may_skip(type(base)._get_iterator(base))
    try:
        yield skip
    finally:
        del base._get_iterator
        for fetcher in fetchers:
            del fetcher.fetch


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
    known = _held(loader).get("_lazysnap_position")
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


def _held(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _bases(loader: Any) -> list[Any]:
    """The loader of torch inside ``loader``, or that itself."""
    base = loader
    while (inner := next((_held(base)[name] for name in _INNER if name in _held(base)), None)) is not None:
        base = inner
    return [base]


def _is_read_here(base: Any) -> bool:
    """True if it reads an iterable dataset in this process."""
    return getattr(base, "num_workers", 1) == 0 and getattr(base, "_dataset_kind", None) == _DatasetKind.Iterable


def _has_iterator(base: Any) -> bool:
    """True if a ``StatefulDataLoader`` made its next iterator already, because it was asked for its state."""
    return bool(_held(base).get("_initial_iter_for_state_dict"))


def _set_iterator(base: Any, had: bool) -> None:
    if had and not _has_iterator(base):
        base._iterator = None
        base.state_dict()
    elif not had and _has_iterator(base):
        base._initial_iter_for_state_dict, base._iterator = False, None


def _parts(loaders: tuple[Any, ...]) -> list[Any]:
    """The samplers and datasets of a loader, in a fixed order."""
    found: list[Any] = []
    level = [*loaders]
    for _ in range(_DEPTH):
        inner = (_held(one).get(name) for one in level for name in _SAMPLERS)
        level = [one for one in inner if one is not None and not any(one is other for other in found)]
        found.extend(level)
    return [*found, *(_held(one)["dataset"] for one in loaders if "dataset" in _held(one))]


def _samplers(loaders: tuple[Any, ...]) -> list[Any]:
    """Those of its parts that are seeded by numbers."""
    return [one for one in _parts(loaders) if _seeds(one)]


def _seeds(sampler: Any) -> dict[str, int]:
    return {name: value for name, value in _held(sampler).items() if name in _SEEDS and type(value) is int}


def _set_counts(loader: Any, bases: list[Any], state: dict[str, Any]) -> None:
    loaders = (loader, *bases)
    for one in loaders:
        for name, count in state["counters"].items():
            if name in _held(one):
                setattr(one, name, count)
    for sampler, seeds in zip(_samplers(loaders), state["samplers"], strict=False):
        for name, value in seeds.items():
            if name in _seeds(sampler):
                setattr(sampler, name, value)
