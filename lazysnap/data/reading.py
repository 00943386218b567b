"""Iterators of torch's ``DataLoader`` that begin behind the batches that were trained.

``Course`` says where one iteration of a loader begins, and notes what a restart needs to begin there:

* Indices of a map-style dataset are passed over in the sampler; no sample is fetched.
* Worker processes send the state of their random generators (and of a dataset that saves its own) with each batch
  after which it has changed. Whenever each worker gave the same number of batches, these states are a mark: new workers
  begin there, and fewer batches than there are workers are read again.
* An iterable dataset in this process that saves its own state is asked for it.
"""

import functools
import itertools
import logging
import pickle
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as _OfTorch

from lazysnap.data.digests import digest_of
from lazysnap.data.parts import base_of, held, is_iterable
from lazysnap.data.share import is_first_rank
from lazysnap.data.stateful import drop_early_iterator, is_stateful, load_dataset, saves_position
from lazysnap.data.streams import RandomStreams, collect_rng, has_drawn

if TYPE_CHECKING:
    from lazysnap.data.position import Position

logger = logging.getLogger(__name__)

_END = object()
_WATCHED = 40
"""Batches of an epoch in which draws of the sampler or the dataset from global generators are looked for."""


class Course:
    """One iteration of a ``DataLoader``: where it begins, and what was noted on its way.

    Used by the iterator of torch (``follow``), which reads one batch ahead under Accelerate (``looks_ahead``). It has
    many attributes: what is noted of each batch until the batch is over.
    """

    def __init__(self, position: "Position", *, looks_ahead: bool = False) -> None:
        # A loader may hold its iterator, and that holds this; a cycle would keep worker processes.
        self._position, self._base = weakref.ref(position), weakref.ref(base_of(position.loader))
        self.streams = position.streams
        self.looks_ahead = looks_ahead
        self.recorded: dict[str, Any] = {}
        """Random generators as they were when the iteration began, before its first batch and before the last one."""
        self.marks: deque[dict[str, Any]] = deque(maxlen=2)
        """States of the dataset and of workers behind ``at`` batches."""
        self.read = 0
        """Batches behind which the iterator stands."""
        self.passes = 0
        """Batches to pass over by their indices."""
        self.mark: dict[str, Any] = {}
        """The mark at which it begins."""
        self.origin: dict[str, Any] | None = None
        """The recorded generators with which it begins; ``None``: those of the program."""
        self.is_read_again = False
        """True if batches follow that are read again: the generators of the program are put back behind them."""
        self.before: dict[int, dict[str, Any] | None] = {}
        """Generators to put back before a batch is read, by its number; ``None``: those of the program."""
        self.has_ended = False
        """True if the iterable dataset gave its last sample: its own state is that of the next epoch."""
        self._here: dict[str, Any] | None = None
        self._is_order_noted = False

    @property
    def base(self) -> Any:
        """The loader of torch."""
        return self._base()

    @property
    def is_watched(self) -> bool:
        """True until it is known that the order of the data may depend on the global generators."""
        position = self._position()
        return position is not None and position.may_draw

    def note_draws(self, what: str) -> None:
        """``what`` drew from them between two batches."""
        if (position := self._position()) is not None:
            position.note_draws(what)

    @property
    def _has_other_workers(self) -> bool:
        position = self._position()
        return position is not None and position.has_other_workers

    def _watch(self) -> None:
        if (position := self._position()) is not None:
            self.streams.watch([position.loader, self.base])

    @property
    def workers(self) -> int:
        """Worker processes of the loader."""
        return int(getattr(self.base, "num_workers", 0))

    def begin(self, *, stayed: bool = False) -> None:
        """The iterator of torch is made, or begins another epoch with workers that ``stayed``."""
        if self.origin is None:
            self.recorded |= {"at_iter": self.streams.collect(), "stayed": stayed}
        else:
            self.streams.restore(self.origin["at_iter"])

    def pass_over(self, iterator: Any) -> None:
        """Before the first index is taken from the sampler: leave ``passes`` batches out."""
        self._watch()
        self._here = self.streams.collect()
        if self.origin is None or "at_first" not in self.origin:  # or it was captured before its first batch
            self._note_streams()
        elif not self.workers or self._has_other_workers:
            self.streams.restore(self.origin["at_first"])
        self.read = self.passes or self.mark.get("at", 0)
        if self.passes:
            self.note_order(next(iterator._sampler_iter, None))
            last = self.passes - 1
            if last and next(itertools.islice(iterator._sampler_iter, last - 1, last), _END) is _END:
                logger.warning("the data ends before batch %d, where it was to go on", self.passes)
            for name in ("_num_yielded", "_sampler_iter_yielded"):
                if name in held(iterator):
                    setattr(iterator, name, self.passes)
        if self.origin is not None and not self.workers and not self.is_read_again:
            self.streams.restore(self._here)

    def note_order(self, index: Any) -> None:
        """Note a digest of the epoch's first indices; after a restart compare it with that of before."""
        if self._is_order_noted or is_iterable(self.base):
            return
        self._is_order_noted = True
        digest = digest_of(index)
        before = (self.origin or {}).get("order")
        self.recorded["order"] = digest
        position = self._position()
        if before is None or before == digest or position is None or position.is_recounted:
            return
        if is_first_rank():
            logger.warning(
                "the sampler of %s gives this epoch in another order than before the restart: some samples are skipped "
                "and others trained twice. Its order comes from something that no snapshot holds; seed it from "
                "torch, NumPy or random, or from a generator that it keeps in an attribute",
                type(self.base.dataset).__name__,
            )

    def before_batch(self) -> None:
        """The indices of the next batch are taken, and it is read then."""
        if self.read + 1 in self.before:
            streams = self.before.pop(self.read + 1) or self._here
            assert streams is not None
            self._watch()
            self.streams.restore(streams)
        if self.looks_ahead:
            self._note_streams()
            if self.read and (own := self.own()):
                self.marks.append({"at": self.read, **own})

    def _note_streams(self) -> None:
        self.recorded["ahead"] = streams = self.streams.collect()
        self.recorded.setdefault("at_first", streams)

    def own(self) -> dict[str, Any]:
        """Return the states that the dataset and the collate function save themselves, in this process."""
        found = {}
        if is_iterable(self.base):
            if not saves_position(self.base.dataset):
                return {}
            found["dataset"] = self.base.dataset.state_dict()
        if is_stateful(self.base.collate_fn):
            found["collate"] = self.base.collate_fn.state_dict()
        return found

    def mark_at(self, given: int, *, is_at_end: bool) -> dict[str, Any] | None:
        """Return the newest mark behind at most ``given`` batches, of which ``is_at_end``: the last must be left."""
        if not self.looks_ahead and not self.workers and given and given == self.read and (own := self.own()):
            return {"at": given, **own, "has_ended": self.has_ended}
        most = given - 1 if is_at_end and self.looks_ahead else given
        return next((one for one in reversed(self.marks) if one["at"] <= most), None)


