"""Data loaders that keep their own position, as torchdata's ``StatefulDataLoader``.

What such a loader (torchdata 0.11) leaves out is added: generators that loader, sampler or dataset own (it draws a seed
from its ``generator`` at each epoch and does not save it), and how far it is in an iterable dataset that keeps no
position (it counts batches twice when it reads them again).

Not exact: samplers and iterable datasets that draw from the global generators as they go, and have no ``state_dict``
(``WeightedRandomSampler`` without a generator of its own). ``ResumableLoader`` is exact with such samplers.
"""

import logging
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from lazysnap.data.parts import held, is_iterable
from lazysnap.data.share import is_first_rank, length_of, ranks
from lazysnap.data.streams import RandomStreams

logger = logging.getLogger(__name__)

_GENERATORS = "lazysnap_generators"
_RANKS = "lazysnap_ranks"
_SIZES = "lazysnap_sizes"
_INEXACT = "BufferShuffledExamplesIterable"
"""Part of a dataset of Hugging Face that loses samples when a state is loaded."""
_PLAIN = ("torch", "torchdata", "builtins")
"""Packages whose samplers give the same order again when they are driven from the start of the epoch."""
_MOST_KINDS = 50
_COUNTERS = ("_num_yielded", "_sampler_iter_yielded")


def is_stateful(value: Any) -> bool:
    """True if ``value`` saves and loads a state of its own."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def is_stateful_loader(value: Any) -> bool:
    """True if ``value`` is a data loader that saves and loads its position."""
    return isinstance(value, DataLoader) and is_stateful(value)


def saves_position(data: Any) -> bool:
    """True if ``data``, an iterable dataset or a loader, can be set to a saved position, and then gives what follows.

    False if its ``state_dict`` needs the position as an argument, and for a shuffle buffer of Hugging Face's
    ``datasets``: the samples in that are not saved.
    """
    if not is_stateful(data):
        return False
    needed = [one for one in signature(data.state_dict).parameters.values() if one.default is one.empty]
    if any(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) for one in needed):
        return False
    return not _is_hugging_face(data) or _INEXACT not in _kinds_inside(data._ex_iterable)


def is_driven(loader: Any) -> bool:
    """True if a ``StatefulDataLoader`` need not be asked: the indices of its samplers can be passed over."""
    samplers = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    are_plain = all(type(one).__module__.partition(".")[0] in _PLAIN or not is_stateful(one) for one in samplers)
    return isinstance(loader, DataLoader) and not is_iterable(loader) and are_plain


def _is_hugging_face(dataset: Any) -> bool:
    return type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "_ex_iterable")


def _kinds_inside(examples: Any) -> set[str]:
    """Return the names of the classes that a dataset of Hugging Face reads through."""
    found: set[str] = set()
    left = [examples]
    while left and len(found) < _MOST_KINDS:
        one = left.pop()
        found.add(type(one).__name__)
        inner = [value for name, value in vars(one).items() if "ex_iterable" in name]
        left += [item for value in inner for item in (value if isinstance(value, list) else [value])]
    return found


def load_dataset(dataset: Any, state: Any) -> None:
    """Let the next iteration of an iterable dataset go on at ``state``; ``None`` changes nothing."""
    if state is not None and _is_hugging_face(dataset):
        dataset.set_epoch(state["epoch"])  # it takes a state of its present epoch alone
        state = _Once(state, reads=1 if get_worker_info() is None else 2)
    if state is not None:
        dataset.load_state_dict(state)


def begin_anew(dataset: Any, state: Any = None) -> None:
    """Let the next iteration begin at the start of the data; ``state``: that behind their last sample."""
    if _is_hugging_face(dataset):
        dataset.load_state_dict(None)
    else:
        load_dataset(dataset, state)


class _Once(dict[str, Any]):
    """A state of a dataset of Hugging Face, which else begins at it in every iteration; empty after ``reads``."""

    def __init__(self, state: dict[str, Any], reads: int) -> None:
        super().__init__(state)
        self._reads = reads

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name == "examples_iterable":
            self._reads -= 1
            if not self._reads:
                self.clear()
        return value


def rest_of(loader: Any, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Return the iterator over what is left of the epoch that was loaded; where nothing is, no next epoch begins."""
    if "restart_on_stop_iteration" not in held(loader):
        return make()
    restarts, loader.restart_on_stop_iteration = loader.restart_on_stop_iteration, False  # nodes of torchdata
    try:
        return make()
    finally:
        loader.restart_on_stop_iteration = restarts


