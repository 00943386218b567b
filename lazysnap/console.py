"""Messages that users see without configuring logging: start and end of a run, and warnings."""

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator

_logger = logging.getLogger("lazysnap")
_JOIN_S = 1.0
"""Seconds to wait for the thread of a message that is being printed: a terminal may hang."""


class _Console(logging.Handler):
    """Replaces Python's last-resort handler, which does not name the package."""

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        if not _has_handlers(logging.getLogger(record.name)):
            _write(self.format(record))


_console = _Console(logging.WARNING)
_logger.addHandler(_console)


def _has_handlers(logger: logging.Logger | None) -> bool:
    """True if the program handles the records of this logger."""
    while logger is not None:
        if any(handler is not _console for handler in logger.handlers):
            return True
        if not logger.propagate:
            return False
        logger = logger.parent
    return False


def say(message: str) -> None:
    """Log ``message`` as INFO of the logger ``lazysnap``; without any logging handler, write it to stderr.

    Without handlers Python would drop INFO silently. Never raises: a closed stderr must not end a training.
    """
    if _has_handlers(_logger):
        _logger.info("%s", message)
    else:
        _write(message)


@contextlib.contextmanager
def said_after(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    """Print ``message()`` if the context lasts longer than the given seconds. ``message`` is called on a separate
    thread.

    That thread ends with the context, so that no line follows, and a program that counts its threads sees none.
    """

    def say_message() -> None:
        say(message())

    timer = threading.Timer(seconds, say_message)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join(_JOIN_S)


def _write(message: str) -> None:
    if sys.stderr is not None:  # it is None in a windowed program
        # A closed or full stderr must not end a training.
        with contextlib.suppress(OSError, ValueError):
            _write_line(f"lazysnap: {message}")


def _write_line(line: str) -> None:
    """Write a separate line to stderr, also while bars of tqdm are shown there.

    A program may set ``sys.stderr`` to an object that can only write.
    """
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if getattr(tqdm, "_instances", None):
        tqdm.write(line, file=sys.stderr)  # type: ignore[union-attr]
    else:
        sys.stderr.write(f"{line}\n")
    if hasattr(sys.stderr, "flush"):
        sys.stderr.flush()


def duration(seconds: float) -> str:
    """Return seconds as text in a suitable unit."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, length, limit in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < limit * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def some_of(items: Collection[str], most: int, separator: str = ", ") -> str:
    """Return the first items, and the number of others: ``a, b and 3 more``."""
    text = separator.join(itertools.islice(items, most))
    if len(items) > most:
        text += f" and {len(items) - most} more"
    return text
