"""``save_state(directory)`` and ``load_state(directory)``: a directory is the name of a snapshot."""

import itertools
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from lazysnap.console import say
from lazysnap.core.messages import StepKey
from lazysnap.engine import SnapshotEngine
from lazysnap.errors import LevelError
from lazysnap.exports.named import Named, forget_name, name_snapshot, named_in
from lazysnap.exports.process import start_export
from lazysnap.integrations.accelerate.state import AcceleratorState
from lazysnap.state.wrappers import wrapper_prefix

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")
_TAKEN_WITHIN_S = 1.0
"""A snapshot that memory does not keep for the level within this time may be written over: the level is busy."""
_PAUSE_S = 0.02
_SAID_AFTER_S = 1.0


@dataclass
class _Save:
    """A directory whose checkpoint is not complete."""

    directory: str
    name: str
    """The name for which retention leaves the snapshot alone."""
    key: StepKey
    named: Named
    process: "subprocess.Popen[str] | None" = None
    """The export, once the snapshot is durable; on the main rank."""

    @property
    def by_hand(self) -> str:
        """The command that writes the checkpoint."""
        return f"`lazysnap export {self.named.place} {self.name} --to {self.directory} --format accelerate` writes it"


class Directories:
    """The directories that the program names, and the exports into them."""

    def __init__(self, accelerator: Any, state: AcceleratorState) -> None:
        self._accelerator = accelerator
        # The accelerator may be gone before the last exports.
        self._is_main_process = accelerator.is_main_process
        self._project = accelerator.project_configuration
        self._state = state
        self._numbers = itertools.count()
        """Make the names of snapshots unique, with the id of the start."""
        self._saves: list[_Save] = []
        """Those that are not over: on the main rank until the export ended, on others until the snapshot is durable."""
        self._failed: set[str] = set()
        """Directories that have no checkpoint, on the main rank."""

    @property
    def _root(self) -> str:
        """The directory of the checkpoints that Accelerate names."""
        return os.path.join(self._project.project_dir, "checkpoints")

    # ---------------------------------------------------------------- saving

    def begin(self, directory: str | None) -> str:
        """Return the directory of the next checkpoint, which is made. Counts ``project_configuration.iteration``.

        ``directory``: the one that the program names, unless naming is automatic. Collective. Raises: OSError.
        """

        def make() -> tuple[str, int]:
            number = self._project.iteration
            chosen = directory
            if self._project.automatic_checkpoint_naming:
                number = max([number, *(earlier + 1 for earlier in _numbers_in(self._root))])
                chosen = _numbered(self._root, number)
            assert chosen is not None
            os.makedirs(chosen, exist_ok=True)
            return chosen, number

        chosen, number = self._by_main(make)
        self._project.iteration = number + 1
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
        start = engine._run.meta.start
        name = f"{_NO_NAME.sub('-', os.path.basename(place))[:24]}-{start}-{next(self._numbers)}"
        self._state.counters.facts = self._facts(directory, safe_serialization=safe_serialization)
        names[place] = name
        try:
            is_captured = capture()
        finally:
            self._state.counters.facts = {}
        if earlier_name is not None:
            engine.release(earlier_name)
        is_kept = is_captured and engine.keep(name) == engine.step
        if not all(gather_object([is_kept and engine._is_to_be_stored(engine.step, _TAKEN_WITHIN_S)])):
            if is_kept:
                engine.release(name)  # else a later snapshot would be called so
            del names[place]
            return False
        assert engine.run_id is not None
        named = Named(engine._config.levels[0].url, engine.run_id, engine.step)
        self._by_main(lambda: name_snapshot(place, named))
        self._saves.append(_Save(place, name, StepKey(engine._run.meta.start_number, engine.step), named))
        return True

    def save_by_stock(self, directory: str, stock: Callable[[str], Any]) -> None:
        """Let Accelerate write a checkpoint, while training waits. Collective. Raises: what Accelerate raises."""
        self._by_main(lambda: forget_name(directory))
        naming = self._project.automatic_checkpoint_naming
        iteration = self._project.iteration
        self._project.automatic_checkpoint_naming = False  # else stock would choose another place
        try:
            stock(directory)
        finally:
            self._project.automatic_checkpoint_naming = naming
            self._project.iteration = iteration
        self._delete_superseded(directory)

    def _facts(self, directory: str, *, safe_serialization: bool) -> dict[str, Any]:
        """Return what the checkpoint will hold: see ``exports.accelerate``. Runs the script's save hooks, which write
        into its directory.
        """
        accelerator = self._accelerator
        models = accelerator._models
        names = ["model" if number == 0 else f"model_{number}" for number in range(len(models))]
        prefixes = {name: wrapper_prefix(model) for name, model in zip(names, models, strict=True)}
        stateful: dict[str, Any] = {}
        for number, loader in enumerate(accelerator._dataloaders):
            if getattr(loader, "use_stateful_dataloader", False):
                stateful[f"loader_{number}" if number else "loader"] = loader.state_dict()
        facts: dict[str, Any] = {
            "prefixes": prefixes,
            "safe_serialization": safe_serialization,
            "stateful_loaders": stateful,
        }
        if accelerator._save_model_state_pre_hook:
            weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
            all_weights = list(weights)
            for hook in accelerator._save_model_state_pre_hook.values():
                hook(models, weights, directory)
            facts["models"] = []
            for name, of_model in zip(names, all_weights, strict=True):
                if any(of_model is left for left in weights):
                    facts["models"].append(name)
        return facts

    def _release_deleted(self, engine: SnapshotEngine) -> None:
        """Release the snapshots whose directories are gone, or name another one. Collective."""
        names = self._state.counters.names
        gone = self._by_main(lambda: [place for place in names if named_in(place) is None])
        for place in gone:
            engine.release(names.pop(place))

    # ---------------------------------------------------------------- exports

    def poll(self, engine: SnapshotEngine) -> None:
        """Start exports of snapshots that are durable by now, and report those that ended. Does not block."""
        for save in list(self._saves):
            if save.process is not None:
                is_over = self._has_ended(save, save.process)
            elif named_in(save.directory) != save.named:  # deleted, or saved again
                is_over = True
            elif save.name in engine._lost_names:
                is_over = True
                self._fail(save, f"{engine._lost_names[save.name]}; save it again")
            else:
                levels = engine._client.state.levels
                is_durable = bool(levels) and save.key in levels[0].complete
                is_over = is_durable and not self._start_export(save, engine)
            if is_over:
                self._saves.remove(save)

    def _start_export(self, save: _Save, engine: SnapshotEngine) -> bool:
        """Start the export into a directory; ``False`` if this rank has none."""
        if not self._is_main_process:
            return False
        self._delete_superseded(save.directory)
        try:
            save.process = start_export(save.directory, engine._config.levels[0])
        except OSError as error:
            self._fail(save, f"no process can be started: {error}; {save.by_hand}")
        return save.process is not None

    def _has_ended(self, save: _Save, process: "subprocess.Popen[str]") -> bool:
        if process.poll() is None:
            return False
        assert process.stdout is not None
        with process.stdout:
            reason = process.stdout.read() or f"its process ended with status {process.returncode}"
        if process.returncode == 0:
            self._failed.discard(save.directory)
        elif named_in(save.directory) == save.named:
            self._fail(save, f"{reason}; {save.by_hand}")
        return True

    def _fail(self, save: _Save, reason: str) -> None:
        if self._is_main_process:
            self._failed.add(save.directory)
            logger.warning("save_state(%r): no checkpoint was written: %s", save.directory, reason)

    def _delete_superseded(self, directory: str) -> None:
        """Delete the oldest checkpoints beyond ``total_limit``: of those before ``directory``, which is durable."""
        limit = self._project.total_limit
        if not self._project.automatic_checkpoint_naming or limit is None or not self._is_main_process:
            return
        numbers = _numbers_in(self._root)
        for number in numbers[: max(0, len(numbers) - limit)]:
            path = _numbered(self._root, number)
            if number < int(directory.rpartition("_")[2]):
                shutil.rmtree(path, ignore_errors=True)

    # ---------------------------------------------------------------- waiting

    def settle(self, engine: SnapshotEngine, timeout_s: float) -> None:
        """Block until the level has stored all snapshots that directories name, at most ``timeout_s``."""
        engine.gate()
        self._wait(engine, timeout_s, lambda: all(save.process is not None for save in self._saves))

    def wait(self, engine: SnapshotEngine, timeout_s: float) -> bool:
        """Block until every directory has its checkpoint; ``False`` after the deadline, or if one cannot be made.

        Collective. Raises: WaitTimeout, if a rank is dead or does not call this.
        """
        engine.gate()
        # The engine exchanges heartbeats meanwhile: the deadline of the program's process group may be shorter.
        engine._together("waiting for checkpoints", lambda: self._wait(engine, timeout_s, lambda: not self._saves))
        return bool(self._by_main(lambda: not self._saves and not self._failed))

    def _wait(self, engine: SnapshotEngine, timeout_s: float, is_over: Callable[[], bool]) -> None:
        begun_s = time.monotonic()
        has_said = False
        self.poll(engine)
        while not is_over() and time.monotonic() < begun_s + timeout_s:
            time.sleep(_PAUSE_S)
            self.poll(engine)
            if not has_said and time.monotonic() > begun_s + _SAID_AFTER_S and self._is_main_process:
                has_said = True
                say(f"save_state(directory): waiting for {self._saves[0].directory!r} to be complete")

    def close(self, engine: SnapshotEngine, timeout_s: float) -> None:
        """Wait for the exports of an engine that has ended, and name those that are not made. Blocks."""
        self.poll(engine)
        for save in list(self._saves):
            if save.process is None:
                self._saves.remove(save)
                self._fail(save, f"its snapshot was not stored in time; when it is, {save.by_hand}")
        self._wait(engine, timeout_s, lambda: not self._saves)
        for save in self._saves:
            if save.process is not None and save.process.stdout is not None:
                save.process.stdout.close()
                logger.warning("save_state(%r): a process still writes the checkpoint", save.directory)
        self._saves = []
        self._failed = set()

    # ---------------------------------------------------------------- loading

    def to_load(self, directory: str | None) -> list[tuple[str, Named | None]]:
        """Return the directories to load, the best first, and the snapshots that they name. Collective.

        ``directory``: the only one; ``None``: all that Accelerate named, unless it names none.
        """

        def find() -> list[tuple[str, Named | None]]:
            paths = [] if directory is None else [directory]
            if directory is None and self._project.automatic_checkpoint_naming:
                paths = [_numbered(self._root, number) for number in reversed(_numbers_in(self._root))]
            return [(path, named_in(path)) for path in paths]

        found: list[tuple[str, Named | None]] = self._by_main(find)
        return found

    def loaded(self, directory: str) -> None:
        """Continue the numbering behind a checkpoint that stock loaded."""
        match = _CHECKPOINT.fullmatch(os.path.basename(directory))
        if self._project.automatic_checkpoint_naming and match is not None:
            self._project.iteration = int(match[1]) + 1

    def run_load_hooks(self, directory: str) -> None:
        """Run the script's load hooks, as stock does: they read what save hooks wrote."""
        models = list(self._accelerator._models)
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(models, directory)

    def _by_main(self, work: Callable[[], Any]) -> Any:
        """Return the result of ``work`` on the main process, on all ranks; an error there is raised on all. Collective.

        Raises: what ``work`` raises; on other ranks LevelError.
        """
        result, failure = None, None
        if self._is_main_process:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  raised below, when all ranks know
                failure = error
        answers = gather_object([(result, failure and f"{type(failure).__name__}: {failure}")])
        if failure is not None:
            raise failure
        answer, text = answers[0]
        if text is not None:
            raise LevelError(f"rank 0: {text}")
        return answer


def _numbers_in(root: str) -> list[int]:
    """Return the numbers of the checkpoints in a directory, in order. Blocks."""
    if not os.path.isdir(root):
        return []
    matches = [_CHECKPOINT.fullmatch(name) for name in os.listdir(root)]
    return sorted(int(match[1]) for match in matches if match is not None)


def _numbered(root: str, number: int) -> str:
    return os.path.join(root, f"checkpoint_{number}")