def follow(course: Course) -> bool:
    """Let the next iterator of the course's loader take it. False if that iterator is of an unknown kind."""
    base = course.base
    is_of_torchdata = type(base).__name__ == "StatefulDataLoader"
    is_plain = isinstance(base, DataLoader) and type(base)._get_iterator is DataLoader._get_iterator
    if is_of_torchdata and not course.workers:
        drop_early_iterator(base)
        base._get_iterator = functools.partial(_make, course)
    elif not is_plain or is_of_torchdata or is_stateful(base):
        return False
    elif isinstance(base._iterator, _FromWorkers) and course.origin is None:
        base._iterator.course = course  # workers that stay: the next epoch
    else:
        base._iterator = None
        base._get_iterator = functools.partial(_make, course)
    return True


def _make(course: Course) -> Any:
    """Make the iterator of the loader's next iteration."""
    base, streams = course.base, course.streams
    del base._get_iterator
    here = None if course.origin is None or course.is_read_again else streams.collect()
    course.begin()
    if course.workers:
        iterator: Any = _FromWorkers(base, course)
    else:
        load_dataset(base.dataset, course.mark.get("dataset"))
        if "collate" in course.mark:
            base.collate_fn.load_state_dict(course.mark["collate"])
        iterator = base._get_iterator()
        kind: Any = type(iterator)
        iterator.course, iterator.__class__ = course, _here(kind)
    if here is not None:
        streams.restore(here)
    return iterator


class _Follows:
    """An iterator of torch on a course."""

    course: Course
    has_passed = False

    def _next_index(self) -> Any:
        course = self.course
        if not self.has_passed:
            self.has_passed = True
            course.pass_over(self)
        if not course.workers:
            course.before_batch()
        is_early = 0 < self._num_yielded < _WATCHED  # type: ignore[attr-defined]
        before = collect_rng() if is_early and course.is_watched else None
        index = super()._next_index()  # type: ignore[misc]
        course.note_order(index)
        if before is not None and has_drawn(before):
            course.note_draws(f"the sampler of {type(course.base.dataset).__name__}")
        return index


@functools.cache
def _here(kind: Any) -> type:
    """Return the iterator of ``kind`` that reads in this process, on a course."""

    class Here(_Follows, kind):  # type: ignore[misc]
        def _next_index(self) -> Any:
            course, index = self.course, super()._next_index()
            # The first batch may fill a buffer, and set up what is drawn from later. A saved position needs no draws.
            is_early = 0 < self._num_yielded < _WATCHED and course.is_watched
            is_unsaved = is_early and is_iterable(course.base) and not saves_position(course.base.dataset)
            self.before = collect_rng() if is_unsaved else None
            return index

        def _next_data(self) -> Any:
            course, dataset = self.course, self.course.base.dataset
            data = super()._next_data()
            if self.before is not None and has_drawn(self.before):
                course.note_draws(type(dataset).__name__)
            course.read += 1
            course.has_ended = bool(getattr(self._dataset_fetcher, "ended", False))
            return data

    return Here


