"""Errors of a keeper: written to a bounded log file, and sent to the trainers."""

import contextlib
import hashlib
import logging
import os
import pathlib
import queue
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback

_LOG_BYTES = 1 << 20
_KEPT_S = 7 * 86400.0
"""Log files of other jobs are removed when nothing was written to them for so long."""
_AGAIN_S = 600.0
"""Seconds after which the same error is sent again."""


def private_directory() -> pathlib.Path:
    """Return a directory of this machine that only this user can enter. Raises: OSError, if there can be none."""
    path = pathlib.Path(tempfile.gettempdir()) / f"lazysnap-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is no directory that only this user can enter")
    return path


def log_path(address: str) -> pathlib.Path:
    """Return the log file of the keeper at that address: of one job, used by one keeper after the other."""
    return private_directory() / f"keeper-{hashlib.sha256(address.encode()).hexdigest()[:16]}.log"


class Trouble(logging.Handler):
    """Every error of this process: what is logged as one, and what ends a thread."""

    def __init__(self, address: str) -> None:
        super().__init__(logging.ERROR)
        self._address = address
        self._told: dict[str, float] = {}
        self.texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        """One line for each error that trainers must see."""

    def watch(self) -> None:
        """Take note of errors from now on, and remove log files that nobody uses any more."""
        logging.getLogger().addHandler(self)
        logger = logging.getLogger(__name__)
        threading.excepthook = lambda ended: logger.error("a thread ended", exc_info=ended.exc_value)
        sys.unraisablehook = lambda found: logger.error("%s", found.err_msg or "ignored", exc_info=found.exc_value)
        with contextlib.suppress(OSError):
            for path in private_directory().glob("keeper-*.log"):
                if time.time() - path.stat().st_mtime > _KEPT_S:
                    path.unlink()

    def emit(self, record: logging.LogRecord) -> None:
        """Log an error, and send it to trainers once in a while."""
        what, where = record.getMessage(), f"{record.filename}:{record.lineno}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            what = f"{what}: {type(error).__name__}: {error}"
            frames = traceback.extract_tb(error.__traceback__)
            where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else where
        what = " ".join(what.split())
        log = self._write(record)
        key, now = f"{record.msg} {type(error).__name__} {where}", time.monotonic()
        if now - self._told.get(key, float("-inf")) >= _AGAIN_S:
            self._told[key] = now
            self.texts.put(
                f"an error in the keeper (process {os.getpid()} on {socket.gethostname()}, thread {record.threadName}, "
                f"{where}): {what}; snapshots may not be stored or protected until it works again; {log}"
            )

    def _write(self, record: logging.LogRecord) -> str:
        """Return where the traceback is."""
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {os.getpid()} {record.threadName} {self.format(record)}\n"
        try:
            path = log_path(self._address)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "a", errors="replace") as file:
                if file.tell() > _LOG_BYTES:
                    file.truncate(0)
                file.write(text[: _LOG_BYTES // 2])
        except OSError as error:
            return f"no log could be written ({error})"
        return f"its log is {path}"
