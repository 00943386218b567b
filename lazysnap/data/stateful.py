"""Data loaders that keep their own position, as torchdata's ``StatefulDataLoader``.

What such a loader (torchdata 0.11) leaves out is added: generators that loader, sampler or dataset own (it draws a seed
from its ``generator`` at each epoch and does not save it), and how far it is in an iterable dataset that keeps no
position (it counts batches twice when it reads them again).

Not exact: samplers and iterable datasets that draw from the global generators as they go, and have no ``state_dict``
(``WeightedRandomSampler`` without a generator of its own). ``ResumableLoader`` is exact with such samplers.
"""

import logging
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from lazysnap.data.share import is_first_rank, length_of, ranks
from lazysnap.data.streams import RandomStreams

logger = logging.getLogger(__name__)

_GENERATORS = "lazysnap_generators"
_RANKS = "lazysnap_ranks"
_SIZES = "lazysnap_sizes"
_COUNTERS = ("_num_yielded", "_sampler_iter_yielded")


def is_stateful(value: Any) -> bool:
    """True if ``value`` saves and loads a state of its own."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def is_stateful_loader(value: Any) -> bool:
    """True if ``value`` is a data loader that saves and loads its position."""
    return isinstance(value, DataLoader) and is_stateful(value)


def state_of_loader(loader: Any) -> dict[str, Any]:
    """The loader's state. Draws no random number."""
    streams = RandomStreams()
    streams.watch([loader])
    held = vars(loader)
    # Asked for its state before it is iterated, the loader would make an iterator, which draws a seed.
    is_new = held.get("_iterator", loader) is None and held.get("next_iter_state") is None
    own = {} if is_new else loader.state_dict()
    return {**own, _GENERATORS: streams.collect_owned(), _RANKS: ranks(), _SIZES: _sizes_of(loader)}


def _sizes_of(loader: Any) -> dict[str, int | None]:
    """Return the samples of a batch and of the dataset."""
    return {"batch": loader.batch_size, "data": length_of(getattr(loader, "dataset", None))}


def _say_sizes(loader: Any, own: dict[str, Any], then: dict[str, int | None]) -> None:
    """Warn of other sizes than in the snapshot. Such a loader counts the samples of a sampler, and the batches of an
    iterable dataset.
    """
    now, given = _sizes_of(loader), own.get("_num_yielded") or 0
    batch, before = now["batch"], then["batch"]
    if batch and before and batch != before and given and loader._dataset_kind == _DatasetKind.Iterable:
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
    loader.load_state_dict(own)
    if own:
        loader.state_dict()  # makes the iterator, and draws its seed, now: the next iter() takes it
        for name in _COUNTERS:
            if name in own and name in vars(getattr(loader, "_iterator", loader)):
                setattr(loader._iterator, name, own[name])
    if generators is not None:
        streams = RandomStreams()
        streams.watch([loader])
        streams.restore_owned(generators)
