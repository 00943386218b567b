"""``save_state(directory)`` and ``load_state(directory)``: checkpoints in Accelerate's own layout."""

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from lazysnap.engine import SnapshotEngine
from lazysnap.errors import LevelError, SnapshotNotFound
from lazysnap.exports.accelerate_folders import delete_superseded, newest_complete, next_iteration, number_of
from lazysnap.exports.background import BackgroundCheckpoints
from lazysnap.exports.folder import begin, filled, give_up, is_unfinished
from lazysnap.integrations.accelerate.state import AcceleratorState
from lazysnap.state.wrappers import wrapper_prefix

logger = logging.getLogger(__name__)

_LOAD_AFTER_S = 3600.0
"""The longest time that a load waits for a checkpoint that is in progress."""
_KEPT_WITHIN_S = 1.0
"""A snapshot that memory does not keep for the level within this time may be written over: the level is busy."""
SMALL_BYTES = 64 << 20
"""A smaller state is written at once: that takes less time than a process takes to begin."""


@dataclass(frozen=True)
class Wanted:
    """The arguments of one call of ``save_state``."""

    directory: str | None
    """``None``: the next one by automatic naming."""
    stock: Callable[[str], Any]
    """Stock ``save_state``, for a directory."""
    safe_serialization: bool = True
    has_more: bool = False
    """True if there are further arguments, which stock alone knows."""