class _FromWorkers(_Follows, _OfTorch):
    """An iterator over batches of worker processes, which come with the states of these."""

    def __init__(self, loader: Any, course: Course) -> None:
        self.course = course
        workers, mark = loader.num_workers, course.mark
        self._states: list[Any] = list(mark.get("workers") or [None] * workers)
        """The last state of each worker that came with a batch that was given."""
        self._arrived = list(self._states)
        self._can_begin = [False] * workers
        """The workers that can begin behind their last batch."""
        collate, begin = loader.collate_fn, loader.worker_init_fn
        loader.collate_fn = send = SendStates(loader, self._states)
        loader.worker_init_fn = send.begin
        try:
            super().__init__(loader)
        finally:
            loader.collate_fn, loader.worker_init_fn = collate, begin

    @property
    def _base_seed(self) -> int:
        """The seed of the workers: after a restart that of the workers before."""
        return int(vars(self)["seed"])

    @_base_seed.setter
    def _base_seed(self, seed: int) -> None:
        vars(self)["seed"] = self.course.mark.get("seed", seed)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        course, self.has_passed = self.course, False
        if not first_iter or (course.origin or {}).get("stayed"):
            course.begin(stayed=True)
        super()._reset(loader, first_iter)
        self._began_at, self._has_ended = course.read, False
        if not first_iter:  # a dataset begins anew, which its last state does not say
            kept = [state and {name: state[name] for name in state if name != "dataset"} for state in self._arrived]
            self._arrived = kept
        self._states = list(self._arrived)
        self._note_mark()

    def _get_data(self) -> Any:
        index, data = super()._get_data()  # type: ignore[no-untyped-call]
        if isinstance(data, Sent) and data.state is not None:
            self._arrived[data.worker] = data.state
        return index, data

    def _next_data(self) -> Any:
        course = self.course
        sent: Any = super()._next_data()  # type: ignore[no-untyped-call]
        if not isinstance(sent, Sent):
            return sent
        course.read += 1
        if sent.state is not None:
            self._states[sent.worker] = sent.state
        self._can_begin[sent.worker] = sent.can_begin
        self._has_ended = self._has_ended or sent.has_ended
        is_round = (course.read - self._began_at) % self._num_workers == 0 and all(self._workers_status)
        if is_round and all(self._can_begin) and not self._has_ended:
            self._note_mark()
        return sent.batch

    def _note_mark(self) -> None:
        self.course.marks.append({"at": self.course.read, "seed": self._base_seed, "workers": list(self._states)})


@dataclass
class Sent:
    """A batch, and the state of the worker process that made it."""

    batch: Any
    worker: int
    state: dict[str, Any] | None
    """``None``, if nothing was drawn since the last one."""
    can_begin: bool
    """True if another process can begin behind this batch."""
    has_ended: bool
    """True if it holds the last sample of the worker's dataset, whose state is then that of the next epoch."""

    def pin_memory(self, device: Any = None) -> "Sent":
        """Called by torch in its thread."""
        return replace(self, batch=pin_memory(self.batch, device))  # type: ignore[no-untyped-call]


class SendStates:
    """A ``collate_fn`` of worker processes that sends their states, and the ``worker_init_fn`` that belongs to it.

    ``states``: those with which the workers begin.
    """

    def __init__(self, loader: Any, states: Sequence[Any]) -> None:
        self._collate, self._begin, self._states = loader.collate_fn, loader.worker_init_fn, list(states)
        self._streams = RandomStreams()
        self._last = b""
        """The state that was sent last, pickled: compared byte by byte, and never loaded."""
        self._is_new = True
        self._size = loader.batch_size
        self._is_stream = is_iterable(loader)
        self._saves = self._is_stream and saves_position(loader.dataset)
        # A stream that saves nothing is read again from its start, with new workers: no state of these helps.
        self._is_used = not self._is_stream or self._saves or loader.persistent_workers

    def begin(self, worker_id: int) -> None:
        """Called by torch in the worker, after it was seeded and before it reads anything."""
        if self._begin is not None:
            self._begin(worker_id)
        info, state = get_worker_info(), self._states[worker_id]
        assert info is not None
        self._streams.watch([info.dataset])
        if state is not None:
            load_dataset(info.dataset, state.get("dataset"))
            if "collate" in state:
                self._collate.load_state_dict(state["collate"])
            self._streams.restore(state["streams"])
        self._last = pickle.dumps({"streams": self._streams.collect()})

    def __call__(self, samples: Any) -> Sent:
        """Return the batch of ``samples``, with the state of this process."""
        info = get_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        batch = self._collate(samples)
        has_ended = self._is_stream and self._size is not None and len(samples) < self._size
        if not self._is_used:
            return Sent(batch, info.id, None, False, has_ended)
        if self._is_new:
            self._is_new = False
            self._streams.watch([dataset])
        state: dict[str, Any] = {"streams": self._streams.collect()}
        if self._saves:
            state["dataset"] = dataset.state_dict()
        if is_stateful(self._collate):
            state["collate"] = self._collate.state_dict()
        before, self._last = self._last, pickle.dumps(state)
        can_begin = not self._is_stream or self._saves
        return Sent(batch, info.id, None if before == self._last else state, can_begin, has_ended)
