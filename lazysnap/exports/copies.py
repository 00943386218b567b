"""Named copies of ``save_state(directory)``: made by child processes from the stored snapshot, beside training."""

import contextlib
import json
import logging
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

from lazysnap.config import PersistentLevel
from lazysnap.console import say
from lazysnap.errors import ConfigError
from lazysnap.exports.folder import give_up, handle_of, place_now, sweep

logger = logging.getLogger("lazysnap.accelerate")

_NICE = 10  # a tenth of a busy core; 19 would be a seventieth, and a copy begins with an import of torch
_STORED_WITHIN_S = 3600.0
_PATIENCE_S = 1.0
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_MOST_OUTPUT_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One copy that ``save_state(directory)`` asked for: its directory is there, made by ``mark_unfinished``."""

    directory: str
    name: str
    """The name of the snapshot at the level (``engine.keep``)."""
    then: Callable[[], object] | None = None
    """Called on another thread when the copy is complete."""


@dataclass(frozen=True)
class _Child:
    copy: Copy
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]
    """A file, not a pipe: nobody may be there to read."""
    handle: int
    """The ``handle_of`` the directory: a program may move it."""

    def place(self) -> str:
        """Return the current path of the directory, or the path that was asked for if it was removed."""
        found = place_now(self.copy.directory, self.handle)
        is_moved = found is not None and found != os.path.realpath(self.copy.directory)
        return found if found is not None and is_moved else self.copy.directory


class NamedCopies:
    """Makes copies in the layout of Accelerate, in the order in which they are asked for.

    Each is made by a child process of low priority, which outlives this one. It waits for the child before it, and
    for the level to store the snapshot; then it writes the copy, and takes the name from the snapshot. One thread
    waits for the children. Nothing that fails raises into training: it is logged once, and again by ``close``.
    """

    def __init__(
        self, level: PersistentLevel, release: Callable[[str], None], *, stored_within_s: float = _STORED_WITHIN_S
    ) -> None:
        """``release``: ``SnapshotEngine.release``, called on another thread. ``stored_within_s``: so long a child waits
        for the level.
        """
        self._level = level
        self._release = release
        self._stored_within_s = stored_within_s
        self._children: queue.SimpleQueue[_Child | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: list[_Child] = []
        self._lost: dict[str, str] = {}
        """Reasons why snapshots will never be stored, by their names."""
        self._failed: dict[str, str] = {}
        """Reasons why directories have no copy."""
        self._kept: Copy | None = None
        """The newest copy that failed: its snapshot keeps its name."""
        self._last_end: int | None = None
        """The reading end of a pipe that closes when the newest child ends."""
        self._thread: threading.Thread | None = None

    def save(self, copy: Copy) -> None:
        """Have a copy made. Blocks: until the child process is started, some milliseconds. Raises nothing."""
        try:
            child = self._start(copy)
        except OSError as error:
            self._fail(copy, copy.directory, f"its process cannot be started: {error}")
            return
        with self._changed:
            self._pending.append(child)
        if self._thread is None:
            self._thread = threading.Thread(target=self._reap, name="lazysnap-copies", daemon=True)
            self._thread.start()
        self._children.put(child)

    def pending(self) -> list[str]:
        """Directories whose copies are not there yet, in order."""
        with self._changed:
            return [child.place() for child in self._pending]

    def give_up(self, lost: Mapping[str, str]) -> None:
        """Make no copy of snapshots that will never be stored; ``lost``: by name, why. Does not block."""
        with self._changed:
            for child in self._pending:
                if child.copy.name in lost and child.copy.name not in self._lost:
                    self._lost[child.copy.name] = lost[child.copy.name]
                    child.process.kill()

    def wait(self, timeout_s: float, directory: str | None = None) -> bool:
        """Block until all copies (or those of ``directory``) are made; ``False`` after the deadline, or if the last one
        of a directory failed.
        """
        wanted = None if directory is None else os.path.realpath(directory)

        def is_over() -> bool:
            return all(wanted not in (None, os.path.realpath(one.place())) for one in self._pending)

        with self._changed:
            done = self._changed.wait_for(is_over, timeout_s)
            failed = {os.path.realpath(path) for path in self._failed}
            return done and not (failed if wanted is None else failed & {wanted})

    def close(self, timeout_s: float) -> bool:
        """``wait``, then say which copies were not made. Children that still work go on. Idempotent."""
        patience_s = min(_PATIENCE_S, timeout_s)
        done = self.wait(patience_s)
        if not done and (waited_for := self.pending()):
            more = f" and {len(waited_for) - 1} more" if len(waited_for) > 1 else ""
            say(
                f"save_state(directory): waiting for {waited_for[0]!r}{more} to be complete, at most {timeout_s:g} s; "
                "if this process is ended before, they are made all the same"
            )
            done = self.wait(timeout_s - patience_s)
        with self._changed:
            pending = [(child.copy, child.place()) for child in self._pending]
        for copy, place in pending:
            logger.warning(
                "save_state(%r): the copy is not complete %g s after the end of training; a process goes on with it "
                "(at most %g s until the snapshot is stored). If it never comes: %s",
                place,
                timeout_s,
                self._stored_within_s,
                self._by_hand(copy, place),
            )
        for directory, reason in self._failed.items():
            logger.warning("save_state(%r): there is no copy of this training's state: %s", directory, reason)
        self._failed.clear()
        if self._thread is not None:
            self._children.put(None)
            self._thread = None
        if self._last_end is not None:
            os.close(self._last_end)
            self._last_end = None
        return done

    # ---------------------------------------------------------------- children

    def _start(self, copy: Copy) -> _Child:
        output = tempfile.TemporaryFile()  # noqa: SIM115  open until the child has ended
        handle = handle_of(copy.directory)
        reading, writing = os.pipe()  # the writing end is this child's alone
        before = self._last_end
        try:
            arguments = [*self._arguments(copy, copy.directory), "--options-from-stdin", "--json", "--release"]
            arguments += ["--into", str(handle), "--wait", str(self._stored_within_s)]
            arguments += ["--after", str(before)] if before is not None else []
            process = subprocess.Popen(
                [sys.executable, "-m", "lazysnap.cli", *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
                pass_fds=(writing, handle, *([] if before is None else [before])),
            )
        except BaseException:
            os.close(reading)
            os.close(handle)
            output.close()
            raise
        finally:
            os.close(writing)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(json.dumps(dict(self._level.storage_options or {})).encode())
        if before is not None:
            os.close(before)
        self._last_end = reading
        return _Child(copy, process, output, handle)

    def _arguments(self, copy: Copy, place: str) -> list[str]:
        to = os.path.abspath(place)
        return ["export", self._level.url, copy.name, "--to", to, "--format", "accelerate", "--force"]

    def _by_hand(self, copy: Copy, place: str) -> str:
        arguments = " ".join(self._arguments(copy, place))
        return (
            f"`lazysnap {arguments} --release` makes it from the snapshot {copy.name!r}, which "
            f"{self._level.url} keeps until then"
        )

    def _reap(self) -> None:
        while (child := self._children.get()) is not None:
            code = child.process.wait()
            place = child.place()
            if code == 0 or place_now(child.copy.directory, child.handle) is None:
                self._succeed(child.copy, place)
            else:
                # What the child left goes now; nobody else may come to that directory again.
                for path in {os.path.realpath(child.copy.directory), os.path.realpath(place)}:
                    sweep(os.path.dirname(path))
                self._fail(child.copy, place, _reason(code, child.output))
            child.output.close()
            with self._changed:
                self._pending.remove(child)
                os.close(child.handle)
                self._changed.notify_all()

    def _succeed(self, copy: Copy, place: str) -> None:
        """The copy is complete, or the program removed its directory: then nobody asks for it any more."""
        self._failed.pop(place, None)
        if os.path.isdir(place):
            logger.info("save_state(%r): the copy is complete", place)
        try:
            with contextlib.suppress(ConfigError):  # an engine that has ended; at the level the child released the name
                self._release(copy.name)
            if copy.then is not None:
                copy.then()
        except Exception as error:  # noqa: BLE001  the copy is there, whatever comes after it
            logger.warning("save_state(%r): the copy is complete, but %s", copy.directory, error)

    def _fail(self, copy: Copy, place: str, reason: str) -> None:
        give_up(place)
        if copy.name in self._lost:
            self._failed[place] = self._lost[copy.name]
            logger.warning("save_state(%r): no copy was made: %s", copy.directory, self._lost[copy.name])
            return
        logger.warning("save_state(%r): no copy was made: %s. %s", copy.directory, reason, self._by_hand(copy, place))
        self._failed[place] = reason
        if self._kept is not None and self._kept.name != copy.name:
            # Failures must not fill the level with snapshots that nothing deletes.
            logger.warning(
                "save_state(%r): its snapshot %r is not kept any longer: a newer copy failed, too",
                self._kept.directory,
                self._kept.name,
            )
            with contextlib.suppress(Exception):
                self._release(self._kept.name)
        self._kept = copy


def _environment() -> dict[str, str]:
    """Return the environment without a launcher's variables for this rank, and without devices."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
    }


def _reason(code: int, output: IO[bytes]) -> str:
    if code < 0:
        return f"its process was ended by signal {-code}"
    output.seek(0)
    try:
        return str(json.loads(output.read(_MOST_OUTPUT_BYTES))["error"])
    except (ValueError, KeyError, TypeError):
        return f"its process ended with status {code}"
