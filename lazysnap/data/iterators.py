"""Iterators of torch's ``DataLoader``, and of torchdata's, that follow an ``IterationPlan``.

They skip indices in the sampler before the first batch, and record the changes of each batch. Worker processes send the
state of their random generators (and of a dataset that saves its own) with each batch after which it has changed.
Whenever each worker has given the same number of batches, these states are a checkpoint: new workers begin there, and
read again fewer batches than there are workers. Seeding each batch by its number would need no states. But then
augmentation would differ from a training without lazysnap, and iterable datasets would still need states.
"""

import functools
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lazysnap.data.own_state import (
    drop_early_iterator,
    forget_loaded_state,
    is_of_torchdata,
    is_stateful,
    keeps_loaded_state,
    saves_position,
)
from lazysnap.data.parts import is_iterable
from lazysnap.data.plan import IterationPlan
from lazysnap.data.streams import RandomStreams


def follow(plan: IterationPlan) -> bool:
    """Make the next iterator of the plan's loader follow the plan. False if that iterator is of an unknown kind."""
    base = plan.base
    if not is_of_torchdata(base):
        is_plain = isinstance(base, DataLoader) and type(base)._get_iterator is DataLoader._get_iterator
        if not is_plain or is_stateful(base):
            return False
    if base.persistent_workers and isinstance(base._iterator, _WorkersIterator) and plan.origin is None:
        base._iterator.plan = plan  # the next epoch
        return True
    was_early = drop_early_iterator(base)
    if plan.workers:
        was_early = False  # it drew the order of the epoch, too, so the next iterator draws again
    base._iterator = None
    base._get_iterator = functools.partial(_make_iterator, plan, was_early=was_early)
    return True


def _make_iterator(plan: IterationPlan, *, was_early: bool) -> Any:
    """Make the iterator of the loader's next iteration. ``was_early``: the program has already drawn its seed."""
    base = plan.base
    del base._get_iterator
    streams_here = None
    if (plan.origin is not None or was_early) and not plan.rereads:
        streams_here = plan.streams.collect()
    plan.begin()
    if plan.workers:
        iterator: Any = _make_with_workers(base, plan)
    else:
        if "dataset" in plan.start:
            base.dataset.load_state_dict(plan.start["dataset"])
        iterator = base._get_iterator()
        kind: Any = type(iterator)
        iterator.plan = plan
        iterator.__class__ = _in_process(kind)
    if streams_here is not None:
        plan.streams.restore(streams_here)
    return iterator


class _FollowsPlan:
    """An iterator of torch that follows a plan."""

    plan: IterationPlan
    has_passed = False

    def _next_index(self) -> Any:
        plan = self.plan
        if not self.has_passed:
            self.has_passed = True
            plan.pass_over(self)
        if not plan.workers:
            plan.before_batch()
        return super()._next_index()  # type: ignore[misc]


@functools.cache
def _in_process(kind: Any) -> type:
    """Return a subclass of ``kind``, an iterator that reads in this process, which follows a plan."""

    class InProcessIterator(_FollowsPlan, kind):  # type: ignore[misc]
        def _next_data(self) -> Any:
            plan = self.plan
            data = super()._next_data()
            if "dataset" in plan.start:
                forget_loaded_state(plan.base.dataset)
            plan.read += 1
            plan.has_ended = bool(getattr(self._dataset_fetcher, "ended", False))
            return data

    return InProcessIterator


def _make_with_workers(base: Any, plan: IterationPlan) -> Any:
    if not is_of_torchdata(base):
        return _with_workers(_MultiProcessingDataLoaderIter)(base, plan)
    torchdata: Any = sys.modules["torchdata.stateful_dataloader.stateful_dataloader"]
    loaded_state = base.next_iter_state  # of a checkpoint that the program loaded itself
    base.next_iter_state = None
    return _with_workers(torchdata._StatefulMultiProcessingDataLoaderIter)(base, plan, loaded_state)


@functools.cache
def _with_workers(kind: Any) -> Any:
    """Return a subclass of ``kind``, an iterator that reads in worker processes, which follows a plan."""
    return type("WorkersIterator", (_WorkersIterator, kind), {})


