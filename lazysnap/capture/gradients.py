"""Detects waiting gradients: made since the last step of their optimizer, and used by its next step.

A snapshot contains no gradients, so a step boundary with waiting gradients is not captured. Not every such gradient is
used: the loss of a generator leaves gradients in its discriminator, which clears them before its own backward. The
first such step shows it: an optimizer that steps without the gradients of a boundary has dropped them.

A gradient is judged by its version, which every write changes, and by the calls of ``step`` and ``zero_grad``. Its
values are read only to recognise gradients that the program cleared itself, because on a device this waits for all
work.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lazysnap.state.sharding import local_of

_MOST_BOUNDARIES = 64
"""Maximum consecutive boundaries that wait for one optimizer."""
_MOST_COUNTS = 64
"""Maximum remembered write counts of gradients that were not cleared."""
_IN_USE_STEPS = 2
"""Steps without a ``zero_grad`` after which the ``zero_grad`` of an optimizer counts as unused."""
_STEPPED = "_lazysnap_stepped"
"""Attribute of a gradient: its version at the last ``step`` or ``zero_grad`` of its optimizer."""
_WAITS = "_lazysnap_waits"
"""Attribute of a gradient that waited at a boundary. It is removed when the gradient is cleared or used."""


class WaitingGradients:
    """The gradients of all captured optimizers. Marks are attributes of gradients: a new gradient has none.

    Under DDP with ``gradient_as_bucket_view`` a gradient keeps its marks when ``zero_grad`` took it off its parameter:
    it is the same view each time.
    """

    def __init__(self) -> None:
        self._waits: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers for which a boundary waited since their last step, with the number of consecutive boundaries."""
        self._dropping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that are known to step without the gradients of a boundary."""
        self._abandoned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers for which boundaries no longer wait."""
        self._keeping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that stepped with the gradients of a boundary at least once."""
        self._steps_since_clear: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Steps of each optimizer since its last ``zero_grad``; none for one whose ``zero_grad`` was never called."""
        self._has_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._not_cleared: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()
        """For each optimizer on a device: numbers of writes since its step after which its gradients were not zero."""

    def accept(self, optimizer: torch.optim.Optimizer) -> None:
        """Treat the current gradients as used, because earlier steps are unknown. ``step`` does it, too."""
        for gradient in _gradients(optimizer):
            setattr(gradient, _STEPPED, gradient._version)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the optimizer has stepped. Hot."""
        self._has_stepped.add(optimizer)
        if optimizer in self._steps_since_clear:
            self._steps_since_clear[optimizer] += 1
        if optimizer in self._waits:
            del self._waits[optimizer]
            kept = [gradient for gradient in _gradients(optimizer) if _is_marked(gradient)]
            if kept:
                self._dropping.discard(optimizer)
                self._keeping.add(optimizer)
            else:
                self._dropping.add(optimizer)
            for gradient in kept:
                delattr(gradient, _WAITS)
        self.accept(optimizer)

    def watch_clearing(self, optimizer: torch.optim.Optimizer) -> "ZeroGradHook":
        """Follow calls of the optimizer's ``zero_grad`` until the hook is removed."""
        return ZeroGradHook(optimizer, self._clear)

    def _clear(self, optimizer: torch.optim.Optimizer, clear: Callable[[], Any]) -> Any:
        """Call ``clear``, the optimizer's ``zero_grad``. Hot."""
        before = [(gradient, gradient._version) for gradient in _gradients(optimizer)]
        result = clear()
        kept = set(map(id, _gradients(optimizer)))
        for gradient, version in before:
            if id(gradient) in kept:
                if gradient._version == version:
                    continue  # a ``zero_grad`` of the program may clear only sometimes
                setattr(gradient, _STEPPED, gradient._version)
            if _is_marked(gradient):
                delattr(gradient, _WAITS)
        self._steps_since_clear[optimizer] = 0
        return result

    def awaited(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose gradients wait at this boundary, which must then be skipped. Hot."""
        awaited = []
        for optimizer in optimizers:
            waiting = _changed_since_step(optimizer)
            is_open = optimizer not in self._dropping and optimizer not in self._abandoned
            if not waiting or (is_open and self._are_cleared_by_hand(optimizer, waiting)):
                self._waits.pop(optimizer, None)
                continue
            is_cleared = optimizer in self._waits and not any(map(_is_marked, waiting))
            # An optimizer that accumulates clears its gradients without a step, too, after an overflow (GradScaler):
            # in its first round as in any other.
            if is_cleared and optimizer in self._has_stepped and optimizer not in self._keeping:
                self._dropping.add(optimizer)
            for gradient in waiting:
                setattr(gradient, _WAITS, True)
            self._waits[optimizer] = self._waits.get(optimizer, 0) + 1
            if optimizer not in self._dropping and optimizer not in self._abandoned:
                awaited.append(optimizer)
        return awaited

    def _are_cleared_by_hand(self, optimizer: torch.optim.Optimizer, changed: Sequence[torch.Tensor]) -> bool:
        """True if the program wrote zeros into these gradients itself, as ``model.zero_grad(set_to_none=False)`` does.

        Not for an optimizer whose ``zero_grad`` is in use. Values on a device that were not zero are not read again
        after the same number of writes, because a loop repeats itself.
        """
        if self._steps_since_clear.get(optimizer, _IN_USE_STEPS) < _IN_USE_STEPS:
            return False
        if not all(map(_is_comparable, changed)):
            return False
        if all(gradient.device.type == "cpu" for gradient in changed):
            return all(map(_is_zero, changed))
        not_cleared = self._not_cleared.setdefault(optimizer, set())
        writes = changed[0]._version - int(getattr(changed[0], _STEPPED))
        if writes in not_cleared:
            return False
        is_cleared = all(map(_is_zero, changed))
        if not is_cleared and len(not_cleared) < _MOST_COUNTS:
            not_cleared.add(writes)
        return is_cleared

    def is_kept_long(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if this is not the first boundary in a row that waits for it."""
        return self._waits.get(optimizer, 0) > 1

    def abandon_late(self, awaited: Sequence[torch.optim.Optimizer]) -> bool:
        """Stop waiting for optimizers that delayed too many boundaries; ``True`` if none of ``awaited`` remains."""
        for optimizer in awaited:
            if self._waits[optimizer] > _MOST_BOUNDARIES:
                self._abandoned.add(optimizer)
        return self._abandoned.issuperset(awaited)


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                yield gradient


def _is_marked(gradient: torch.Tensor) -> bool:
    return hasattr(gradient, _WAITS)


def _changed_since_step(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients that changed since the last step, or since they were cleared after it."""
    changed = []
    for gradient in _gradients(optimizer):
        version = getattr(gradient, _STEPPED, None)
        if version != gradient._version:
            changed.append(gradient)
    return changed


def _is_comparable(gradient: torch.Tensor) -> bool:
    """True if the tensor is the one of the last step, and its values can be read."""
    return hasattr(gradient, _STEPPED) and gradient.layout is torch.strided


def _is_zero(gradient: torch.Tensor) -> bool:
    return not bool(local_of(gradient).any())


class ZeroGradHook:
    """A hook on ``zero_grad`` of one optimizer: torch only has hooks on ``step``.

    It is an attribute of the object, like the hook of torch's schedulers on ``step``. It keeps no optimizer alive.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        around: Callable[[torch.optim.Optimizer, Callable[[], Any]], Any],
    ) -> None:
        """``around``: called with the optimizer and the original function, whose result it returns."""
        self._optimizer = weakref.ref(optimizer)
        self._before = vars(optimizer).get("zero_grad")
        self._around: Callable[[torch.optim.Optimizer, Callable[[], Any]], Any] | None = around
        self._hook = self._make(optimizer)
        vars(optimizer)["zero_grad"] = self._hook

    def _make(self, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        reference = self._optimizer
        before = self._before

        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            hooked = reference()
            assert hooked is not None  # this function is an attribute of that object
            method = before
            if method is None:
                method = functools.partial(type(hooked).zero_grad, hooked)
            if self._around is None or torch.compiler.is_compiling():
                return method(*args, **kwargs)
            return self._around(hooked, functools.partial(method, *args, **kwargs))

        # Accelerate checks for the argument ``set_to_none``.
        zero_grad.__signature__ = inspect.signature(optimizer.zero_grad)  # type: ignore[attr-defined]
        return zero_grad

    def remove(self) -> None:
        """Remove the hook. If another hook wraps it, it only calls ``zero_grad`` from now on."""
        self._around = None
        optimizer = self._optimizer()
        if optimizer is None or vars(optimizer).get("zero_grad") is not self._hook:
            return
        if self._before is None:
            del vars(optimizer)["zero_grad"]
        else:
            vars(optimizer)["zero_grad"] = self._before
