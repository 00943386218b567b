"""Supports data loaders and datasets that save their own position, as torchdata's ``StatefulDataLoader``.

The state of such a loader (torchdata 0.11) lacks the random generators of loader, sampler and dataset, which are added:
it draws a seed from its ``generator`` at each epoch and does not save it. Counters of batches are corrected: for an
iterable dataset that saves no position it counts batches twice when it reads them again.
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

from torch.utils.data import DataLoader

from lazysnap.data.layout import is_first_rank, length_of, ranks
from lazysnap.data.parts import attributes_of, is_iterable
from lazysnap.data.streams import NOT_SEARCHED, RandomStreams

logger = logging.getLogger(__name__)

_GENERATORS = "lazysnap_generators"
_SIZES = "lazysnap_sizes"
_UNITS = {"ranks": "ranks", "batch": "samples in a batch", "data": "samples in the data"}
COUNTERS = ("_num_yielded", "_sampler_iter_yielded")
"""Counters of batches that iterators keep."""
_streams: "weakref.WeakKeyDictionary[Any, RandomStreams]" = weakref.WeakKeyDictionary()
"""The generators of each loader. A search skips long containers without generators, as found by the previous one."""
_BY_NAME = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def is_stateful(value: Any) -> bool:
    """True if ``value`` saves and loads its own state."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def is_stateful_loader(value: Any) -> bool:
    """True if ``value`` is a data loader that saves and loads its position."""
    return isinstance(value, DataLoader) and is_stateful(value)


def saves_position(data: Any) -> bool:
    """True if ``data``, an iterable dataset or a loader, saves its position: ``state_dict`` needs no argument."""
    if not is_stateful(data):
        return False
    parameters = signature(data.state_dict).parameters.values()
    return not any(item.default is item.empty and item.kind in _BY_NAME for item in parameters)


def is_torchdata_in_process(base: Any) -> bool:
    """True for a ``StatefulDataLoader`` without workers: its iterators read as those of torch do."""
    return type(base).__name__ == "StatefulDataLoader" and not base.num_workers


def is_asked(base: Any) -> bool:
    """True if the loader's own state is used; otherwise indices are skipped, or the dataset's state is used."""
    return saves_position(base) and not is_torchdata_in_process(base)


def keeps_loaded_state(dataset: Any) -> bool:
    """True if each later iteration begins at the loaded state again, as in a stream of Hugging Face's ``datasets``."""
    return "_starting_state_dict" in attributes_of(dataset)


def forget_loaded_state(dataset: Any) -> None:
    """Let the next iteration begin at the start of the data, once the current one has begun."""
    if keeps_loaded_state(dataset):
        dataset.load_state_dict(None)


def rest_of(loader: Any, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Return the iterator over the rest of the loaded epoch, without beginning the next one."""
    if "restart_on_stop_iteration" not in attributes_of(loader):
        return make()
    restarts = loader.restart_on_stop_iteration  # nodes of torchdata
    loader.restart_on_stop_iteration = False
    try:
        return make()
    finally:
        loader.restart_on_stop_iteration = restarts


def has_early_iterator(loader: Any) -> bool:
    """True if a ``StatefulDataLoader`` has made the iterator of the next epoch, and drawn its seed.

    It does so when it is asked for its state: Accelerate asks when it prepares a loader. The first epoch then draws
    nothing.
    """
    return bool(attributes_of(loader).get("_initial_iter_for_state_dict"))


def drop_early_iterator(loader: Any) -> bool:
    """Let a ``StatefulDataLoader`` make its iterator in the next epoch. Return ``has_early_iterator`` before that."""
    if "_initial_iter_for_state_dict" not in attributes_of(loader):
        return False
    was_early = has_early_iterator(loader)
    loader._iterator = None
    loader._initial_iter_for_state_dict = False
    return was_early


def _streams_of(loader: Any) -> RandomStreams:
    """Return the generators that a loader keeps now."""
    try:
        streams = _streams.setdefault(loader, RandomStreams())
    except TypeError:  # no key of a dict: long containers are searched at each call
        streams = RandomStreams()
    streams.watch([loader])
    return streams


def warn_of_generators(loader: Any) -> None:
    """Warn if the loader has so many parts that a random generator may have been missed."""
    streams = _streams_of(loader)
    if not streams.is_complete and is_first_rank():
        logger.warning(NOT_SEARCHED, type(loader).__name__)


def state_of_loader(loader: Any) -> dict[str, Any]:
    """Return the loader's state. Draws no random number."""
    streams = _streams_of(loader)
    state: dict[str, Any] = {}
    # Before it is iterated, the loader would make an iterator for its state, which draws a seed.
    is_new = all(attributes_of(loader).get(name, loader) is None for name in ("_iterator", "next_iter_state"))
    if not is_new:
        state.update(loader.state_dict())
    return {**state, _GENERATORS: streams.collect_owned(), _SIZES: _sizes_of(loader)}


def load_loader(loader: Any, state: dict[str, Any]) -> None:
    """Let the loader's next iteration continue at ``state``. Draws random numbers: restore the generators afterwards.

    Blocks: starts the loader's workers, if it was iterated before.
    """
    loader_state = dict(state)
    sizes = loader_state.pop(_SIZES, None)  # not in what was saved without lazysnap
    if sizes is not None and is_first_rank():
        _warn_of_sizes(loader, sizes)
    generators = loader_state.pop(_GENERATORS, None)
    loader.load_state_dict(loader_state)
    if loader_state and "next_iter_state" in vars(loader):  # of torchdata
        loader.state_dict()  # makes the iterator, and draws its seed, now: the next iter() uses it
        iterator = vars(loader).get("_iterator")
        for name in COUNTERS:
            if name in loader_state and name in attributes_of(iterator):
                setattr(iterator, name, loader_state[name])
    if generators is not None and is_stateful_loader(loader):  # others make their iterator later
        _streams_of(loader).restore_owned(generators)


def _sizes_of(loader: Any) -> dict[str, int | None]:
    dataset = getattr(loader, "dataset", None)
    return {"ranks": ranks(), "batch": getattr(loader, "batch_size", None), "data": length_of(dataset)}


def _warn_of_sizes(loader: Any, before: dict[str, int | None]) -> None:
    """Warn about sizes that change which samples the counted batches contain."""
    changes = []
    for key, size in _sizes_of(loader).items():
        if key == "batch" and not is_iterable(loader):
            continue  # of a sampler it counts samples
        size_before = before[key]
        if size and size_before and size != size_before:
            changes.append(f"{size} {_UNITS[key]}, in the snapshot {size_before}")
    if changes:
        logger.warning(
            "%s continues after as many batches as before, but there are %s: some samples are skipped or trained "
            "twice. Give the engine ResumableLoader(loader), which counts samples",
            type(loader).__name__,
            "; ".join(changes),
        )
