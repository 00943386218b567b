"""Secrets of ``storage_options`` in messages: drivers quote their options in their errors."""

from collections.abc import Iterator, Mapping
from typing import Any

from lazysnap.config import SECRET_NAME

_MIN_LENGTH = 4
"""Shorter values are no secrets, and replacing them would garble words."""


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _secrets(value: object) -> Iterator[str]:
    """Yield the values whose names suggest a secret, at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if SECRET_NAME.search(str(name)):
                yield from _texts(inner)
            else:
                yield from _secrets(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _secrets(inner)


class Redaction:
    """Replaces the secrets among some options by ``***``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        # The longest first: one may be part of another.
        values = {value for value in _secrets(options) if len(value) >= _MIN_LENGTH}
        self._values = sorted(values, key=len, reverse=True)

    def hides(self, text: str) -> bool:
        """True if ``text`` holds a secret."""
        return any(value in text for value in self._values)

    def clean(self, text: object) -> str:
        """Return ``text`` without secrets."""
        cleaned = str(text)
        for value in self._values:
            cleaned = cleaned.replace(value, "***")
        return cleaned

    def cause(self, error: BaseException) -> BaseException | None:
        """Return ``error``, the cause of a cleaned error; ``None`` if it, or one of its causes, shows a secret."""
        checked: BaseException | None = error
        while checked is not None:
            if self.hides(f"{checked!s} {checked!r}"):
                return None
            checked = checked.__cause__ or checked.__context__
        return error
