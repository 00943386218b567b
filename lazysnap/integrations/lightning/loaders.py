"""Where the training data loaders stand, and how a restart gets them there.

The position that counts is the number of batches *trained* in this epoch: fetchers of loaders without a length are
one batch ahead. A loader that can save its own state (``state_dict`` and ``load_state_dict``, as torchdata's
``StatefulDataLoader``) is asked for it. Any other is started again as the epoch started it, with the generators as
they were then, and driven forward: by the sampler alone where nothing else can tell the difference, else by replaying
and discarding the batches.

Not exact: an iterable dataset in the main process whose *order* depends on global random numbers drawn between
batches that training draws from as well. Where workers are persistent (their generators outlive an epoch), the order is
exact but random augmentation in them is not; a warning says so.
"""

import logging
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from lazysnap.data.streams import RandomStreams
from lazysnap.data.workers import keep_streams, release_streams, running_workers, start_workers

logger = logging.getLogger(__name__)


class LoaderPosition:
    """Watches the fetches of one fit, and repeats them after a restart."""

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._at_iter: dict[str, Any] | None = None
        self._at_first: dict[str, Any] | None = None
        self._ahead: dict[str, Any] | None = None
        self._offset = 0
        self._restarts = _Restarts(streams)
        self._loaders: list[Any] = []
        self._had_workers: list[bool] = []

    def watch(self, loaders: list[Any]) -> None:
        """These are the training loaders now."""
        self._loaders = loaders
        keep_streams(loaders)

    def note_iter(self) -> None:
        """The loaders are about to be iterated from the start."""
        self._at_iter = self._streams.collect()
        self._at_first = self._ahead = None
        self._restarts = _Restarts(self._streams)
        self._had_workers = running_workers(self._loaders)

    def forget(self) -> None:
        """Let go of the loaders' iterators: their workers end when nobody holds them, and must not do so late."""
        self._restarts.forget()
        release_streams(self._loaders)
        self._loaders = []

    def note_start(self, trained: int) -> None:
        """The epoch begins at the loaders' first batch, with ``trained`` batches counted already.

        More than none after a restart from one of Lightning's own checkpoints, which begins the loaders again.
        """
        self._offset = trained

    def note_fetch(self, fetcher: Any) -> None:
        """The loaders are about to give their next batch."""
        self._restarts.note_fetch(_mode_iterator(fetcher).iterators)
        if fetcher.length is None:
            self._ahead = {"streams": self._streams.collect(), "loader": _own_state(fetcher)}
        elif fetcher.fetched == 0:
            self._at_first = self._streams.collect()

    def collect(self, fetcher: Any, trained: int) -> dict[str, Any]:
        """The position after ``trained`` batches, as plain values (and what a loader's own state holds)."""
        is_sized = fetcher.length is not None
        ahead = None if is_sized else self._ahead
        loader = _own_state(fetcher) if is_sized else (ahead or {}).get("loader")
        return {
            "trained": trained,
            "given": trained - self._offset,
            "at_iter": self._at_iter,
            "had_workers": self._had_workers,
            "at_first": self._at_first,
            "ahead": ahead and ahead["streams"],
            "loader": loader,
            "restarts": self._restarts.collect(_mode_iterator(fetcher).iterators),
        }

    def prepare(self, position: dict[str, Any]) -> None:
        """Before the loaders are iterated for the first time after a restart."""
        if position["loader"] is None:
            start_workers(self._loaders, position["had_workers"])
        if position["at_iter"] is not None:
            self._streams.restore(position["at_iter"])

    def land(self, position: dict[str, Any], fetcher: Any) -> None:
        """Bring freshly iterated loaders to ``position``.

        The generators are left anywhere: the caller restores them afterwards.
        """
        self._at_iter, self._at_first = position["at_iter"], position["at_first"]
        self._had_workers = position["had_workers"]
        self._ahead = {"streams": position["ahead"], "loader": position["loader"]}
        trained = position["given"]
        self._offset = position["trained"] - trained
        self._restarts = _Restarts(self._streams, trained, position["restarts"])
        # Before the first batch a loader's own state is still that of the epoch before, at its end.
        if trained and position["loader"] is not None:
            self._resume(position, fetcher, trained)
        elif fetcher.length is None:
            self._replay_ahead(position, fetcher, trained)
        elif trained:
            if position["at_first"] is not None:
                self._streams.restore(position["at_first"])
            if not _skip(fetcher, trained):
                logger.info("replaying %d batches of the data loaders", trained)
                for index in range(trained):
                    self._restarts.replay(index)
                    next(fetcher.iterator)

    def _resume(self, position: dict[str, Any], fetcher: Any, trained: int) -> None:
        _loaders(fetcher)[0].load_state_dict(position["loader"])
        fetcher.iterator = iter(fetcher.combined_loader)
        _mode_iterator(fetcher)._idx = trained
        if fetcher.length is None:
            self._fetch_ahead(position, fetcher)

    def _replay_ahead(self, position: dict[str, Any], fetcher: Any, trained: int) -> None:
        # The fetcher holds the first batch of the epoch already.
        if trained:
            logger.info("replaying %d batches of the data loaders", trained)
            for _ in range(trained - 1):
                next(fetcher.iterator)
            self._fetch_ahead(position, fetcher)

    def _fetch_ahead(self, position: dict[str, Any], fetcher: Any) -> None:
        if position["ahead"] is not None:
            self._streams.restore(position["ahead"])
        fetcher.batches = [next(fetcher.iterator)]


