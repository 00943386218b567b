"""``save_state(directory)`` and ``load_state(directory)``: checkpoints in Accelerate's own layout."""

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from lazysnap.engine import SnapshotEngine
from lazysnap.errors import SnapshotNotFound
from lazysnap.export.accelerate import Restated, write_restated
from lazysnap.export.accelerate_folders import (
    Parts,
    delete_superseded,
    newest_complete,
    next_iteration,
    number_of,
    stock_prefix,
)
from lazysnap.export.copies import Copy, NamedCopies
from lazysnap.export.folder import discard, side_directory
from lazysnap.integrations.accelerate.blocking import by_main, save_blocking, write_together
from lazysnap.integrations.accelerate.state import AcceleratorState

logger = logging.getLogger(__name__)

_CHECKPOINTS = "checkpoints"
_LOAD_AFTER_S = 3600.0
"""So long a load waits for a copy that is under way."""


@dataclass(frozen=True)
class Wanted:
    """What ``save_state`` was called with."""

    directory: str | None
    """``None``: the next one by automatic naming."""
    stock: Callable[[str], Any]
    """Stock ``save_state``, for a directory."""
    safe_serialization: bool = True
    has_more: bool = False
    """Whether there are further arguments, that stock alone knows."""


@contextlib.contextmanager
def _without_models(accelerator: Any) -> Iterator[None]:
    """Within it stock ``save_state`` writes what is small, and calls no hooks."""
    names = ("_models", "_optimizers", "_save_model_state_pre_hook")
    held = [getattr(accelerator, name) for name in names]
    try:
        for name, value in zip(names, held, strict=True):
            setattr(accelerator, name, type(value)())
        yield
    finally:
        for name, value in zip(names, held, strict=True):
            setattr(accelerator, name, value)


