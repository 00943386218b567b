"""Methods of single objects replaced for the duration of a fit, and put back after it."""

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """A stack of replaced methods. Only instances are touched, never classes."""

    def __init__(self) -> None:
        self._stack: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``owner.name`` by ``make(original)``."""
        self._stack.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, make(getattr(owner, name)))

    def undo(self) -> None:
        """Put everything back, last first. Idempotent."""
        while self._stack:
            owner, name, before = self._stack.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
