"""Positions of the training data loaders: each has its own, under Lightning's ``CombinedLoader``.

Fetchers of loaders without a length hold one untrained batch. Validation loaders have no position, but with persistent
workers they draw a seed only at their first iteration, which a restart must not draw again.
"""

import logging
import operator
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from lazysnap.data.layout import length_of
from lazysnap.data.resumable import ResumableLoader

logger = logging.getLogger(__name__)


class LoaderPositions:
    """The positions of the training loaders of one fit."""

    def __init__(self) -> None:
        self.loaders: list[Any] = []
        """The loaders of the program."""
        self._combined: Any = None
        self._combined_class: type = object
        self._resumable: list[ResumableLoader] = []
        self._pending: dict[str, Any] | None = None
        """The loaded state, until the next iteration begins."""

    def watch(self, combined: Any) -> None:
        """Track the positions of the loaders of ``combined`` from now on. Cheap if they are tracked already."""
        loaders = list(combined.flattened)
        if combined is self._combined and all(map(operator.is_, loaders, self.loaders)):
            return
        self.forget()
        self.loaders = loaders
        self._combined = combined
        self._combined_class = type(combined)
        self._resumable = [ResumableLoader(loader) for loader in loaders]

        def __iter__(_: Any) -> Any:
            return self._iterate()

        members = {"__iter__": __iter__, "__module__": self._combined_class.__module__}
        combined.__class__ = type(self._combined_class.__name__, (self._combined_class,), members)

    def forget(self) -> None:
        """Restore the loaders."""
        if self._combined is not None:
            self._combined.__class__ = self._combined_class
        self.loaders = []
        self._combined = None
        self._resumable = []

    def state_dict(self) -> dict[str, Any]:
        """Return the positions as plain values, with the states of stateful loaders."""
        if self._pending is not None:
            return self._pending
        consumed = getattr(self._combined._iterator, "_consumed", [])
        positions = [loader.position.state_dict() for loader in self._resumable]
        return {"loaders": positions, "consumed": list(consumed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at ``state``."""
        for loader, position in zip(self._resumable, state["loaders"], strict=False):
            loader.position.load_state_dict(position)
        self._pending = state

    @property
    def are_recounted(self) -> bool:
        """True if the batch size or the number of ranks differs from that at the recording of a position."""
        return any(loader.position.is_recounted for loader in self._resumable)

    @property
    def passed(self) -> int:
        """Number of batches before the position of the longest loader, after ``load_state_dict``."""
        num_batches = 0
        for loader in self._resumable:
            position = loader.position
            num_batches = max(num_batches, position.given or position.skipped)
        return num_batches

    def _iterate(self) -> Any:
        combined = self._combined
        loaders = combined._flattened
        combined._flattened = self._resumable
        try:
            self._combined_class.__iter__(combined)  # type: ignore[attr-defined]
        finally:
            combined._flattened = loaders
        if self._pending is not None:
            _resume_mode(combined._iterator, self._pending)
            self._pending = None
        for loader in self._resumable:
            loader.position.is_held = length_of(combined) is None
        return combined


def _resume_mode(iterator: Any, state: dict[str, Any]) -> None:
    """Restore which of several loaders were at their end."""
    if hasattr(iterator, "_consumed"):
        iterator._consumed = state["consumed"] or iterator._consumed
        return
    for number, position in enumerate(state["loaders"][: len(iterator.iterators)]):
        if position["given"] is None and not position["skip"]:
            iterator.iterators[number] = iter(())


def running_workers(loaders: Sequence[Any]) -> list[bool]:
    """Return which loaders have workers that the next iteration will reuse."""
    return [_keeps_workers(loader) and loader._iterator is not None for loader in loaders]


def start_workers(loaders: Sequence[Any], had_workers: Sequence[bool]) -> None:
    """Start the workers of the loaders that had workers, and end those of others. Draws random numbers."""
    for loader, had_some in zip(loaders, had_workers, strict=False):
        if not _keeps_workers(loader):
            continue
        if had_some:
            logger.warning(
                "the data loader keeps its worker processes (persistent_workers=True): the order of its data is "
                "resumed exactly, random numbers drawn in the workers (augmentation) are not; set "
                "persistent_workers=False where they must be"
            )
        if had_some and loader._iterator is None:
            iter(loader)
        elif not had_some and not vars(loader).get("_initial_iter_for_state_dict"):
            loader._iterator = None


def _keeps_workers(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and bool(loader.persistent_workers)