class Directories:
    """The named checkpoints of one accelerator.

    A checkpoint is made of the snapshot of this step, in the background. Where that cannot be, it is stock that writes
    it, and training waits: without a level; for FSDP2; within an accumulation of gradients; where weights or optimizer
    changed since the snapshot of this step was taken. Either way it is complete or not there.
    """

    def __init__(self, accelerator: Any, state: AcceleratorState) -> None:
        self._accelerator = accelerator
        self._state = state
        self._copies: NamedCopies | None = None
        self._numbers = itertools.count()
        self._has_told = False

    # ---------------------------------------------------------------- saving

    def save(self, wanted: "Wanted", engine: SnapshotEngine, capture: Callable[[], bool]) -> str:
        """Have a checkpoint made; its directory.

        ``capture``: captures this step; ``False``, if that cannot be. Collective. Blocks: where stock writes it.
        Raises: what that raises, then.
        """
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        directory, number = wanted.directory, project.iteration
        if project.automatic_checkpoint_naming:
            directory, number = self._next()
        assert directory is not None
        project.iteration = number + 1
        reason = self._why_blocking(wanted, engine)
        if reason is None:
            added = self._run_hooks(directory, safe_serialization=wanted.safe_serialization)
            try:
                is_captured = all(gather_object([capture()]))
                now = None if is_captured else engine.restated(self._state.parts_with_weights())
            finally:
                self._state.counters.facts = {}
            name = self._name(engine, is_there=is_captured or now is not None)
            if name is not None and now is not None:
                added = self._write_rest(directory, added, wanted, Restated(engine.step, now))
            if name is not None:
                self._copy(directory, name, added, engine)
                return directory
            if added is not None and accelerator.is_main_process:
                discard(added)
            reason = "weights or optimizer changed since this step was captured, or storage cannot take it now"
        if not self._has_told:
            self._has_told = True
            logger.info("save_state(%r): written by Accelerate while training waits: %s", directory, reason)
        save_blocking(accelerator, directory, wanted.stock)
        self._trimming()()
        return directory

    def _next(self) -> tuple[str, int]:
        accelerator = self._accelerator
        root, number = os.path.join(accelerator.project_dir, _CHECKPOINTS), accelerator.project_configuration.iteration

        def choose() -> int:
            return next_iteration(os.listdir(root) if os.path.isdir(root) else [], number)

        chosen = by_main(accelerator, root, choose)
        return os.path.join(root, f"checkpoint_{chosen}"), chosen

    def _why_blocking(self, wanted: "Wanted", engine: SnapshotEngine) -> str | None:
        if wanted.has_more:
            return "it has arguments that Accelerate hands to the model's own way of saving"
        if not engine.config.levels:
            return "there is no level that stores snapshots"
        if self._accelerator.distributed_type.name == "FSDP":
            return "its layout for FSDP2 is written by all ranks"
        return None if self._accelerator.sync_gradients else "it is within an accumulation of gradients"

    def _run_hooks(self, directory: str, *, safe_serialization: bool) -> str | None:
        """Call the script's save hooks, and note what the checkpoint is to hold; the directory that they wrote into."""
        accelerator = self._accelerator
        models, hooks = accelerator._models, accelerator._save_model_state_pre_hook
        names = ["model" if number == 0 else f"model_{number}" for number in range(len(models))]
        prefixes = {name: stock_prefix(model) for name, model in zip(names, models, strict=True)}
        facts: dict[str, Any] = {"prefixes": prefixes, "safe_serialization": safe_serialization}
        loaders = enumerate(accelerator._dataloaders)
        stateful = {number: one for number, one in loaders if getattr(one, "use_stateful_dataloader", False)}
        facts["stateful_loaders"] = {f"loader_{n}" if n else "loader": one.state_dict() for n, one in stateful.items()}
        place = self._beside(directory) if hooks else None
        if hooks:
            weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
            all_weights = list(weights)
            for hook in hooks.values():
                hook(models, weights, place)
            kept = [any(one is left for left in weights) for one in all_weights]
            facts["models"] = [name for name, is_kept in zip(names, kept, strict=True) if is_kept]
        self._state.counters.facts = facts
        return place

    def _name(self, engine: SnapshotEngine, *, is_there: bool) -> str | None:
        """Name the snapshot of this step; ``None`` if a rank has none, or cannot have it stored. Collective."""
        # Of this start: one before may have left such a name at the same step.
        name = f"save_state-{engine.step}-{engine.start}-{next(self._numbers)}"
        if all(gather_object([is_there and engine.keep(name) == engine.step])):
            return name
        if is_there:
            engine.release(name)  # else a later snapshot would be called so
        return None

    def _beside(self, directory: str) -> str:
        """A directory beside ``directory``, the same on all ranks. Collective. Raises: as ``side_directory``."""
        place: str = by_main(self._accelerator, directory, lambda: side_directory(directory))
        return place

    def _write_rest(self, directory: str, added: str | None, wanted: "Wanted", now: Restated) -> str:
        """For a step that was captured before: write all but models and optimizers as it is now; where to.

        Collective. Blocks. Raises: what stock raises.
        """
        accelerator, place = self._accelerator, added or self._beside(directory)

        def write(beside: str) -> None:
            if accelerator.is_main_process:
                write_restated(now, beside)
            with _without_models(accelerator):
                wanted.stock(beside)

        try:
            write_together(accelerator, directory, place, write)
        except BaseException:
            if accelerator.is_main_process:
                discard(place)
            raise
        return place

    def _copy(self, directory: str, name: str, added: str | None, engine: SnapshotEngine) -> None:
        if not self._accelerator.is_main_process:
            return
        if self._copies is None:
            self._copies = NamedCopies(engine.config.levels[0], engine.release)
        trim = self._trimming()

        def then() -> None:
            if added is not None:
                discard(added)
            trim()

        self._copies.save(Copy(directory=directory, name=name, add=added, then=then))

    def _trimming(self) -> Callable[[], object]:
        """What deletes checkpoints beyond ``total_limit``, when a new one is complete: the accelerator may be gone."""
        project = self._accelerator.project_configuration
        if not project.automatic_checkpoint_naming or not self._accelerator.is_main_process:
            return lambda: None
        root = os.path.join(self._accelerator.project_dir, _CHECKPOINTS)
        return functools.partial(delete_superseded, root, project.total_limit, self._parts())

    def _parts(self) -> Parts:
        accelerator = self._accelerator
        return Parts(
            models=len(accelerator._models),
            optimizers=len(accelerator._optimizers),
            schedulers=len(accelerator._schedulers),
            customs=len(accelerator._custom_objects),
            ranks=accelerator.num_processes,
            has_scaler=accelerator.scaler is not None,
        )

    def look(self, engine: SnapshotEngine) -> None:
        """Wait no longer for snapshots that were lost before they were stored."""
        if self._copies is not None and engine.lost_names:
            self._copies.give_up(engine.lost_names)

    # ---------------------------------------------------------------- loading

    def find(self, directory: str | None) -> str | None:
        """The directory to load: ``directory``, or the newest complete one by automatic naming (else ``None``: stock
        says what is missing). Copies that are under way are waited for. Collective. Blocks.

        Raises: SnapshotNotFound, if by automatic naming there is none that is complete.
        """
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        if self._copies is not None:
            self._copies.wait(_LOAD_AFTER_S, directory)
        if directory is not None or not project.automatic_checkpoint_naming:
            return directory
        root = os.path.join(accelerator.project_dir, _CHECKPOINTS)
        found: str | None = by_main(accelerator, root, lambda: newest_complete(root, self._parts()))
        if found is None:
            raise SnapshotNotFound(
                f'load_state(): no complete checkpoint in {root}: give a directory, or "latest" for the newest snapshot'
            )
        return found

    def loaded(self, directory: str) -> None:
        """A checkpoint was loaded by stock: go on behind its number; say so if random numbers were not loaded."""
        accelerator = self._accelerator
        number = number_of(directory)
        if accelerator.project_configuration.automatic_checkpoint_naming and number is not None:
            accelerator.project_configuration.iteration = number + 1
        name = f"random_states_{accelerator.process_index}.pkl"
        if not os.path.exists(os.path.join(directory, name)):  # stock says nothing
            logger.warning("%s has no %s: random numbers are not those of the checkpoint", directory, name)

    # ---------------------------------------------------------------- the end

    def close(self, timeout_s: float) -> None:
        """Wait for the copies, and name those that are not made. Blocks: at most ``timeout_s``."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.close(timeout_s)
