"""The parts that an accelerator with snapshots has beside a stock one: engine, boundaries, checkpoints, the end."""

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lazysnap.config import SnapshotConfig, config_at
from lazysnap.console import say
from lazysnap.engine import SnapshotEngine, report
from lazysnap.errors import ConfigError, JobBusy, SnapshotNotFound
from lazysnap.exports.named import Named, has_checkpoint
from lazysnap.integrations.accelerate.boundaries import BoundaryWatch
from lazysnap.integrations.accelerate.directories import Directories
from lazysnap.integrations.accelerate.state import AcceleratorState, counted_epochs
from lazysnap.integrations.arguments import place_beside
from lazysnap.integrations.progress_bar import rich_bar
from lazysnap.integrations.session import Session, WithEngine
from lazysnap.restore.snapshot import Snapshot
from lazysnap.state.wrappers import unwrapped

logger = logging.getLogger(__name__)

Snapshots = str | os.PathLike[str] | SnapshotConfig | None

_STOCK = {
    "XLA": "its tensors are evaluated lazily on another device",
    "MEGATRON_LM": "Megatron-LM keeps the training state in objects of its own",
}


class Door(WithEngine):
    """The snapshots of one accelerator. All on the training thread.

    It is large because each call of the accelerator that means a snapshot ends here, in whatever order a script makes
    these calls.

    Without a place for snapshots it chooses one when it has to: see ``_choose_place``.
    Raises: ConfigError, for an accelerator that cannot be captured.
    """

    def __init__(self, accelerator: Any, snapshots: Snapshots) -> None:
        self.made_with = snapshots
        """The place, to be used again for a copy of this accelerator."""
        # It lives as long as the accelerator, which holds it.
        self._accelerator = weakref.proxy(accelerator)
        self._why_stock = _why_stock(accelerator)
        self._is_main_process = accelerator.is_main_process
        self._is_place_guessed = False
        self._is_refused = False
        """True if another program uses a place that was guessed."""
        self._beside: str | None = None
        """A directory of the program that snapshots are stored in, once it was there."""
        self._default_url: str | None = None
        self._config = None if snapshots is None or self._why_stock is not None else config_at(snapshots)
        self._choose_place()
        self.boundaries = BoundaryWatch(self._at_boundary, self._gate, self._counted_epochs)
        self._state = AcceleratorState(self._accelerator, lambda: self.boundaries.positions)
        self.directories = Directories(self._accelerator, self._state)
        """The directories that the program names."""
        self._begins_from: str | None = None
        """The line about the start that the user sees when the session begins."""
        self._left_at = 0
        """The step at which the last session ended."""
        self._has_asked = False
        """True if ``save_state`` was called within an accumulation."""
        self._is_apart = False
        """True if the processes do different numbers of steps now."""
        self._has_told: set[str] = set()
        self._has_trained = False
        """True if an engine was made since the last ``free_memory``."""
        self._began_fresh = False
        """True if the present training did not resume a snapshot."""
        self._follows_fresh_training = False
        """True after ``free_memory`` ended a training that this process began: "latest" would resume that one."""
        self._error_before = _last_error_id()
        """The identity of the error that the interpreter reported last, as of the last boundary."""
        # When nobody holds the accelerator any more, or at the program's exit.
        self._end = weakref.finalize(accelerator, self._finish)

    # ---------------------------------------------------------------- place

    def _choose_place(self, beside: str | None = None) -> None:
        """Choose where snapshots go, if ``snapshots`` does not say it: beside a directory that the program names.

        The directory is ``project_dir``, else ``logging_dir``, else ``beside``.
        """
        project = self._accelerator.project_configuration
        named = project.project_dir or project.logging_dir
        directory = beside if named is None else named
        if self._default_url is None and directory is not None:
            self._default_url = place_beside(directory)
        if self._config is None and self._why_stock is None and self._default_url is not None:
            self._config, self._is_place_guessed = config_at(self._default_url), named is None
            if self._is_place_guessed and self._is_main_process:
                say(
                    f"LazyAccelerator: no project_dir is set, snapshots go to {self._default_url}; give "
                    "project_dir=... or snapshots=... to choose another place"
                )

    # ---------------------------------------------------------------- objects

    @property
    def is_stock(self) -> bool:
        """True if this accelerator saves and loads as Accelerate does; the first time, that is said."""
        if self._why_stock is not None:
            self._tell_once("%s: saving and loading as Accelerate does, without snapshots", self._why_stock)
        return self._why_stock is not None

    def opened(self) -> Session:
        """The session, with all that is prepared by now as its state; begun when it is first used. Collective then.

        Raises: as ``SnapshotEngine``.
        """
        if self._end.alive:
            self._state.refresh()
        if self._session is None:
            if self._config is None and self._why_stock is None:
                self._choose_place(".")
            if self._config is None:
                raise ConfigError(f"LazyAccelerator: there is no engine: {self._why_stock}")
            self._note_beside()
            engine = SnapshotEngine._of_integration(self._config, self._state, default_url=self._default_url)
            self._session = Session(engine, self._left_at)
            self._began_fresh = True
            self._has_trained = True
            self._warn_of_hooks()
            if self._begins_from is not None:
                engine._run.tell_start(self._begins_from)
        return self._session

    def _warn_of_hooks(self) -> None:
        """Name the hooks that only ``save_state(directory)`` and ``load_state(directory)`` run."""
        accelerator = self._accelerator
        if not self._end.alive or not self._is_main_process:
            return
        hooks = [*accelerator._save_model_state_pre_hook.values(), *accelerator._load_model_state_pre_hook.values()]
        names = [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks]
        if names:
            self._tell_once(
                "snapshots do not run the hooks of register_save_state_pre_hook and register_load_state_pre_hook (%s): "
                'what only these hooks save, such as averaged weights (EMA), begins anew after load_state("latest"). '
                "Register it as well, which makes it exact: accelerator.register_for_checkpointing(ema)",
                ", ".join(names),
            )

    @property
    def step(self) -> int:
        """The last step that is over."""
        return self._left_at if self._session is None else self._session.step

    def _counted_epochs(self) -> dict[str, int]:
        return counted_epochs(self._state.custom_objects()) if self._end.alive else {}

    def watch_loader(self, loader: Any) -> None:
        """A loader was prepared."""
        if self._why_stock is None:
            self.boundaries.watch_loader(loader)

    def watch_optimizers(self) -> None:
        """Optimizers were prepared."""
        if self._why_stock is None:
            self.boundaries.watch_optimizers(list(self._accelerator._optimizers))

    def note_model(self, prepared: Any) -> None:
        """A model was prepared."""
        inner = unwrapped(prepared)
        listed = next((model for model in self._accelerator._models if unwrapped(model) is inner), None)
        if listed is not None and listed is not prepared:
            self._state.note_wrapper(listed, prepared)

    # ---------------------------------------------------------------- boundaries

    def rollback(self, steps: int) -> None:
        """Let training go back before the next batch. Raises: ConfigError."""
        self.opened().ask_back(steps)
        self.boundaries.note()

    def boundary(self) -> int | None:
        """``save_state()``: capture now, between two steps; the step, or ``None`` if no capture began.

        Within an accumulation of gradients it is put off until the next optimizer step is over, and that is said once.
        """
        goes_back = self._session is not None and self._session.is_spoilt
        if not self._accelerator.sync_gradients and not goes_back:
            self._has_asked = True
            self._tell_once("save_state() within an accumulation of gradients: captured after the next optimizer step")
            return None
        return self.step if self._capture(force=True) else None

    def _at_boundary(self) -> None:
        asked, self._has_asked = self._has_asked, False
        self._capture(force=asked)

    def _gate(self) -> None:
        if self._session is not None:
            self._session.engine.gate()

    def _capture(self, *, force: bool) -> bool:
        if self._is_refused:
            self.boundaries.passed()
            return False
        session = self.opened()
        self._error_before = _last_error_id()
        self._count(session)
        self._warn_of_hooks()
        self.directories.poll(session.engine)
        if session.is_spoilt:
            session.go_back()
            return False
        try:
            return not self._is_apart and session.engine.boundary(session.step, force=force)
        except JobBusy:
            if not self._is_place_guessed:
                raise
        # Two programs that name no place and run in one directory: stock lets them.
        self._tell_once(
            "NO snapshots: %s is in use by another program that runs in this directory; give each its own project_dir "
            "or snapshots=...",
            self._default_url,
        )
        self._is_refused = True
        session.engine.abandon()
        return False

    def _count(self, session: Session) -> None:
        if self.boundaries.has_stepped:
            self.boundaries.passed()
            session.passes(session.step + 1)

    def save(
        self, directory: str | None, stock: Callable[[str], Any], *, safe_serialization: bool, has_more: bool
    ) -> str:
        """``save_state(directory)``; the directory. Collective.

        Args:
            directory: ``None``: the next one by automatic naming.
            stock: writes a checkpoint into a directory, as Accelerate does.
            safe_serialization: see ``Accelerator.save_state``.
            has_more: true if there are further arguments, which stock alone knows.
        """
        place = self.directories.begin(directory)
        self._choose_place(os.path.dirname(os.path.abspath(place)))
        reason = self._why_saved_by_stock(has_more=has_more)
        if reason is None:
            engine = self.opened().engine
            if self.directories.save(
                place, engine, lambda: self._capture(force=True), safe_serialization=safe_serialization
            ):
                return place
            reason = "memory or storage cannot take this step now"
        elif self.boundaries.has_stepped and self._accelerator.sync_gradients:
            self._capture(force=True)
        message = "save_state(%r): Accelerate writes it while training waits: %s"
        self._tell_once(message, place, reason, severity=logging.INFO)
        self._gate()
        self.directories.save_by_stock(place, stock)
        return place

    def _why_saved_by_stock(self, *, has_more: bool) -> str | None:
        """Return why the next directory cannot name a snapshot; ``None`` if it can. Collective, as ``opened``."""
        if self._is_refused:
            return "another program uses the place for snapshots"
        if has_more:
            return "it has arguments that Accelerate hands to the model's own way of saving"
        if self._accelerator.distributed_type.name == "FSDP":
            return "its layout for FSDP2 is written by all ranks"
        if not self._accelerator.sync_gradients:
            return "it is within an accumulation of gradients"
        session = self.opened()
        if not session.engine._config.levels:
            return "there is no level that stores snapshots"
        if session.is_spoilt:
            return "training goes back"
        if not self.boundaries.has_stepped and session.engine._recorder.last_step == session.step:
            return "this step was captured before, and more than that may have changed since"
        return None

    def load_directory(self, directory: str | None, stock: Callable[[str | None], Any]) -> Snapshot | None:
        """``load_state(directory)``: the snapshot that the directory names, else by stock, which returns ``None``."""
        chosen = directory
        for chosen, named in self.directories.to_load(directory):
            if named is None:
                break
            snapshot = self._load_named(chosen, named)
            if snapshot is not None:
                return snapshot
            if has_checkpoint(chosen):
                break
        self._gate()
        stock(chosen)
        self.boundaries.passed()
        if chosen is not None:
            self.directories.loaded(chosen)
            self._begins_from = report.from_checkpoint(chosen)
            if self._session is not None:
                self._session.engine._run.tell_start(self._begins_from)
        return None

    def _load_named(self, directory: str, named: Named) -> Snapshot | None:
        """Restore the snapshot that a directory names; ``None``, if there is none any more. Collective."""
        if self._is_refused:
            return None
        self._choose_place(os.path.dirname(os.path.abspath(directory)))
        session = self.opened()
        if named.place not in [level.url for level in session.engine._config.levels]:
            return None
        self.directories.settle(session.engine, session.engine._config.drain_timeout_s)
        self.directories.run_load_hooks(directory)
        try:
            return self._restore(session, named.which)
        except SnapshotNotFound as error:
            logger.warning("load_state(%r): the checkpoint of Accelerate is loaded instead: %s", directory, error)
            return None

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Within it processes do different numbers of steps, and nothing is captured. Collective at its end."""
        self._tell_once(
            "join_uneven_inputs: processes do different numbers of steps within it, so nothing is captured there; call "
            "save_state() between two such blocks"
        )
        self._is_apart = True
        if not self._state.is_uneven:
            self._state.is_uneven = True
            self.opened().engine._replan()
        try:
            yield
        finally:
            self._is_apart = False
        # All have now done as many steps as the one that did most of them.
        session = self.opened()
        steps = torch.tensor([session.step + self.boundaries.has_stepped], device=self._accelerator.device)
        self.boundaries.passed()
        session.step = int(self._accelerator.gather(steps).max())

    def load(self, which: int | str) -> Snapshot | None:
        """``load_state("latest")``: restore everything that was prepared and registered. Blocks. Collective.

        Raises: as ``SnapshotEngine.restore``.
        """
        session = self.opened()
        if which == "latest" and self._follows_fresh_training:
            session.engine._run.tell_start(
                "starting fresh: free_memory() ended the training that this process began before, and another one "
                "begins; load_state(STEP) resumes a snapshot of the earlier one"
            )
            session.engine._preemption.listen()
            return None
        self.directories.settle(session.engine, session.engine._config.drain_timeout_s)
        return self._restore(session, which)

    def _restore(self, session: Session, which: int | str) -> Snapshot | None:
        snapshot = session.engine.restore(which)
        if snapshot is not None:
            self._began_fresh = False
            session.step = snapshot.step
            self.boundaries.passed()
        session.engine._preemption.listen()
        return snapshot

    def wait_for_checkpoints(self, timeout_s: float) -> bool:
        """See ``LazyAccelerator.wait_for_checkpoints``. Collective."""
        return self._session is None or self.directories.wait(self._session.engine, timeout_s)

    # ---------------------------------------------------------------- its end

    def close(self) -> None:
        """End well: see ``SnapshotEngine.close``. Blocks, with a progress bar after a second. Idempotent."""
        session = self._session
        if session is None:
            return
        if self._is_refused:
            self._end_at(session, 0.0)
            return
        if self._beside is not None and not os.path.isdir(self._beside):
            logger.info("nothing is stored: the program removed %s", self._default_url)
            session.engine._shutdown.discard()
            self._end_at(session, 0.0)
            return
        if self._end.alive and not session.is_spoilt:
            self._count(session)
            if session.step:
                session.capture(is_last=True)
        session.close(rich_bar if self._is_main_process else None)
        self._end_at(session, session.engine._config.drain_timeout_s)

    def _note_beside(self) -> None:
        """Make the directory that holds the default place of snapshots, and remember it."""
        assert self._config is not None
        url = self._default_url
        if url is not None and "://" not in url and [url] == [level.url for level in self._config.levels]:
            with contextlib.suppress(OSError):  # the level says so when it writes
                os.makedirs(os.path.dirname(url), exist_ok=True)
                self._beside = os.path.dirname(url)

    def forget(self) -> None:
        """Let go of what was prepared: what is prepared from now on is another training."""
        self.boundaries.close()
        if self._has_trained:
            self._forget_objects()
        self._follows_fresh_training = self._began_fresh
        self._left_at, self._has_asked = 0, False

    def _forget_objects(self) -> None:
        self._has_trained = False
        left_out = self._state.forget()
        names = ", ".join(type(item).__qualname__ for item in left_out)
        if names and self._is_main_process:
            logger.warning(
                "free_memory(): another training begins, and what was registered for the one before (%s) is no part of "
                "its snapshots; register again what it uses",
                names,
            )

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave as after a crash: memory stays for a restart. ``error``: what ended the training."""
        if self._session is not None:
            self._session.engine.abandon(error)
            self._end_at(self._session, 0.0)

    def _end_at(self, session: Session, timeout_s: float) -> None:
        self.directories.close(session.engine, timeout_s)
        self._left_at = session.step
        self._leave()

    def _finish(self) -> None:
        """The training is over without ``end_training``: well, or by an error that nobody caught."""
        error = getattr(sys, "last_value", None)
        # A notebook keeps the last error of any cell: one from before the last boundary did not end this training.
        if error is not None and id(error) != self._error_before:
            self.abandon(error)
            return
        try:
            self.close()
        except RuntimeError as error:  # Python 3.12 and newer start no threads any more at exit
            logger.info("not ended well at exit, the keeper stores the last snapshot: %s", error)
            self.abandon()

    def _tell_once(self, message: str, *values: object, severity: int = logging.WARNING) -> None:
        if message not in self._has_told:
            self._has_told.add(message)
            logger.log(severity, message, *values)


def _last_error_id() -> int | None:
    error = getattr(sys, "last_value", None)
    return None if error is None else id(error)


def _why_stock(accelerator: Any) -> str | None:
    """Why this accelerator saves and loads as Accelerate does, without snapshots; ``None`` if it does not.

    Raises: ConfigError, for DeepSpeed and FSDP 1.
    """
    kind = accelerator.distributed_type.name
    if kind == "DEEPSPEED":
        raise ConfigError(
            "LazyAccelerator: DeepSpeed cannot be captured: each process holds a part of weights and optimizer state "
            "that no state_dict() tells of. Use FSDP2 (fsdp_version: 2) or DDP, or stock accelerate.Accelerator"
        )
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise ConfigError(
            "LazyAccelerator: FSDP 1 cannot be captured: its parameters are pieces of one flat tensor. Set "
            "fsdp_version: 2, or use stock accelerate.Accelerator"
        )
    return _STOCK.get(kind)
