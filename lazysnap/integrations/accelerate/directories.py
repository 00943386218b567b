"""``save_state(directory)`` and ``load_state(directory)``: a directory is the name of a snapshot."""

import functools
import itertools
import logging
import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from lazysnap.console import say
from lazysnap.engine import SnapshotEngine
from lazysnap.engine.stored import is_itself_durable, wait_held_or_stored
from lazysnap.errors import LevelError
from lazysnap.exports.named import Named, delete_checkpoint, forget_name, has_checkpoint, name_snapshot, named_in
from lazysnap.exports.process import start_export
from lazysnap.integrations.accelerate.numbering import Numbering
from lazysnap.integrations.accelerate.state import AcceleratorState

logger = logging.getLogger(__name__)


_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")
_KEPT_WITHIN_S = 1.0
"""Seconds within which memory must hold a snapshot for the level. Otherwise the level is busy, and the snapshot may be
overwritten.
"""
_PAUSE_S = 0.02
_REPORT_AFTER_S = 1.0


@dataclass
class _Save:
    """A directory whose checkpoint is not complete."""

    directory: str
    name: str
    """The name for which retention keeps the snapshot."""
    named: Named
    process: "subprocess.Popen[str] | None" = None
    """The export, once the snapshot is durable; on the main rank."""

    @property
    def is_current(self) -> bool:
        """True if the directory still names this snapshot, and was neither deleted nor saved again."""
        return named_in(self.directory) == self.named

    @property
    def advice(self) -> str:
        """The command that writes the checkpoint."""
        return f"`lazysnap export {self.named.place} {self.name} --to {self.directory} --format accelerate` writes it"


