"""Worker processes of data loaders, and their random numbers.

A loader that keeps its workers (``persistent_workers=True``) draws their seed at its first iteration only. A restarted
process has no workers yet: they are started before the random generators are put back, so that the next iteration draws
what it would have drawn.

torchdata's ``StatefulDataLoader`` starts its workers anew in mid-epoch, from their seed, and gives them the state of
the dataset. ``KeepStreams`` adds the workers' random generators to that state: they then stand where they stood.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lazysnap.data.stateful import is_stateful
from lazysnap.data.streams import RandomStreams

logger = logging.getLogger(__name__)

_STREAMS, _OWN = "lazysnap_streams", "lazysnap_own"


def running_workers(loaders: Sequence[Any]) -> list[bool]:
    """Which loaders have workers that the next iteration will use again."""
    return [_keeps_workers(loader) and loader._iterator is not None for loader in loaders]


def start_workers(loaders: Sequence[Any], wanted: Sequence[bool]) -> None:
    """Start the workers of the loaders that had them, and end those of others. Draws random numbers."""
    for loader, had_workers in zip(loaders, wanted, strict=False):
        if not _keeps_workers(loader):
            continue
        if had_workers:
            logger.warning(
                "the data loader keeps its worker processes (persistent_workers=True): the order of its data is "
                "resumed exactly, random numbers drawn in the workers (augmentation) are not; set "
                "persistent_workers=False where they must be"
            )
        if had_workers and loader._iterator is None:
            iter(loader)
        elif not had_workers and not vars(loader).get("_initial_iter_for_state_dict"):
            loader._iterator = None


def _keeps_workers(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and bool(loader.persistent_workers)


class KeepStreams:
    """A ``worker_init_fn``: in a worker, the state of the dataset holds the worker's random generators, too."""

    def __init__(self, before: Callable[[int], None] | None) -> None:
        self.before = before

    def __call__(self, worker_id: int) -> None:
        """Called by torch in the worker, after it was seeded and before it reads anything."""
        if self.before is not None:
            self.before(worker_id)
        info = get_worker_info()
        if info is not None:
            _add_streams(info.dataset)


def keep_streams(loaders: Sequence[Any]) -> None:
    """Let workers of loaders that save their own state save their random generators as well."""
    for loader in loaders:
        if not is_stateful(loader) or not getattr(loader, "num_workers", 0):
            continue
        if not hasattr(loader.dataset, "__dict__"):
            logger.warning(
                "the data set is a %s, which takes no attributes: random numbers drawn in the loader's workers are not "
                "resumed exactly, the order of the data is; wrap it in a torch.utils.data.Dataset where they must be",
                type(loader.dataset).__qualname__,
            )
        elif not isinstance(loader.worker_init_fn, KeepStreams):
            loader.worker_init_fn = KeepStreams(loader.worker_init_fn)


def release_streams(loaders: Sequence[Any]) -> None:
    """Give the loaders their own ``worker_init_fn`` back."""
    for loader in loaders:
        if isinstance(getattr(loader, "worker_init_fn", None), KeepStreams):
            loader.worker_init_fn = loader.worker_init_fn.before


def _add_streams(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) and not is_stateful(dataset):
        return  # torchdata reads it again from the start, from the same seed: that is exact
    streams = RandomStreams()
    streams.watch([dataset])
    own_state = dataset.state_dict if is_stateful(dataset) else None
    own_load = dataset.load_state_dict if is_stateful(dataset) else None

    def state_dict() -> dict[str, Any]:
        own = {} if own_state is None else own_state()
        return {**(own if isinstance(own, dict) else {_OWN: own}), _STREAMS: streams.collect()}

    def load_state_dict(state: dict[str, Any]) -> None:
        own = dict(state)
        found = own.pop(_STREAMS, None)  # not in what was saved without lazysnap
        if own_load is not None:
            own_load(own.get(_OWN, own))
        if found is not None:
            streams.restore(found)

    dataset.state_dict, dataset.load_state_dict = state_dict, load_state_dict
