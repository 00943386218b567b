"""Step boundaries: a step ends when the first batch after an optimizer step is fetched."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lazysnap.data.iteration import tick
from lazysnap.data.position import Position
from lazysnap.data.resumable import make_resumable
from lazysnap.state.wrappers import stepping


class BoundaryWatch:
    """Watches prepared optimizers and loaders, and calls ``at_boundary`` between two steps.

    A loader whose iteration began after the step is one of evaluation, within the body of the training loop. Its
    fetches are no boundary while the iteration of another loader, which began before the step, continues.
    """

    def __init__(
        self, at_boundary: Callable[[], None], gate: Callable[[], None], counted_epochs: Callable[[], dict[str, int]]
    ) -> None:
        """Nothing is watched yet.

        Args:
            at_boundary: called between two steps.
            gate: called when an iteration ends, because weights may be swapped after it without an optimizer step.
            counted_epochs: returns the program's counters of epochs, by name.
        """
        self._at_boundary = at_boundary
        self._gate = gate
        self._counted_epochs = counted_epochs
        self._watched: list[Position] = []
        self._stepped_at: int | None = None
        """The tick of the last optimizer step; ``None`` after its boundary."""
        self._hooks: dict[int, Any] = {}
        """The hooks of the watched optimizers, by their ids."""

    @property
    def positions(self) -> list[Position]:
        """The positions of the watched loaders, in the order in which they were prepared."""
        # The program may have dropped some of the loaders.
        self._watched = [position for position in self._watched if position.loader is not None]
        return self._watched

    @property
    def has_stepped(self) -> bool:
        """True if an optimizer stepped since the last boundary."""
        return self._stepped_at is not None

    def pass_boundary(self) -> None:
        """Mark the boundary after the last optimizer step as done: the next one needs another step."""
        self._stepped_at = None

    def expect_boundary(self) -> None:
        """Make the next batch a boundary, with or without an optimizer step."""
        self._stepped_at = tick()

    def watch_loader(self, loader: Any) -> None:
        """Record the iterations of ``loader``, in place."""
        position = make_resumable(loader)
        if position not in self.positions:
            self._watched.append(position)
            position.before_fetch = partial(self._before_fetch, position)
            position.at_end = self._gate
            position.counted_epochs = self._counted_epochs

    def position_of(self, loader: Any) -> Position | None:
        """Return the position of a watched loader; ``None`` for any other."""
        position: Position | None = getattr(loader, "_lazysnap_position", None)
        if position not in self.positions:
            return None
        return position

    def watch_optimizers(self, optimizers: list[Any]) -> None:
        """Watch the steps of ``optimizers``, each once."""
        for optimizer in optimizers:
            inner = stepping(optimizer)
            if id(inner) not in self._hooks:
                self._hooks[id(inner)] = inner.register_step_post_hook(self._after_step)

    def close(self) -> None:
        """Stop watching optimizers and loaders."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        for position in self.positions:
            position.before_fetch = None
            position.at_end = None
            position.counted_epochs = None
        self._watched = []

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.expect_boundary()
        for position in self.positions:
            position.note_step()

    def _before_fetch(self, position: Position) -> None:
        stepped_at = self._stepped_at
        if stepped_at is None:
            return
        began_before = []
        for watched in self.positions:
            if watched.began is not None and watched.began < stepped_at:
                began_before.append(watched)
        if not began_before or position in began_before:
            self._at_boundary()
