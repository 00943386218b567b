"""Iterators of torch's ``DataLoader`` that follow an ``IterationPlan``.

They skip indices in the sampler before the first batch, and record the changes of each batch. Worker processes send the
state of their random generators (and of a dataset that saves its own) with each batch after which it has changed.
Whenever each worker has given the same number of batches, these states are a checkpoint: new workers begin there, and
read again fewer batches than there are workers.
"""

import functools
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lazysnap.data.own_state import (
    drop_early_iterator,
    forget_loaded_state,
    is_stateful,
    is_torchdata_in_process,
)
from lazysnap.data.plan import IterationPlan
from lazysnap.data.workers import SendStates, WorkerBatch


def follow(plan: IterationPlan) -> bool:
    """Make the next iterator of the plan's loader follow the plan. False if that iterator is of an unknown kind."""
    base = plan.base
    was_early = False
    if is_torchdata_in_process(base):
        was_early = drop_early_iterator(base)
    else:
        is_plain = isinstance(base, DataLoader) and type(base)._get_iterator is DataLoader._get_iterator
        if not is_plain or is_stateful(base):
            return False
        if isinstance(base._iterator, _WorkersIterator) and plan.origin is None:
            base._iterator.plan = plan  # persistent workers: the next epoch
            return True
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
        iterator: Any = _WorkersIterator(base, plan)
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
        index = super()._next_index()  # type: ignore[misc]
        plan.note_index(index)
        return index


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


class _WorkersIterator(_FollowsPlan, _MultiProcessingDataLoaderIter):
    """An iterator over batches of worker processes, which send their states with them."""

    def __init__(self, loader: Any, plan: IterationPlan) -> None:
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
        send_states = SendStates(loader, self._states)
        loader.collate_fn = send_states
        loader.worker_init_fn = send_states.begin
        try:
            super().__init__(loader)
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

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        plan = self.plan
        self.has_passed = False
        if not first_iter or (plan.origin or {}).get("stayed"):
            plan.begin(stayed=True)
        super()._reset(loader, first_iter)
        self._began_at = plan.read
        self._has_ended = False
        if not first_iter:  # a dataset begins again, which its last state does not contain
            for worker, state in enumerate(self._arrived):
                if state is not None:
                    self._arrived[worker] = {"streams": state["streams"]}
        self._states = list(self._arrived)
        self._note_checkpoint()

    def _get_data(self) -> Any:
        index, data = super()._get_data()  # type: ignore[no-untyped-call]
        if isinstance(data, WorkerBatch) and data.state is not None:
            self._arrived[data.worker] = data.state
        return index, data

    def _next_data(self) -> Any:
        sent: Any = super()._next_data()  # type: ignore[no-untyped-call]
        if not isinstance(sent, WorkerBatch):
            return sent
        self.plan.read += 1
        if sent.state is not None:
            self._states[sent.worker] = sent.state
        self._can_continue[sent.worker] = sent.can_continue
        self._has_ended = self._has_ended or sent.has_ended
        is_round = (self.plan.read - self._began_at) % self._num_workers == 0 and all(self._workers_status)
        if is_round and all(self._can_continue) and not self._has_ended:
            self._note_checkpoint()
        return sent.batch

    def _note_checkpoint(self) -> None:
        checkpoint = {"at": self.plan.read, "seed": self._base_seed, "workers": list(self._states)}
        self.plan.checkpoints.append(checkpoint)
