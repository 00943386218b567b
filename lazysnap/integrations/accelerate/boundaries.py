"""When a step is over: at the first batch that is fetched after an optimizer step."""

from collections.abc import Callable
from typing import Any

import torch

from lazysnap.data.position import Position, tick
from lazysnap.data.resumable import make_resumable
from lazysnap.state.wrappers import stepping


class BoundaryWatch:
    """Watches prepared optimizers and loaders, and calls ``at_boundary`` between two steps.

    A loader whose iteration began after the step is one of evaluation, in the middle of the training loop's body; its
    fetches are no boundary while a loader that was iterated before the step still is.
    """

    def __init__(
        self, at_boundary: Callable[[], None], gate: Callable[[], None], counted_epochs: Callable[[], dict[str, int]]
    ) -> None:
        """``gate``: called when an iteration ends, since weights may be swapped behind it without an optimizer step.

        ``counted_epochs``: returns the program's counters of epochs, by name.
        """
        self._at_boundary = at_boundary
        self._gate = gate
        self._counted_epochs = counted_epochs
        self._watched: list[Position] = []
        self._stepped_at: int | None = None
        self._hooks: dict[int, Any] = {}

    @property
    def positions(self) -> list[Position]:
        """The positions of the watched loaders, in the order in which they came."""
        if not all(position.loader is not None for position in self._watched):
            self._watched = [position for position in self._watched if position.loader is not None]
        return self._watched

    @property
    def has_stepped(self) -> bool:
        """True if an optimizer stepped since the last boundary."""
        return self._stepped_at is not None

    def passed(self) -> None:
        """The boundary after the last step is over."""
        self._stepped_at = None

    def note(self) -> None:
        """Act on the boundary before the next batch, with or without an optimizer step."""
        self._stepped_at = tick()

    def watch_loader(self, loader: Any) -> None:
        """Record the iterations of ``loader``, in place."""
        position = make_resumable(loader)
        if not any(one is position for one in self.positions):
            self._watched.append(position)
            position.before_fetch = lambda: self._before_fetch(position)
            position.at_end = self._gate
            position.counted_epochs = self._counted_epochs

    def position_of(self, loader: Any) -> Position | None:
        """The position of a watched loader; ``None`` for any other."""
        known = getattr(loader, "_lazysnap_position", None)
        return known if any(known is one for one in self.positions) else None

    def watch_optimizers(self, optimizers: list[Any]) -> None:
        """Notice the steps of ``optimizers``, each once."""
        for optimizer in optimizers:
            inner = stepping(optimizer)
            if id(inner) not in self._hooks:
                self._hooks[id(inner)] = inner.register_step_post_hook(self._note_step)

    def close(self) -> None:
        """Let go of optimizers and loaders."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        for position in self.positions:
            position.before_fetch = position.at_end = position.counted_epochs = None
        self._watched = []

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.note()
        for position in self.positions:
            position.note_step()

    def _before_fetch(self, position: Position) -> None:
        stepped_at = self._stepped_at
        if stepped_at is None:
            return
        earlier = [one for one in self.positions if one.began is not None and one.began < stepped_at]
        if not earlier or any(one is position for one in earlier):
            self._at_boundary()
