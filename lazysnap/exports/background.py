"""Checkpoints of ``save_state(directory)`` in the background: one process fills each, from the stored snapshot."""

import contextlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lazysnap.config import PersistentLevel
from lazysnap.console import say
from lazysnap.errors import ConfigError
from lazysnap.exports.fill import GONE
from lazysnap.exports.folder import UNFINISHED, give_up

logger = logging.getLogger("lazysnap.accelerate")

_NICE = 10  # a tenth of a busy core; 19 would be a seventieth, and a process begins with an import of torch
_STORED_WITHIN_S = 3600.0
_PATIENCE_S = 1.0
# Nothing is imported from the current directory, in which save hooks wrote files.
_PROGRAM = "import sys; del sys.path[0]; from lazysnap.exports.fill import main; sys.exit(main())"
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, eq=False)
class _Filling:
    """A checkpoint whose process has not ended."""

    directory: str
    name: str
    then: Callable[[], object]
    process: "subprocess.Popen[str]"
    handle: int
    """A descriptor of the directory: it finds the place that a program moved the directory to."""

    def place(self) -> str:
        """Return the current path of the directory; if it was deleted, the path that it had first."""
        found = os.readlink(f"/proc/self/fd/{self.handle}")
        is_moved = os.path.isdir(found) and found != os.path.realpath(self.directory)
        return found if is_moved else self.directory


