"""Errors of a keeper: written to a bounded log file, and sent to the trainers."""

import contextlib
import logging
import os
import pathlib
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from lazysnap.errors import KeeperError
from lazysnap.keeper.runtime import remove_old_files

_LOG_BYTES = 1 << 20
_AGAIN_S = 600.0
"""Seconds after which the same error is sent again."""


class Trouble(logging.Handler):
    """Collects all errors of this process: logged ones, and those that end a thread."""

    def __init__(self, log_path: pathlib.Path) -> None:
        super().__init__(logging.ERROR)
        self._log_path = log_path
        self._sent_at: dict[str, float] = {}
        self.texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        """One line for each error that trainers must see."""
        self.notify: Callable[[], None] | None = None
        """Called after each error, on any thread."""

    def watch(self) -> None:
        """Collect errors from now on, and remove unused files."""
        logging.getLogger().addHandler(self)
        logger = logging.getLogger(__name__)
        threading.excepthook = lambda ended: logger.error("a thread ended", exc_info=ended.exc_value)
        sys.unraisablehook = lambda ignored: logger.error(
            "%s", ignored.err_msg or "ignored", exc_info=ignored.exc_value
        )
        with contextlib.suppress(OSError, KeeperError):
            remove_old_files()

    def emit(self, record: logging.LogRecord) -> None:
        """Log an error, and send it to trainers, but the same error only rarely."""
        text = record.getMessage()
        source_line = f"{record.filename}:{record.lineno}"
        error = None
        if record.exc_info:
            error = record.exc_info[1]
        if error is not None:
            text = f"{text}: {type(error).__name__}: {error}"
            frames = traceback.extract_tb(error.__traceback__)
            if frames:
                source_line = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"
        text = " ".join(text.split())
        log = self._write(record)
        key = f"{record.msg} {type(error).__name__} {source_line}"
        now = time.monotonic()
        if now - self._sent_at.get(key, float("-inf")) >= _AGAIN_S:
            self._sent_at[key] = now
            self.texts.put(
                f"an error in the keeper (process {os.getpid()} on {socket.gethostname()}, thread {record.threadName}, "
                f"{source_line}): {text}; snapshots may not be stored or protected until it works again; {log}"
            )
            if self.notify is not None:
                self.notify()

    def _write(self, record: logging.LogRecord) -> str:
        """Return the text for the place of the traceback."""
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {os.getpid()} {record.threadName} {self.format(record)}\n"
        try:
            fd = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "a", errors="replace") as file:
                if file.tell() > _LOG_BYTES:
                    file.truncate(0)
                file.write(text[: _LOG_BYTES // 2])
        except OSError as error:
            return f"no log could be written ({error})"
        return f"its log is {self._log_path}"