def drop_early_iterator(loader: Any) -> None:
    """Let a ``StatefulDataLoader`` make its iterator in each epoch, and draw its seed then.

    Accelerate asks it for its state when it is prepared, and so the first epoch alone would draw nothing.
    """
    if "_initial_iter_for_state_dict" in held(loader):
        loader._iterator, loader._initial_iter_for_state_dict = None, False


def state_of_loader(loader: Any) -> dict[str, Any]:
    """The loader's state. Draws no random number."""
    streams = RandomStreams()
    streams.watch([loader])
    # Asked for its state before it is iterated, the loader would make an iterator, which draws a seed.
    is_new = all(held(loader).get(name, loader) is None for name in ("_iterator", "next_iter_state"))
    own = {} if is_new else loader.state_dict()
    return {**own, _GENERATORS: streams.collect_owned(), _RANKS: ranks(), _SIZES: _sizes_of(loader)}


def _sizes_of(loader: Any) -> dict[str, int | None]:
    """Return the samples of a batch and of the dataset."""
    return {"batch": getattr(loader, "batch_size", None), "data": length_of(getattr(loader, "dataset", None))}


def _say_sizes(loader: Any, own: dict[str, Any], then: dict[str, int | None]) -> None:
    """Warn of other sizes than in the snapshot. Such a loader counts the samples of a sampler, and the batches of an
    iterable dataset.
    """
    now, given = _sizes_of(loader), own.get("_num_yielded") or 0
    batch, before = now["batch"], then["batch"]
    if batch and before and batch != before and given and is_iterable(loader):
        fate = "skipped" if batch > before else "trained twice"
        logger.warning(
            "%s goes on behind %d batches, as before, but a batch has %d samples, in the snapshot %d: %d samples are "
            "%s. Give the engine ResumableLoader(loader), which counts samples",
            *(type(loader).__name__, given, batch, before, given * abs(batch - before), fate),
        )
    if None not in (now["data"], then["data"]) and now["data"] != then["data"]:
        logger.warning(
            "%s: the data has %d samples, in the snapshot %d: where its order is shuffled, an epoch that goes on skips "
            "some samples and trains others twice",
            *(type(loader).__name__, now["data"], then["data"]),
        )


def load_loader(loader: Any, state: dict[str, Any]) -> None:
    """Let the loader's next iteration go on at ``state``. Draws random numbers: restore the generators afterwards.

    Blocks: starts the loader's workers, if it was iterated before.
    """
    own = dict(state)
    if own.pop(_RANKS, ranks()) != ranks():
        logger.warning(
            "%s goes on behind as many batches of each rank as before, which are other samples with another number of "
            "ranks: give the engine ResumableLoader(loader), which counts samples",
            type(loader).__name__,
        )
    sizes = own.pop(_SIZES, None)
    if sizes is not None and is_first_rank():
        _say_sizes(loader, own, sizes)
    generators = own.pop(_GENERATORS, None)  # not in what was saved without lazysnap
    load_dataset(loader, own)
    if own and "next_iter_state" in vars(loader):  # of torchdata
        loader.state_dict()  # makes the iterator, and draws its seed, now: the next iter() takes it
        for name in _COUNTERS:
            if name in own and name in vars(getattr(loader, "_iterator", loader)):
                setattr(loader._iterator, name, own[name])
    if generators is not None and is_stateful_loader(loader):  # others make their iterator later
        streams = RandomStreams()
        streams.watch([loader])
        streams.restore_owned(generators)