class _Restarts:
    """Of several loaders the shorter ones start again in mid-epoch: the generators as they were when that happened."""

    def __init__(self, streams: RandomStreams, index: int = 0, found: list[Any] | None = None) -> None:
        self._streams = streams
        self._index = index
        self._found: list[Any] = list(found or ())
        self._iterators: list[Any] = []
        self._before: dict[str, Any] = {}

    def note_fetch(self, iterators: list[Any]) -> None:
        if len(iterators) > 1:
            self._compare(iterators)
            self._before = self._streams.collect()
            self._index += 1

    def collect(self, iterators: list[Any]) -> list[Any]:
        if len(iterators) > 1:
            self._compare(iterators)
        return list(self._found)

    def forget(self) -> None:
        self._iterators = []

    def replay(self, index: int) -> None:
        for at, streams in self._found:
            if at == index:
                self._streams.restore(streams)

    def _compare(self, iterators: list[Any]) -> None:
        if self._before and any(old is not new for old, new in zip(self._iterators, iterators, strict=False)):
            self._found.append([self._index - 1, self._before])
        self._iterators = list(iterators)


def _loaders(fetcher: Any) -> list[Any]:
    return list(fetcher.combined_loader.flattened)


def _mode_iterator(fetcher: Any) -> Any:
    return fetcher.combined_loader._iterator


def _own_state(fetcher: Any) -> Any:
    """The state of a single loader that keeps one; several together share counters that they do not know."""
    loaders = _loaders(fetcher)
    if len(loaders) == 1 and all(
        callable(getattr(loaders[0], name, None)) for name in ("state_dict", "load_state_dict")
    ):
        return loaders[0].state_dict()
    return None


def _skip(fetcher: Any, batches: int) -> bool:
    """Drive the sampler forward without reading data, where that leaves the loader in the same state."""
    mode = _mode_iterator(fetcher)
    if len(mode.iterators) != 1:
        return False
    loader, inner = _loaders(fetcher)[0], mode.iterators[0]
    if type(inner) is not _SingleProcessDataLoaderIter or not isinstance(loader, DataLoader):
        return False
    if inner._dataset_kind != _DatasetKind.Map:
        return False
    for _ in range(batches):
        inner._next_index()  # type: ignore[no-untyped-call]
    inner._num_yielded += batches
    mode._idx += batches
    return True
