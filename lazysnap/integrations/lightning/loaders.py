"""Positions of the training data loaders: each has its own, under Lightning's ``CombinedLoader``.

A single loader that saves its own state (torchdata's ``StatefulDataLoader``) is asked for it; all others are driven
forward after a restart. Fetchers of loaders without a length hold one batch that was not trained.
"""

from typing import Any

from lazysnap.data.resumable import Recorded
from lazysnap.data.share import length_of
from lazysnap.data.workers import keep_streams, release_streams


class LoaderPositions:
    """The positions of the training loaders of one fit."""

    def __init__(self) -> None:
        self.loaders: list[Any] = []
        """The program's own."""
        self._combined: Any = None
        self._kind: type = object
        self._watched: list[Recorded] = []
        self._landing: dict[str, Any] | None = None
        """The state that was loaded and not iterated yet."""

    def watch(self, combined: Any) -> None:
        """Iterate the loaders of ``combined`` by their positions from now on. Cheap where they are the same."""
        loaders = list(combined.flattened)
        if combined is self._combined and all(one is old for one, old in zip(loaders, self.loaders, strict=False)):
            return
        self.forget()
        keep_streams(loaders)
        self.loaders, self._combined, self._kind = loaders, combined, type(combined)
        self._watched = [Recorded(one) for one in loaders]
        ours = {"__iter__": lambda _: self._iterate(), "__module__": self._kind.__module__}
        combined.__class__ = type(self._kind.__name__, (self._kind,), ours)

    def forget(self) -> None:
        """Leave the loaders as they were."""
        if self._combined is not None:
            self._combined.__class__ = self._kind
        release_streams(self.loaders)
        self.loaders, self._combined, self._watched = [], None, []

    def state_dict(self) -> dict[str, Any]:
        """Return the positions as plain values (and what a loader's own state holds)."""
        if self._landing is not None:
            return self._landing
        consumed = getattr(self._combined._iterator, "_consumed", [])
        return {"loaders": [one.position.state_dict() for one in self._watched], "consumed": list(consumed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at ``state``."""
        for one, position in zip(self._watched, state["loaders"], strict=False):
            one.position.load_state_dict(position)
        self._landing = state

    @property
    def are_recounted(self) -> bool:
        """True if one of them has batches of another size, or of other ranks, than when its position was recorded."""
        return any(one.position.is_recounted for one in self._watched)

    @property
    def passed(self) -> int:
        """Batches behind which the longest of them goes on, after ``load_state_dict``."""
        return max((one.position.given or one.position.skipped for one in self._watched), default=0)

    def _iterate(self) -> Any:
        combined, own = self._combined, self._combined._flattened
        combined._flattened = self._watched
        try:
            self._kind.__iter__(combined)  # type: ignore[attr-defined]
        finally:
            combined._flattened = own
        iterator = combined._iterator
        landing, self._landing = self._landing, None
        if landing is not None and hasattr(iterator, "_consumed"):
            iterator._consumed = landing["consumed"] or iterator._consumed
        elif landing is not None:
            for number, position in enumerate(landing["loaders"][: len(iterator.iterators)]):
                if position["given"] is None and not position["skip"]:
                    iterator.iterators[number] = iter(())  # a shorter one, that was at its end
        for one in self._watched:
            one.position.is_held = length_of(combined) is None
        return combined
