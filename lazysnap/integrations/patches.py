"""Methods of single objects replaced for the duration of a training, and put back after it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

_MISSING = object()


class Patches:
    """A stack of replaced methods. Only instances are touched, never classes.

    ``is_on``: where it is false when a method is called, the original alone runs.
    """

    def __init__(self, is_on: Callable[[], bool] = lambda: True) -> None:
        self._is_on = is_on
        self._stack: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Let ``owner.name(...)`` be ``replacement(original, ...)``."""
        original = getattr(owner, name)

        @wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs) if self._is_on() else original(*args, **kwargs)

        self._stack.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, method)

    def undo(self) -> None:
        """Put everything back, last first. Idempotent."""
        while self._stack:
            owner, name, before = self._stack.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
