"""Code that runs in the worker processes of data loaders: it sends and restores their random generators.

Workers of torch's ``DataLoader`` send their state with each batch (``SendStates``). torchdata's ``StatefulDataLoader``
starts its workers again in mid-epoch, from their seed, and gives them the state of the dataset; ``KeepStreams`` adds
the workers' random generators to that state.

Seeding each batch by its number would need no states. But then augmentation would differ from a training without
lazysnap, and iterable datasets would still need states.
"""

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from lazysnap.data.own_state import forget_loaded_state, is_stateful, keeps_loaded_state, saves_position
from lazysnap.data.parts import is_iterable
from lazysnap.data.streams import RandomStreams

logger = logging.getLogger(__name__)

_STREAMS = "lazysnap_streams"
_OWN = "lazysnap_own"


@dataclass
class WorkerBatch:
    """A batch with the state of the worker process that made it."""

    batch: Any
    worker: int
    state: dict[str, Any] | None
    """``None``, if nothing has changed since the last batch."""
    can_continue: bool
    """True if another process can continue after this batch."""
    has_ended: bool
    """True if it holds the last sample of the worker's dataset, whose state is then that of the next epoch."""

    def pin_memory(self, device: Any = None) -> "WorkerBatch":
        """Called by torch in its thread."""
        return replace(self, batch=pin_memory(self.batch, device))  # type: ignore[no-untyped-call]


class SendStates:
    """A ``collate_fn`` of worker processes that sends their states, and the ``worker_init_fn`` that belongs to it.

    ``states``: the states with which the workers begin.
    """

    def __init__(self, loader: Any, states: Sequence[Any]) -> None:
        self._collate = loader.collate_fn
        self._init_worker = loader.worker_init_fn
        self._states = list(states)
        self._streams = RandomStreams()
        self._last_state = b""
        """The last sent state, pickled: only compared byte by byte, and never loaded."""
        self._is_first = True
        self._batch_size = loader.batch_size
        self._is_iterable = is_iterable(loader)
        self._saves = self._is_iterable and saves_position(loader.dataset)
        if loader.persistent_workers and keeps_loaded_state(loader.dataset):
            self._saves = False  # a worker without further samples would begin the next epoch at its end
        # An iterable dataset that saves nothing is read again from its start, with new workers.
        self._sends = not self._is_iterable or self._saves or loader.persistent_workers

    def begin(self, worker_id: int) -> None:
        """Called by torch in the worker, after it was seeded and before it reads anything."""
        if self._init_worker is not None:
            self._init_worker(worker_id)
        info = get_worker_info()
        assert info is not None
        state = self._states[worker_id]
        self._streams.watch([info.dataset])
        if state is not None:
            if "dataset" in state:
                dataset: Any = info.dataset
                dataset.load_state_dict(state["dataset"])
            self._streams.restore(state["streams"])
        self._last_state = pickle.dumps({"streams": self._streams.collect()})

    def __call__(self, samples: Any) -> WorkerBatch:
        """Return the batch of ``samples``, with the state of this process."""
        info = get_worker_info()
        assert info is not None
        batch = self._collate(samples)
        has_ended = self._is_iterable and self._batch_size is not None and len(samples) < self._batch_size
        if not self._sends:
            return WorkerBatch(batch, info.id, None, can_continue=False, has_ended=has_ended)
        if self._is_first:
            self._is_first = False
            self._streams.watch([info.dataset])
            forget_loaded_state(info.dataset)
        state = self._changed_state(info.dataset)
        can_continue = not self._is_iterable or self._saves
        return WorkerBatch(batch, info.id, state, can_continue=can_continue, has_ended=has_ended)

    def _changed_state(self, dataset: Any) -> dict[str, Any] | None:
        """Return the state of this process; ``None`` if it is the last sent one."""
        state: dict[str, Any] = {"streams": self._streams.collect()}
        if self._saves:
            state["dataset"] = dataset.state_dict()
        last_state = self._last_state
        self._last_state = pickle.dumps(state)
        return None if self._last_state == last_state else state


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
    """Restore the ``worker_init_fn`` of the loaders."""
    for loader in loaders:
        worker_init = getattr(loader, "worker_init_fn", None)
        if isinstance(worker_init, KeepStreams):
            loader.worker_init_fn = worker_init.before


def _add_streams(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) and not is_stateful(dataset):
        return  # torchdata reads it again from the start, from the same seed: that is exact
    streams = RandomStreams()
    streams.watch([dataset])
    save_own = getattr(dataset, "state_dict", None)
    load_own = getattr(dataset, "load_state_dict", None)

    def state_dict() -> dict[str, Any]:
        state = {} if save_own is None else save_own()
        if not isinstance(state, dict):
            state = {_OWN: state}
        return {**state, _STREAMS: streams.collect()}

    def load_state_dict(state: dict[str, Any]) -> None:
        state = dict(state)
        states_before = state.pop(_STREAMS, None)  # not in what was saved without lazysnap
        if load_own is not None:
            load_own(state.get(_OWN, state))
        if states_before is not None:
            streams.restore(states_before)

    dataset.state_dict = state_dict
    dataset.load_state_dict = load_state_dict
