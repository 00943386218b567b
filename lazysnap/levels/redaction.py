"""Keeps secrets out of messages: drivers quote their options and URLs in what they raise."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from lazysnap.errors import SECRET_NAME, without_passwords

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
    """Values whose names suggest a secret, however deep."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner) if SECRET_NAME.search(str(name)) else _secrets(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _secrets(inner)


def shown(url: str) -> str:
    """Return a URL without passwords and tokens."""
    return without_passwords(url)


class Redaction:
    """Replaces the secrets of some storage by ``***``."""

    def __init__(self, url: str, options: Mapping[str, Any], *more_urls: str) -> None:
        found = set(_secrets(options))
        for one in (url, *more_urls):
            with contextlib.suppress(ValueError):  # opening the URL reports what is wrong with it
                parts = urlsplit(one)
                password = parts.password or ""
                found |= {*_secrets(dict(parse_qsl(parts.query))), password, unquote(password)}
        # The longest first: one may be part of another.
        self._values = sorted((value for value in found if len(value) >= _MIN_LENGTH), key=len, reverse=True)

    def hides(self, text: str) -> bool:
        """True if ``text`` holds a secret."""
        return any(value in text for value in self._values)

    def clean(self, text: object) -> str:
        """Return ``text`` without secrets."""
        cleaned = without_passwords(str(text))
        for value in self._values:
            cleaned = cleaned.replace(value, "***")
        return cleaned

    def cause(self, error: BaseException) -> BaseException | None:
        """Return ``error``, the cause of a cleaned error; ``None`` if it, or one of its causes, shows a secret."""
        seen: BaseException | None = error
        while seen is not None:
            if self.hides(f"{seen!s} {seen!r}"):
                return None
            seen = seen.__cause__ or seen.__context__
        return error
