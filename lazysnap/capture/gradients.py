"""Gradients that wait: a backward left them since the last step of their optimizer, and its next step will use them.

A snapshot holds no gradients, so a step boundary with gradients that wait is not captured. Not every such gradient is
used: the loss of a generator leaves gradients in its discriminator, which clears them before its own backward.
That is learned from the first time: an optimizer that steps without the gradients of a boundary has dropped them.
"""

import weakref
from collections.abc import Iterator, Sequence

import torch

from lazysnap.state.sharding import local_of

_MOST_BOUNDARIES = 64
"""Boundaries in a row that wait for one optimizer."""
_STEPPED = "_lazysnap_stepped"
"""Attribute of a gradient: its version at the last step of its optimizer."""
_WAITS = "_lazysnap_waits"
"""Attribute of a gradient that waited at a boundary."""


class WaitingGradients:
    """The gradients of all captured optimizers. Marks are attributes of gradients: a new gradient has none."""

    def __init__(self) -> None:
        self._waits: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers for which a boundary waited since their last step, and how many boundaries in a row."""
        self._dropping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that are known to step without the gradients of a boundary."""
        self._abandoned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that no boundary waits for any more."""

    def accept(self, optimizer: torch.optim.Optimizer) -> None:
        """Treat the present gradients as used: nothing is known of the steps before. ``step`` does it, too."""
        for gradient in _gradients(optimizer):
            setattr(gradient, _STEPPED, gradient._version)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the optimizer has stepped. Hot."""
        if optimizer in self._waits:
            del self._waits[optimizer]
            kept = [gradient for gradient in _gradients(optimizer) if _is_marked(gradient)]
            if kept:
                self._dropping.discard(optimizer)
            else:
                self._dropping.add(optimizer)
            for gradient in kept:
                delattr(gradient, _WAITS)
        self.accept(optimizer)

    def awaited(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose gradients wait at this boundary, which then is not to be captured. Hot."""
        awaited = []
        for optimizer in optimizers:
            waiting = _changed_since_step(optimizer)
            if not waiting:
                self._waits.pop(optimizer, None)
                continue
            if optimizer in self._waits and not any(_is_marked(gradient) for gradient in waiting):
                self._dropping.add(optimizer)  # those of the boundary before were cleared without a step
            for gradient in waiting:
                setattr(gradient, _WAITS, True)
            self._waits[optimizer] = self._waits.get(optimizer, 0) + 1
            if optimizer not in self._dropping and optimizer not in self._abandoned:
                awaited.append(optimizer)
        return awaited

    def is_kept_long(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if this is not the first boundary in a row that waits for it."""
        return self._waits.get(optimizer, 0) > 1

    def abandon_late(self, awaited: Sequence[torch.optim.Optimizer]) -> bool:
        """Wait no longer for optimizers that let too many boundaries wait; ``True`` if none is left of ``awaited``."""
        for optimizer in awaited:
            if self._waits[optimizer] > _MOST_BOUNDARIES:
                self._abandoned.add(optimizer)
        return all(optimizer in self._abandoned for optimizer in awaited)


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                yield gradient


def _is_marked(gradient: torch.Tensor) -> bool:
    return hasattr(gradient, _WAITS)


def _changed_since_step(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients that changed since the last step, but not those that were set to zero in place."""
    changed = []
    for gradient in _gradients(optimizer):
        version = getattr(gradient, _STEPPED, None)
        if version != gradient._version:
            changed.append(gradient)
    is_cleared = all(_is_zeroed(gradient) for gradient in changed)
    return [] if is_cleared else changed


def _is_zeroed(gradient: torch.Tensor) -> bool:
    """True after ``zero_grad(set_to_none=False)`` behind a step: the tensor is the same, and holds zeros."""
    if not hasattr(gradient, _STEPPED) or gradient.layout is not torch.strided:
        return False
    return not bool(local_of(gradient).any())