class BackgroundCheckpoints:
    """The checkpoints of one training that are made in the background.

    The process of each has a low priority and outlives this one. It waits until the level has stored the snapshot,
    fills the directory, and takes the name from the snapshot. One thread waits for each process. No failure raises into
    training: a warning names it at once, and ``close`` names it again.
    """

    def __init__(
        self, level: PersistentLevel, release: Callable[[str], None], *, stored_within_s: float = _STORED_WITHIN_S
    ) -> None:
        """``release``: ``SnapshotEngine.release``, called on another thread. ``stored_within_s``: the time that the
        level has to store a snapshot.
        """
        self._level = level
        self._release = release
        self._stored_within_s = stored_within_s
        self._changed = threading.Condition()
        self._pending: list[_Filling] = []
        self._lost: dict[str, str] = {}
        """Reasons why snapshots will never be stored, by their names."""
        self._failed: dict[str, str] = {}
        """Reasons why directories have no checkpoint."""
        self._kept: tuple[str, str] | None = None
        """Name and directory of the newest checkpoint that failed: its snapshot keeps its name."""

    def save(self, directory: str, name: str, then: Callable[[], object] = lambda: None) -> None:
        """Have a checkpoint made in a directory that ``folder.begin`` made. Raises nothing.

        ``name``: of the snapshot at the level (``SnapshotEngine.keep``). ``then``: called on another thread when the
        checkpoint is complete. Blocks: until its process is started, some milliseconds.
        """
        try:
            filling = _Filling(directory, name, then, *self._start(directory, name))
        except OSError as error:
            give_up(directory)
            self._fail(name, directory, directory, f"its process cannot be started: {error}")
            return
        with self._changed:
            self._pending.append(filling)
        threading.Thread(target=self._follow, args=(filling,), name="lazysnap-checkpoint", daemon=True).start()

    def pending(self) -> list[str]:
        """Return the directories whose checkpoints are not complete yet, in order."""
        with self._changed:
            return [filling.place() for filling in self._pending]

    def give_up(self, lost: Mapping[str, str]) -> None:
        """Make no checkpoint of snapshots that will never be stored. Does not block.

        ``lost``: the reasons, by the names of the snapshots.
        """
        with self._changed:
            for filling in self._pending:
                if filling.name in lost and filling.name not in self._lost:
                    self._lost[filling.name] = lost[filling.name]
                    filling.process.kill()

    def wait(self, timeout_s: float, directory: str | None = None) -> bool:
        """Block until all checkpoints (or those of ``directory``) are complete. ``False`` after the deadline, or if the
        last one of a directory failed.
        """
        wanted = None if directory is None else os.path.realpath(directory)

        def is_over() -> bool:
            return all(wanted not in (None, os.path.realpath(one.place())) for one in self._pending)

        with self._changed:
            done = self._changed.wait_for(is_over, timeout_s)
            failed = {os.path.realpath(path) for path in self._failed}
            return done and not (failed if wanted is None else failed & {wanted})

    def close(self, timeout_s: float) -> bool:
        """``wait``, then name the checkpoints that were not made. Processes that still work go on. Idempotent."""
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
            pending = [(filling.name, filling.place()) for filling in self._pending]
        for name, place in pending:
            logger.warning(
                "save_state(%r): the checkpoint is not complete %g s after the end of training; a process goes on with "
                "it (at most %g s until the snapshot is stored). If it is never complete: %s",
                place,
                timeout_s,
                self._stored_within_s,
                self._by_hand(name, place),
            )
        for directory, reason in self._failed.items():
            logger.warning("save_state(%r): there is no checkpoint of this training's state: %s", directory, reason)
        self._failed.clear()
        return done

    # ---------------------------------------------------------------- processes

    def _start(self, directory: str, name: str) -> "tuple[subprocess.Popen[str], int]":
        """Return the process that fills a directory, and a descriptor of that. Raises: OSError."""
        arguments = {
            "url": self._level.url,
            "name": name,
            "options": dict(self._level.storage_options or {}),
            "wait_s": self._stored_within_s,
        }
        handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=os.path.join(directory, UNFINISHED),
                env=_environment(),
                start_new_session=True,
                text=True,
            )
        except BaseException:
            os.close(handle)
            raise
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        assert process.stdin is not None
        # On standard input no other user sees the options.
        with contextlib.suppress(OSError), process.stdin:
            json.dump(arguments, process.stdin)
        return process, handle

    def _by_hand(self, name: str, place: str) -> str:
        to = os.path.abspath(place)
        return (
            f"`lazysnap export {self._level.url} {name} --to {to} --format accelerate --force` makes it. "
            f"The level keeps the snapshot until `lazysnap prune {self._level.url} --name {name}`"
        )

    def _follow(self, filling: _Filling) -> None:
        assert filling.process.stdout is not None
        said = filling.process.stdout.read()
        code, place = filling.process.wait(), filling.place()
        with self._changed:
            has_newer = any(one is not filling and one.place() == place for one in self._pending)
        try:
            if code in (0, GONE):
                self._succeed(filling, place)
            else:
                if not has_newer:
                    give_up(place)
                by_signal = f"its process was ended by signal {-code}"
                reason = by_signal if code < 0 else said or f"its process ended with status {code}"
                self._fail(filling.name, filling.directory, place, reason)
        finally:
            filling.process.stdout.close()
            with self._changed:
                self._pending.remove(filling)
                os.close(filling.handle)
                self._changed.notify_all()

    def _succeed(self, filling: _Filling, place: str) -> None:
        """Release the snapshot: the checkpoint is complete, or its directory was deleted or saved anew."""
        self._failed.pop(place, None)
        try:
            with contextlib.suppress(ConfigError):  # the engine has ended; the process released the name at the level
                self._release(filling.name)
            filling.then()
        except Exception as error:  # noqa: BLE001  the checkpoint is complete, whatever comes after it
            logger.warning("save_state(%r): the checkpoint is complete, but %s", filling.directory, error)

    def _fail(self, name: str, asked_for: str, place: str, reason: str) -> None:
        """Say it of the directory that the program asked for; ``place``: where that is now."""
        self._failed[place] = self._lost.get(name, reason)
        if name in self._lost:
            logger.warning("save_state(%r): no checkpoint was made: %s", asked_for, self._lost[name])
            return
        by_hand = self._by_hand(name, place)
        logger.warning("save_state(%r): no checkpoint was made: %s. %s", asked_for, reason, by_hand)
        if self._kept is not None and self._kept[0] != name:
            # Failures must not fill the level with snapshots that nothing deletes.
            kept, directory = self._kept
            logger.warning(
                "save_state(%r): the level does not keep its snapshot %r any longer: a newer checkpoint failed, too",
                directory,
                kept,
            )
            with contextlib.suppress(Exception):
                self._release(kept)
        self._kept = name, asked_for


def _environment() -> dict[str, str]:
    """Return the environment without a launcher's variables for this rank, and without devices."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
    }