class Directories:
    """The named checkpoints of one accelerator.

    A small state is written at once, by Accelerate. A large one is captured and named; the directory exists at once,
    marked as unfinished, and a process fills it from the stored snapshot. Accelerate writes it while training waits
    without a level, for FSDP2, within an accumulation of gradients, if this step was captured before, and while the
    level is busy with another snapshot: memory has one place for those that wait.
    """

    def __init__(self, accelerator: Any, state: AcceleratorState) -> None:
        self._accelerator = accelerator
        self._state = state
        self._checkpoints: BackgroundCheckpoints | None = None
        """On the main process, once a checkpoint was asked for in the background."""
        self._engine: SnapshotEngine | None = None
        """On all processes, once a checkpoint was asked for in the background."""
        self._numbers = itertools.count()
        self._has_told = False

    # ---------------------------------------------------------------- saving

    def choose(self, wanted: Wanted) -> tuple[str, bool]:
        """Return the directory of the next checkpoint, and whether it is to be written at once. Collective.

        Counts ``project_configuration.iteration``.
        """
        project = self._accelerator.project_configuration
        directory, number = wanted.directory, project.iteration
        if project.automatic_checkpoint_naming:
            directory, number = self._next()
        assert directory is not None
        project.iteration = number + 1
        is_small = all(gather_object([self._state.size_bytes() < SMALL_BYTES]))
        return directory, is_small

    def save_at_once(self, directory: str, wanted: Wanted) -> None:
        """Let Accelerate write a checkpoint, which is complete or not there: an earlier one stays as it was.

        All ranks see the same file system. Collective. Blocks. Raises: OSError and what Accelerate raises on this rank;
        LevelError, if another rank failed.
        """
        project = self._accelerator.project_configuration
        with contextlib.ExitStack() as main:
            place = filled(directory, {"layout": "accelerate"})
            inner = self._by_main(directory, lambda: os.readlink(main.enter_context(place)))
            naming, iteration = project.automatic_checkpoint_naming, project.iteration
            project.automatic_checkpoint_naming = False  # else stock would choose another place
            try:
                _together(directory, lambda: wanted.stock(inner))
            finally:
                project.automatic_checkpoint_naming, project.iteration = naming, iteration
            self._by_main(directory, main.close)
        self._trimming()()

    def save(self, directory: str, wanted: Wanted, engine: SnapshotEngine, capture: Callable[[], bool]) -> None:
        """Have a checkpoint made of the snapshot of this step.

        ``capture``: captures this step; ``False`` if no capture began. Collective. Blocks only where Accelerate writes
        the checkpoint. Raises: what Accelerate raises then; ConfigError and OSError, for the directory.
        """
        reason = self._why_blocking(wanted, engine)
        if reason is None:
            inner = self._by_main(directory, lambda: begin(directory))
            self._run_hooks(inner, safe_serialization=wanted.safe_serialization)
            try:
                is_captured = all(gather_object([capture()]))
            finally:
                self._state.counters.facts = {}
            name = self._name(engine, is_there=is_captured)
            if name is not None:
                self._fill(directory, name, engine)
                return
            self._by_main(directory, lambda: give_up(directory))
            reason = "this step was captured before, or memory or storage cannot take it now"
        if not self._has_told:
            self._has_told = True
            logger.info("save_state(%r): written by Accelerate while training waits: %s", directory, reason)
        self.save_at_once(directory, wanted)

    def _next(self) -> tuple[str, int]:
        root, number = self._root, self._accelerator.project_configuration.iteration

        def choose() -> int:
            return next_iteration(os.listdir(root) if os.path.isdir(root) else [], number)

        chosen = self._by_main(root, choose)
        return os.path.join(root, f"checkpoint_{chosen}"), chosen

    @property
    def _root(self) -> str:
        """The directory of the checkpoints that Accelerate names."""
        return os.path.join(self._accelerator.project_dir, "checkpoints")

    def _why_blocking(self, wanted: Wanted, engine: SnapshotEngine) -> str | None:
        if wanted.has_more:
            return "it has arguments that Accelerate hands to the model's own way of saving"
        if not engine._config.levels:
            return "there is no level that stores snapshots"
        if self._accelerator.distributed_type.name == "FSDP":
            return "its layout for FSDP2 is written by all ranks"
        if not self._accelerator.sync_gradients:
            return "it is within an accumulation of gradients"
        return None

    def _run_hooks(self, directory: str, *, safe_serialization: bool) -> None:
        """Record what the checkpoint will hold, and run the script's save hooks, which write into its directory."""
        accelerator = self._accelerator
        models, hooks = accelerator._models, accelerator._save_model_state_pre_hook
        names = ["model" if number == 0 else f"model_{number}" for number in range(len(models))]
        prefixes = {name: wrapper_prefix(model) for name, model in zip(names, models, strict=True)}
        facts: dict[str, Any] = {"prefixes": prefixes, "safe_serialization": safe_serialization}
        loaders = enumerate(accelerator._dataloaders)
        stateful = {number: one for number, one in loaders if getattr(one, "use_stateful_dataloader", False)}
        facts["stateful_loaders"] = {f"loader_{n}" if n else "loader": one.state_dict() for n, one in stateful.items()}
        if hooks:
            weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
            all_weights = list(weights)
            for hook in hooks.values():
                hook(models, weights, directory)
            kept = [any(one is left for left in weights) for one in all_weights]
            facts["models"] = [name for name, is_kept in zip(names, kept, strict=True) if is_kept]
        self._state.counters.facts = facts

    def _name(self, engine: SnapshotEngine, *, is_there: bool) -> str | None:
        """Name the snapshot of this step. ``None`` if a rank has none, or cannot have it stored. Collective."""
        # The start's id: an earlier start may have used such a name at the same step.
        name = f"save_state-{engine.step}-{engine._run.meta.start}-{next(self._numbers)}"
        is_named = is_there and engine.keep(name) == engine.step
        if all(gather_object([is_named and engine._is_to_be_stored(engine.step, _KEPT_WITHIN_S)])):
            return name
        if is_there:
            engine.release(name)  # else a later snapshot would be called so
        return None

    def _fill(self, directory: str, name: str, engine: SnapshotEngine) -> None:
        self._engine = engine
        if not self._accelerator.is_main_process:
            return
        if self._checkpoints is None:
            self._checkpoints = BackgroundCheckpoints(engine._config.levels[0], engine.release)
        trim = self._trimming()
        self._checkpoints.save(directory, name, trim)
        trim()

    def _trimming(self) -> Callable[[], object]:
        """Return a function that deletes checkpoints beyond ``total_limit``; the accelerator may be gone by then."""
        project = self._accelerator.project_configuration
        if not project.automatic_checkpoint_naming or not self._accelerator.is_main_process:
            return lambda: None
        return functools.partial(delete_superseded, self._root, project.total_limit)

    def give_up_lost(self, engine: SnapshotEngine) -> None:
        """Make no checkpoint of snapshots that were lost before they were stored."""
        if self._checkpoints is not None and engine._lost_names:
            self._checkpoints.give_up(engine._lost_names)

    # ---------------------------------------------------------------- loading

    def wait(self, timeout_s: float, directory: str | None = None) -> bool:
        """Block until the checkpoints (or that of ``directory``) are complete; ``False`` after the deadline, or if one
        cannot be made. Collective. Raises: WaitTimeout, if a rank is dead or does not call this.
        """
        if self._engine is None:
            return True
        made, where = self._checkpoints, directory or "checkpoints"
        # Only the main process waits. The engine exchanges heartbeats meanwhile: the deadline of the program's process
        # group may be shorter than the wait.
        self._engine._together("waiting for checkpoints", lambda: made and made.wait(timeout_s, directory))
        return bool(self._by_main(where, lambda: made is None or made.wait(0, directory)))

    def find(self, directory: str | None) -> str | None:
        """Return the directory to load: ``directory``, or the newest complete one by automatic naming. Without both
        ``None``: stock says what is missing.

        Collective. Blocks: until checkpoints that are in progress are complete. Raises: SnapshotNotFound, if
        ``directory`` is unfinished, or automatic naming finds no complete one.
        """
        self.wait(_LOAD_AFTER_S, directory)
        if directory is not None:
            if self._by_main(directory, lambda: is_unfinished(directory)):
                raise SnapshotNotFound(
                    f"load_state({directory!r}): this checkpoint is not finished. If the process that fills it still "
                    'runs, it will be; else load another directory, or "latest" for the newest snapshot'
                )
            return directory
        if not self._accelerator.project_configuration.automatic_checkpoint_naming:
            return directory
        root = self._root
        found: str | None = self._by_main(root, lambda: newest_complete(root))
        if found is None:
            raise SnapshotNotFound(
                f'load_state(): no complete checkpoint in {root}: give a directory, or "latest" for the newest snapshot'
            )
        return found

    def loaded(self, directory: str) -> None:
        """Continue the numbering after a checkpoint that stock loaded; warn if it had no random states of this rank."""
        accelerator = self._accelerator
        number = number_of(directory)
        if accelerator.project_configuration.automatic_checkpoint_naming and number is not None:
            accelerator.project_configuration.iteration = number + 1
        name = f"random_states_{accelerator.process_index}.pkl"
        if not os.path.exists(os.path.join(directory, name)):  # stock says nothing
            logger.warning("%s has no %s: random numbers are not those of the checkpoint", directory, name)

    # ---------------------------------------------------------------- the end

    def close(self, timeout_s: float) -> None:
        """Wait for the checkpoints, and name those that are not made. Blocks: at most ``timeout_s``."""
        made, self._checkpoints, self._engine = self._checkpoints, None, None
        if made is not None:
            made.close(timeout_s)

    def _by_main(self, directory: str, work: Callable[[], Any]) -> Any:
        """Return the result of ``work`` on the main process, on all ranks. Collective. Raises: as ``_together``."""
        return _together(directory, lambda: work() if self._accelerator.is_main_process else None)[0]


def _together(directory: str, work: Callable[[], Any]) -> list[Any]:
    """Do ``work`` on every rank, and return the results of all ranks. Collective.

    An error on any rank is raised on all. Raises: what ``work`` raises; LevelError, if another rank failed.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  raised below, when all ranks know
        failure = error
    results = gather_object([(result, failure and f"{type(failure).__name__}: {failure}")])
    if failure is not None:
        raise failure
    others = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(results) if text is not None]
    if others:
        raise LevelError(f"{directory!r}: {'; '.join(others)}")
    return [result for result, _ in results]
