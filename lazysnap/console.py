"""The lines that every user sees, also one who never configured logging: how a run starts and ends, and warnings."""

import contextlib
import logging
import sys

_logger = logging.getLogger("lazysnap")


class _Console(logging.Handler):
    """In place of Python's last resort, which would not say whose warning it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        if not _has_handlers(logging.getLogger(record.name)):
            _write(self.format(record))


_console = _Console(logging.WARNING)
_logger.addHandler(_console)


def _has_handlers(logger: logging.Logger | None) -> bool:
    """Whether the program takes what this logger is told."""
    while logger is not None:
        if any(handler is not _console for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def say(message: str) -> None:
    """Log ``message`` as INFO of the logger ``lazysnap``; without any logging handler, write it to stderr.

    Who configured logging decides there what is shown. Without handlers Python would drop INFO silently.
    Never raises: a terminal that is gone, or a closed stderr, ends no training.
    """
    if _has_handlers(_logger):
        _logger.info("%s", message)
    else:
        _write(message)


def _write(message: str) -> None:
    if sys.stderr is not None:  # it is None in a windowed program
        # A closed or full stderr must not end a training.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"lazysnap: {message}\n")
            sys.stderr.flush()
