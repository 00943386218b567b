"""A training of ``lazysnap chaos``: its directory, its log, and the processes of all its starts.

All started processes inherit the runtime directory of this training in their environment. It identifies them, the
keeper too, so that only they are killed.
"""

import contextlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lazysnap.errors import ConfigError
from lazysnap.shard.names import SnapshotName, is_directory_of_ours, parse_events_file_name, parse_file_name
from lazysnap.warm.directories import ENVIRONMENT as RUNTIME_DIRECTORY

LOGS = "lazysnap-chaos"
"""The directory of all logs, in the current one."""
_STEP = re.compile(
    r"(?i)^(?!.*(?:lazysnap|resum|restor|start|load|sav)).*?\b(?:global_)?(?:step|iter(?:ation)?)\W{0,3}(\d+)"
)
"""Lines about a restart are not about a trained step."""
_COPIED_BYTES = 100 << 20
_TICK_S = 0.005
_DEATH_S = 30.0


def step_of(line: str) -> int | None:
    """Return the trained step in a line, if any."""
    match = _STEP.search(line)
    if match is None:
        return None
    return int(match[1])


@dataclass
class CommandStart:
    """One start of the command, and what it printed."""

    process: "subprocess.Popen[bytes]"
    lines: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


class Training:
    """A training in its own directory, over all its starts."""

    def __init__(self, place: pathlib.Path, words: list[str]) -> None:
        """``place``: gets its log, and ``files``, in which it runs. ``words``: the command."""
        self.files = place / "files"
        self.files.mkdir(parents=True)
        self._words = words
        self.log = place / "log.txt"
        self._log = self.log.open("wb", buffering=0)
        self._runtime = tempfile.TemporaryDirectory(prefix="lazysnap-", ignore_cleanup_errors=True)
        self._mark = f"{RUNTIME_DIRECTORY}={self._runtime.name}"
        self._readers: list[threading.Thread] = []
        self.starts: list[CommandStart] = []

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all remaining processes, also keepers. Deletes its files if it is interrupted."""
        self.kill(self.all)
        for reader in self._readers:
            reader.join(_DEATH_S)
        self._log.close()
        self._runtime.cleanup()
        if kind is not None:
            shutil.rmtree(self.files, ignore_errors=True)

    def start(self) -> None:
        """Start the command. Raises: OSError, if there is no such program."""
        words = [word.replace("{dir}", str(self.files)) for word in self._words]
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, RUNTIME_DIRECTORY: self._runtime.name, "PYTHONUNBUFFERED": "1"},
            cwd=self.files,
            start_new_session=True,
        )
        start = CommandStart(process)
        reader = threading.Thread(target=self._read, args=(start,), daemon=True)
        reader.start()
        self.starts.append(start)
        self._readers.append(reader)

    def _read(self, start: CommandStart) -> None:
        assert start.process.stdout is not None
        with start.process.stdout as stream:
            for data in stream:
                self._log.write(data)
                line = data.decode(errors="replace").rstrip()
                line = line.rpartition("\r")[2].replace(str(self.files), "{dir}")
                start.lines.append(line)
                step = step_of(line)
                if step is not None:
                    start.times_s.append(time.monotonic())
                    start.steps.append(step)

    @property
    def code(self) -> int | None:
        """Exit code of the command's last start; ``None`` while it runs."""
        return self.starts[-1].process.poll()

    def wait(self, timeout_s: float, is_met: Callable[[], bool] = lambda: False) -> bool:
        """Block until ``is_met``, or the command ended and its output is read. False after ``timeout_s``."""
        until_s = time.monotonic() + timeout_s
        while self.code is None and not is_met():
            if time.monotonic() > until_s:
                return False
            time.sleep(_TICK_S)
        if self.code is not None:
            self._readers[-1].join(1.0)  # another process may hold its output open
        return True

    def _living(self) -> dict[int, bool]:
        """Return all living processes, and True for each that is a keeper of lazysnap."""
        living = {}
        group = None
        if self.starts and self.code is None:
            group = self.starts[-1].process.pid
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                state, _, its_group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
                is_marked = self._mark.encode() in (path / "environ").read_bytes().split(b"\0")
                words = (path / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it ended, or is of another user
                continue
            if state not in "ZX" and (is_marked or int(its_group) == group):
                living[int(path.name)] = b"lazysnap.keeper" in words
        return living

    def all(self) -> list[int]:
        """Return all living processes."""
        return list(self._living())

    def trainers(self) -> list[int]:
        """Return the living processes without keepers."""
        return [pid for pid, is_keeper in self._living().items() if not is_keeper]

    def keepers(self) -> list[int]:
        """Return the living keepers of lazysnap."""
        return [pid for pid, is_keeper in self._living().items() if is_keeper]

    def kill(self, which: Callable[[], list[int]]) -> None:
        """Send SIGKILL to ``which`` until there are none."""
        until_s = time.monotonic() + _DEATH_S
        pids = which()
        while pids and time.monotonic() < until_s:
            _send(signal.SIGKILL, pids)
            time.sleep(_TICK_S)
            pids = which()

    def strike(self, fault: str, dice: random.Random, window_s: float) -> str:
        """Inject ``fault``, and return a text for it. Blocks for ``window_s`` if the fault is temporary."""
        who = "training"
        which = self.trainers
        if fault in ("keeper", "stop-keeper"):
            who = "keeper"
            which = self.keepers
        if fault in ("both", "flip"):
            who = "training and keeper"
            which = self.all
        if fault in ("stop", "stop-keeper"):
            pids = which()
            _send(signal.SIGSTOP, pids)
            try:
                self.wait(window_s)
            finally:
                _send(signal.SIGCONT, pids)
            return f"{who} stopped for {window_s:.1f} s"
        if fault == "term":
            _send(signal.SIGTERM, which())
            if self.wait(_DEATH_S):
                return f"SIGTERM; {who} ended with code {self.code}"
        self.kill(which)
        if fault == "flip":
            return f"{who} killed, {self._damage(dice)}"
        return f"{who} killed"

    def _damage(self, dice: random.Random) -> str:
        """Flip a bit of a file of the newest snapshot."""
        path = dice.choice(self.newest_snapshot())
        at = dice.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << dice.randrange(8)]))
        return f"a bit of byte {at} of {path.relative_to(self.files)} flipped"

    def newest_snapshot(self) -> list[pathlib.Path]:
        """Return the files of the newest complete snapshot that lazysnap stored here; empty if there is none."""
        snapshots: dict[SnapshotName, list[pathlib.Path]] = {}
        paths: list[pathlib.Path] = []
        with contextlib.suppress(FileNotFoundError):  # the training deletes snapshots, too
            paths += self.files.rglob("node-*")
        for path in sorted(paths):
            name = SnapshotName.parse(path.parent.name)
            if name is not None and parse_file_name(path.name) is not None:
                snapshots.setdefault(name, []).append(path)
        for name in sorted(snapshots, reverse=True):
            if any(path.suffix == ".json" for path in snapshots[name]):  # the manifest, which is written last
                return snapshots[name]
        return []

    def last_lines(self, count: int) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


