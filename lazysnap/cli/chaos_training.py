"""A training of ``lazysnap chaos``: its directory, its log, and the processes of all its starts.

Whatever is started inherits the runtime directory of this training in its environment. By it the processes are found
again, the keeper too, and only they are struck.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from lazysnap.keeper.runtime import ENVIRONMENT as RUNTIME_DIRECTORY

_TICK_S = 0.005
_DEATH_S = 30.0
_LONGEST_LINE = 1 << 16


@dataclass
class Start:
    """One start of the command, and the steps that it printed."""

    process: "subprocess.Popen[bytes]"
    began_s: float
    steps: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


class Training:
    """One training in an empty directory of its own. It has no keeper in common with others of this user."""

    def __init__(self, words: Sequence[str], step_line: "re.Pattern[str]", place: pathlib.Path) -> None:
        """``words``: the command, with ``{dir}`` for the directory. ``step_line``: its first group is a step."""
        self._words = words
        self._step_line = step_line
        self.place = place
        """The place of this training: its log, and in ``files`` what the command writes."""
        self.files = place / "files"
        self.files.mkdir(parents=True)
        self.directory: pathlib.Path | None = None
        """The directory in which the command runs; ``None``: the current one."""
        self.log = place / "log.txt"
        self._log = self.log.open("wb", buffering=0)
        self._runtime = tempfile.TemporaryDirectory(prefix="lazysnap-", ignore_cleanup_errors=True)
        self._mark = f"{RUNTIME_DIRECTORY}={self._runtime.name}"
        self._environment = {**os.environ, RUNTIME_DIRECTORY: self._runtime.name, "PYTHONUNBUFFERED": "1"}
        self._readers: list[threading.Thread] = []
        self.starts: list[Start] = []

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all processes that are left, keepers too. Its files go if it is interrupted."""
        self.end(self.all)
        for reader in self._readers:
            reader.join(_DEATH_S)
        self._log.close()
        self._runtime.cleanup()
        if kind is not None:
            shutil.rmtree(self.files, ignore_errors=True)

    def start(self) -> None:
        """Start the command. Raises: OSError, if there is no such program."""
        words = [word.replace("{dir}", str(self.files)) for word in self._words]
        began_s = time.monotonic()
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self.directory,
            start_new_session=True,
        )
        self.starts.append(start := Start(process, began_s))
        self._readers.append(threading.Thread(target=self._read, args=(start,), daemon=True))
        self._readers[-1].start()

    def _read(self, start: Start) -> None:
        assert start.process.stdout is not None
        rest = b""
        with start.process.stdout as stream:
            while data := os.read(stream.fileno(), _LONGEST_LINE):
                self._log.write(data)
                *lines, rest = re.split(rb"[\r\n]+", (rest + data)[-2 * _LONGEST_LINE :])
                for line in lines:
                    match = self._step_line.search(line.decode(errors="replace"))
                    if match and match[1] and match[1].isdecimal():
                        start.times_s.append(time.monotonic())
                        start.steps.append(int(match[1]))

    @property
    def code(self) -> int | None:
        """Exit code of the command's last start; ``None`` while it runs."""
        return self.starts[-1].process.poll()

    def wait(self, is_met: Callable[[], bool], until_s: float) -> bool:
        """Block until ``is_met``, the command ended, or the time came. True if ``is_met``."""
        while not (met := is_met()) and self.code is None and time.monotonic() < until_s:
            time.sleep(_TICK_S)
        return met or is_met()

    def wait_ended(self, until_s: float) -> bool:
        """Block until the command ended and its output is read. False if the time came before."""
        if not self.wait(lambda: self.code is not None, until_s):
            return False
        self._readers[-1].join(1.0)  # another process may hold its output open
        return True

    def all(self) -> dict[int, bool]:
        """Return all living processes, and True for each that is a keeper of lazysnap."""
        found: dict[int, bool] = {}
        group = self.starts[-1].process.pid if self.starts and self.code is None else None
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                state, _, its_group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
                is_marked = self._mark.encode() in (path / "environ").read_bytes().split(b"\0")
                words = (path / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it ended, or is of another user
                continue
            if state not in "ZX" and (is_marked or int(its_group) == group):
                found[int(path.name)] = b"lazysnap.keeper" in words
        return found

    def trainers(self) -> list[int]:
        """Return the living processes but keepers."""
        return [pid for pid, is_keeper in self.all().items() if not is_keeper]

    def keepers(self) -> list[int]:
        """Return the living keepers of lazysnap."""
        return [pid for pid, is_keeper in self.all().items() if is_keeper]

    def signal(self, number: int, processes: Iterable[int]) -> None:
        """Send a signal to those processes that still live."""
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, which: Callable[[], Collection[int]]) -> None:
        """Kill ``which`` with SIGKILL until there are none."""
        until_s = time.monotonic() + _DEATH_S
        while (left := which()) and time.monotonic() < until_s:
            self.signal(signal.SIGKILL, left)
            time.sleep(_TICK_S)

    def last_lines(self, count: int) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])