class Directories:
    """The directories that the program names, and the exports into them."""

    def __init__(self, accelerator: Any, state: AcceleratorState) -> None:
        # Keeps no reference to the accelerator, which may be collected before the last exports.
        self._is_main_process = accelerator.is_main_process
        self.numbering = Numbering(accelerator.project_configuration)
        self._state = state
        self._numbers = itertools.count()
        """Numbers that, with the id of the start, make the names of snapshots unique."""
        self._saves: list[_Save] = []
        """Saves in progress: on the main rank until the export ends, on others until the snapshot is durable."""
        self._failed: set[str] = set()
        """Directories that have no checkpoint, on the main rank."""

    # ---------------------------------------------------------------- saving

    def begin(self, directory: str | None) -> str:
        """Make the directory of the next checkpoint, and return it. Counts ``project_configuration.iteration``.

        ``directory``: the given directory, unless naming is automatic. Collective. Raises: OSError.
        """
        chosen, number = self._by_main(functools.partial(self.numbering.make_next, directory))
        self.numbering.continue_behind(number)
        return str(chosen)

    def save(
        self, directory: str, engine: SnapshotEngine, capture: Callable[[], bool], *, safe_serialization: bool
    ) -> bool:
        """Capture this step, and let ``directory`` name the snapshot. ``False`` if memory or storage cannot take it.

        ``capture``: captures this step; ``False`` if no capture began. Collective.
        """
        self._release_deleted(engine)
        place = os.path.realpath(directory)
        names = self._state.counters.names
        earlier_name = names.get(place)
        # A name begins with a letter or digit, whatever the directory begins with: `_last`, `.ckpt`.
        readable_part = _NO_NAME.sub("-", os.path.basename(place))[:24].lstrip("._-") or "state"
        name = f"{readable_part}-{engine._run.meta.start}-{next(self._numbers)}"
        with self._state.as_checkpoint(directory, safe_serialization=safe_serialization):
            names[place] = name
            is_captured = capture()
        is_kept = is_captured and engine.keep(name) == engine.step
        is_stored_later = is_kept and wait_held_or_stored(engine._run, engine.step, _KEPT_WITHIN_S)
        if not all(gather_object([is_stored_later])):
            if is_kept:
                engine.release(name)  # otherwise a later snapshot would get the name
            del names[place]
            if earlier_name is not None:
                names[place] = earlier_name  # until Accelerate has written the directory
            return False
        if earlier_name is not None:
            engine.release(earlier_name)
        assert engine.run_id is not None
        named = Named(engine._config.levels[0].url, engine.run_id, engine.step)
        self._by_main(functools.partial(name_snapshot, place, named))
        self._saves.append(_Save(place, name, named))
        return True

    def save_by_stock(self, directory: str, stock: Callable[[str], Any]) -> None:
        """Let Accelerate write a checkpoint, while training waits. Collective. Raises: as Accelerate."""
        self._by_main(functools.partial(forget_name, directory))
        with self.numbering.suspended():
            stock(directory)
        if self._is_main_process:
            for superseded in self.numbering.superseded(directory):
                delete_checkpoint(superseded)

    def _release_deleted(self, engine: SnapshotEngine) -> None:
        """Release the snapshots whose directories were deleted, or no longer name a snapshot. Collective."""
        names = self._state.counters.names
        for place in self._by_main(self._deleted):
            engine.release(names.pop(place))

    def _deleted(self) -> list[str]:
        """Return the directories that no longer name a snapshot."""
        return [place for place in self._state.counters.names if named_in(place) is None]

    # ---------------------------------------------------------------- exports

    def poll(self, engine: SnapshotEngine) -> None:
        """Start exports of durable snapshots, and report ended ones. Does not block."""
        for save in list(self._saves):
            if self._finish(save, engine):
                self._saves.remove(save)

    def _finish(self, save: _Save, engine: SnapshotEngine) -> bool:
        """Start the export into a directory if its snapshot is durable. True if this rank has nothing more to do."""
        if save.process is not None:
            return self._finish_export(save, save.process)
        if not save.is_current:
            return True
        lost_names = engine._lost_names()
        if save.name in lost_names:
            self._fail(save, f"{lost_names[save.name]}; save it again")
            return True
        if not is_itself_durable(engine._run, save.named.step):
            return False
        if not self._is_main_process:
            return True
        superseded = self.numbering.superseded(save.directory)
        try:
            save.process = start_export(save.directory, engine._config.levels[0], superseded)
        except OSError as error:
            self._fail(save, f"no process can be started: {error}; {save.advice}")
            return True
        return False

    def _finish_export(self, save: _Save, process: "subprocess.Popen[str]") -> bool:
        """Report the end of an export. ``False`` if it is still running."""
        if process.poll() is None:
            return False
        assert process.stdout is not None
        with process.stdout:
            reason = process.stdout.read() or f"its process ended with status {process.returncode}"
        if process.returncode == 0:
            self._failed.discard(save.directory)
        elif save.is_current:
            self._fail(save, f"{reason}; {save.advice}")
        return True

    def _fail(self, save: _Save, reason: str) -> None:
        if self._is_main_process:
            self._failed.add(save.directory)
            logger.warning("save_state(%r): no checkpoint was written: %s", save.directory, reason)

    # ---------------------------------------------------------------- waiting

    def wait_stored(self, engine: SnapshotEngine) -> None:
        """Block until the level has stored the snapshots of all directories, at most ``drain_timeout_s``."""
        engine.gate()
        self._wait(engine, engine._config.drain_timeout_s, self._all_stored)

    def wait_complete(self, engine: SnapshotEngine, timeout_s: float) -> bool:
        """Block until every directory has its checkpoint; ``False`` after the deadline, or if one cannot be made.

        Collective. Raises: WaitTimeout, if a rank is dead or does not call this.
        """
        engine.gate()
        # The engine exchanges heartbeats meanwhile: the deadline of the program's process group may be shorter.
        work = functools.partial(self._wait, engine, timeout_s, self._all_finished)
        engine._together("waiting for checkpoints", work)
        return bool(self._by_main(self._all_complete))

    def _all_stored(self) -> bool:
        return all(save.process is not None for save in self._saves)

    def _all_finished(self) -> bool:
        return not self._saves

    def _all_complete(self) -> bool:
        return not self._saves and not self._failed

    def _wait(self, engine: SnapshotEngine, timeout_s: float, is_over: Callable[[], bool]) -> None:
        start_s = time.monotonic()
        is_reported = not self._is_main_process
        self.poll(engine)
        while not is_over() and time.monotonic() < start_s + timeout_s:
            time.sleep(_PAUSE_S)
            self.poll(engine)
            if self._saves and not is_reported and time.monotonic() > start_s + _REPORT_AFTER_S:
                is_reported = True
                say(f"save_state(directory): waiting for {self._saves[0].directory!r} to be complete")

    def close(self, engine: SnapshotEngine, timeout_s: float) -> None:
        """Wait for the exports of a closed engine, and report failed ones. Blocks."""
        self.poll(engine)
        exporting = []
        for save in self._saves:
            if save.process is None:
                self._fail(save, f"its snapshot was not stored in time; when it is, {save.advice}")
            else:
                exporting.append(save)
        self._saves = exporting
        self._wait(engine, timeout_s, self._all_finished)
        for save in self._saves:
            if save.process is not None and save.process.stdout is not None:
                save.process.stdout.close()
                logger.warning("save_state(%r): a process still writes the checkpoint", save.directory)
        self._saves = []
        self._failed = set()

    # ---------------------------------------------------------------- loading

    def to_load(self, directory: str | None) -> list[tuple[str, Named | None]]:
        """Return the directories to load, the best first, and the snapshots that they name. Collective.

        ``directory``: the only candidate; ``None``: all directories that Accelerate named.
        """
        directories: list[tuple[str, Named | None]] = self._by_main(functools.partial(self._candidates, directory))
        return directories

    def has_checkpoint(self, directory: str) -> bool:
        """True if there are files of a checkpoint in a directory, for the main process. Collective."""
        return bool(self._by_main(functools.partial(has_checkpoint, directory)))

    def _candidates(self, directory: str | None) -> list[tuple[str, Named | None]]:
        if directory is not None:
            return [(directory, named_in(directory))]
        return [(path, named_in(path)) for path in self.numbering.newest_first()]

    def _by_main(self, work: Callable[[], Any]) -> Any:
        """Call ``work`` on the main process, and return its result on all ranks. Collective.

        Raises: as ``work``, on the main process; LevelError on the others, if ``work`` failed.
        """
        result: Any = None
        failure: Exception | None = None
        failure_text: str | None = None
        if self._is_main_process:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  raised below, when all ranks know
                failure = error
                failure_text = f"{type(error).__name__}: {error}"
        answers = gather_object([(result, failure_text)])
        if failure is not None:
            raise failure
        result, failure_text = answers[0]
        if failure_text is not None:
            raise LevelError(f"rank 0: {failure_text}")
        return result