def _send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def copy_directory(source: pathlib.Path, to: pathlib.Path, result: str | None) -> list[str]:
    """Copy a directory, except the snapshots and results of an earlier training.

    An entry that is large is linked instead. Returns: the names of these entries.
    Raises: ConfigError, for such an entry with snapshots or results in it: the training would write to the directory of
    the user.
    """
    results = set()
    if result is not None:
        results = {match for match in source.glob(result) if not match.is_dir()}

    def is_of_training(path: pathlib.Path) -> bool:
        """True if an earlier training wrote this file or directory."""
        is_ours = is_directory_of_ours(path.name) or parse_events_file_name(path.name) is not None
        return is_ours or path in results

    def ignored(directory: str, names: list[str]) -> list[str]:
        return [name for name in names if is_of_training(pathlib.Path(directory, name))]

    linked = []
    for path in source.iterdir():
        if path.name == LOGS or is_of_training(path):
            continue
        written = []
        size_bytes = path.lstat().st_size
        for child in path.rglob("*"):
            if is_of_training(child):
                written.append(child)
            elif not any(child.is_relative_to(directory) for directory in written):
                size_bytes += child.lstat().st_size
        if path.is_symlink() or size_bytes > _COPIED_BYTES:
            if written:
                raise ConfigError(
                    f"{path} has files that an earlier training wrote, such as {written[0].name}, and is too large to "
                    "be copied, or a link: the training would write there; let it write to a directory of its own"
                )
            (to / path.name).symlink_to(path)
            linked.append(path.name)
        elif path.is_dir():
            shutil.copytree(path, to / path.name, symlinks=True, ignore=ignored)
        elif path.is_file():
            shutil.copy2(path, to)
    return linked