class _WorkersIterator(_FollowsPlan):
    """An iterator over batches of worker processes, which send their states with them."""

    def __init__(self, loader: Any, plan: IterationPlan, *further: Any) -> None:
        self.plan = plan
        workers = loader.num_workers
        self._states: list[Any] = list(plan.start.get("workers") or [None] * workers)
        """The last state of each worker up to the last given batch."""
        self._arrived = list(self._states)
        """The last received state of each worker, also of a waiting batch."""
        self._can_continue = [False] * workers
        """True for each worker after whose last batch another process can continue."""
        collate = loader.collate_fn
        init_worker = loader.worker_init_fn
        send_states = _SendStates(loader, self._states)
        loader.collate_fn = send_states
        loader.worker_init_fn = send_states.begin
        try:
            super().__init__(loader, *further)  # type: ignore[call-arg]
        finally:
            loader.collate_fn = collate
            loader.worker_init_fn = init_worker

    @property
    def _base_seed(self) -> int:
        """The seed of the workers: after a restart that of the earlier workers."""
        return int(vars(self)["seed"])

    @_base_seed.setter
    def _base_seed(self, seed: int) -> None:
        vars(self)["seed"] = self.plan.start.get("seed", seed)

    def _reset(self, loader: Any, first_iter: bool = False, **further: Any) -> None:
        plan = self.plan
        self.has_passed = False
        if not first_iter or (plan.origin or {}).get("stayed"):
            plan.begin(stayed=True)
        super()._reset(loader, first_iter, **further)  # type: ignore[misc]
        self._began_at = plan.read
        self._has_ended = False
        if not first_iter:  # a dataset begins again, which its last state does not contain
            for worker, state in enumerate(self._arrived):
                if state is not None:
                    self._arrived[worker] = {"streams": state["streams"]}
        self._states = list(self._arrived)
        self._note_checkpoint()

    def _get_data(self) -> Any:
        received: Any = super()._get_data()  # type: ignore[misc]
        data = received[1]
        if isinstance(data, tuple):  # of torchdata: with the number of the worker, and its own state
            data = data[0]
        if isinstance(data, _WorkerBatch) and data.state is not None:
            self._arrived[data.worker] = data.state
        return received

    def _next_data(self) -> Any:
        sent: Any = super()._next_data()  # type: ignore[misc]
        if not isinstance(sent, _WorkerBatch):
            return sent
        self.plan.read += 1
        if sent.state is not None:
            self._states[sent.worker] = sent.state
        self._can_continue[sent.worker] = sent.can_continue
        self._has_ended = self._has_ended or sent.has_ended
        is_round = (self.plan.read - self._began_at) % self.plan.workers == 0
        all_work = all(self._workers_status)  # type: ignore[attr-defined]
        if is_round and all_work and all(self._can_continue) and not self._has_ended:
            self._note_checkpoint()
        return sent.batch

    def _note_checkpoint(self) -> None:
        checkpoint = {"at": self.plan.read, "seed": self._base_seed, "workers": list(self._states)}
        self.plan.checkpoints.append(checkpoint)


# ---------------------------------------------------------------- in the worker processes


@dataclass
class _WorkerBatch:
    """A batch with the state of the worker process that made it."""

    batch: Any
    worker: int
    state: dict[str, Any] | None
    """``None``, if nothing has changed since the last batch."""
    can_continue: bool
    """True if another process can continue after this batch."""
    has_ended: bool
    """True if it holds the last sample of the worker's dataset, whose state is then that of the next epoch."""

    def pin_memory(self, device: Any = None) -> "_WorkerBatch":
        """Called by torch in its thread."""
        return replace(self, batch=pin_memory(self.batch, device))  # type: ignore[no-untyped-call]


class _SendStates:
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

    def __call__(self, samples: Any) -> _WorkerBatch:
        """Return the batch of ``samples``, with the state of this process."""
        info = get_worker_info()
        assert info is not None
        batch = self._collate(samples)
        has_ended = self._is_iterable and self._batch_size is not None and len(samples) < self._batch_size
        if not self._sends:
            return _WorkerBatch(batch, info.id, None, can_continue=False, has_ended=has_ended)
        if self._is_first:
            self._is_first = False
            self._streams.watch([info.dataset])
            forget_loaded_state(info.dataset)
        state = self._changed_state(info.dataset)
        can_continue = not self._is_iterable or self._saves
        return _WorkerBatch(batch, info.id, state, can_continue=can_continue, has_ended=has_ended)

    def _changed_state(self, dataset: Any) -> dict[str, Any] | None:
        """Return the state of this process; ``None`` if it is the last sent one."""
        state: dict[str, Any] = {"streams": self._streams.collect()}
        if self._saves:
            state["dataset"] = dataset.state_dict()
        last_state = self._last_state
        self._last_state = pickle.dumps(state)
        return None if self._last_state == last_state else state
