"""The parts that snapshots add to an accelerator: engine, boundaries, checkpoints, the end."""

import contextlib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lazysnap.config import SnapshotConfig, config_at
from lazysnap.console import say
from lazysnap.engine import report
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.exports.named import Named
from lazysnap.integrations.accelerate.boundaries import BoundaryWatch
from lazysnap.integrations.accelerate.directories import Directories
from lazysnap.integrations.accelerate.state import AcceleratorState, counted_epochs
from lazysnap.integrations.arguments import Arguments, place_beside
from lazysnap.integrations.session import Session, WithEngine
from lazysnap.restore.snapshot import Snapshot
from lazysnap.state.wrappers import unwrapped

logger = logging.getLogger(__name__)

Snapshots = str | os.PathLike[str] | SnapshotConfig | None

_REFUSED = {
    "DEEPSPEED": "DeepSpeed cannot be captured: each process holds a part of weights and optimizer state that no "
    "state_dict() returns. Use FSDP2 (fsdp_version: 2) or DDP, or stock accelerate.Accelerator",
    "MEGATRON_LM": "Megatron-LM cannot be captured: it keeps the training state in objects of its own. Use stock "
    "accelerate.Accelerator",
    "XLA": "XLA cannot be captured: its tensors are evaluated lazily on another device. Use stock "
    "accelerate.Accelerator",
}
"""Unsupported kinds of training, with reason and advice."""


class AcceleratorIntegration(WithEngine):
    """The snapshots of one accelerator. All calls are on the training thread.

    It has a method for each call of the accelerator that concerns snapshots. A script may make these calls in any
    order.

    Raises: ConfigError, for an accelerator that cannot be captured.
    """

    def __init__(self, accelerator: Any, snapshots: Snapshots) -> None:
        self.snapshots = snapshots
        """The argument of the constructor, for copies of this accelerator."""
        # The accelerator holds this object.
        self._accelerator = weakref.proxy(accelerator)
        _check(accelerator)
        self._is_main_process = accelerator.is_main_process
        config = None
        if snapshots is not None:
            config = config_at(snapshots)
        self._arguments = Arguments("LazyAccelerator", config=config)
        self._default_url = ""
        """See ``_choose_place``; empty before."""
        self._directory_beside: str | None = None
        """The program's directory that contains the default place, once it exists."""
        self.boundaries = BoundaryWatch(self._at_boundary, self._gate, self._counted_epochs)
        self._state = AcceleratorState(self._accelerator, self.boundaries)
        self.directories = Directories(self._accelerator, self._state)
        """The directories of ``save_state(directory)``."""
        self._start_report: str | None = None
        """The line about the start, printed when the session begins."""
        self._last_step = 0
        """The step at which the last session ended."""
        self._capture_requested = False
        """True if ``save_state`` was called within an accumulation."""
        self._steps_are_uneven = False
        """True while processes do different numbers of steps."""
        self._reported: set[str] = set()
        """Messages that are logged once."""
        self._has_trained = False
        """True if an engine was made since the last ``free_memory``."""
        self._began_fresh = False
        """True if the current training did not resume a snapshot."""
        self._follows_fresh_training = False
        """True after ``free_memory`` ended a training of this process, which "latest" would resume."""
        self._error_before = _last_error_id()
        """The identity of the error that the interpreter had reported last at the last boundary."""
        # Called when the accelerator is collected, or at the program's exit.
        self._end = weakref.finalize(accelerator, self._finish)

    # ---------------------------------------------------------------- objects

    def opened(self) -> Session:
        """Return the session. Its state includes everything prepared so far.

        Collective: at the first call, which begins the session. Raises: as ``SnapshotEngine``.
        """
        if self._end.alive:
            self._state.refresh()
        if self._session is None:
            return self._begin_session()
        return self._session

    def _choose_place(self) -> None:
        """Choose the default place of snapshots, at the first session: a program may set its directories until then."""
        if self._default_url:
            return
        project = self._accelerator.project_configuration
        directory = project.project_dir or project.logging_dir
        self._default_url = place_beside(directory or ".")
        if self.snapshots is None and not directory and self._is_main_process:
            say(
                f"LazyAccelerator: no project_dir is set, snapshots go to {self._default_url}; give project_dir=... or "
                "snapshots=... to choose another place"
            )

    def _begin_session(self) -> Session:
        self._choose_place()
        self._make_directory_beside()
        session = self._begin(self._state, self._default_url)
        session.step = self._last_step
        self._began_fresh = True
        self._has_trained = True
        self._warn_of_hooks()
        if self._start_report is not None:
            session.engine._run.tell_start(self._start_report)
        return session

    def _make_directory_beside(self) -> None:
        """Make the program's directory that contains the default place, if snapshots are stored only there."""
        url = self._default_url
        levels = self._arguments.config_for(url).levels
        if "://" in url or [level.url for level in levels] != [url]:
            return
        directory = os.path.dirname(url)
        with contextlib.suppress(OSError):  # the level reports the error when it writes
            os.makedirs(directory, exist_ok=True)
            self._directory_beside = directory

    def _warn_of_hooks(self) -> None:
        """Warn about hooks that only ``save_state(directory)`` and ``load_state(directory)`` run."""
        accelerator = self._accelerator
        if not self._end.alive or not self._is_main_process:
            return
        hooks = [*accelerator._save_model_state_pre_hook.values(), *accelerator._load_model_state_pre_hook.values()]
        names = [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks]
        if names:
            self._report_once(
                "snapshots do not run the hooks of register_save_state_pre_hook and register_load_state_pre_hook (%s): "
                'what only these hooks save, such as averaged weights (EMA), starts again after load_state("latest"). '
                "Register it as well, which makes it exact: accelerator.register_for_checkpointing(ema)",
                ", ".join(names),
            )

    @property
    def step(self) -> int:
        """The last step that is finished."""
        if self._session is None:
            return self._last_step
        return self._session.step

    def _counted_epochs(self) -> dict[str, int]:
        if not self._end.alive:
            return {}
        return counted_epochs(self._state.custom_objects())

    def has_settings(self, snapshots: "str | os.PathLike[str] | SnapshotConfig") -> bool:
        """True if these are the settings with which the program made this integration."""
        return self.snapshots is not None and config_at(self.snapshots) == config_at(snapshots)

    def add_model(self, prepared: Any) -> None:
        """Remember the wrapper that a model was prepared to, if Accelerate does not list the wrapper."""
        inner = unwrapped(prepared)
        for model in self._accelerator._models:
            if unwrapped(model) is inner:
                if model is not prepared:
                    self._state.add_wrapper(model, prepared)
                return

    # ---------------------------------------------------------------- boundaries

    def rollback(self, steps: int) -> None:
        """Request a rollback before the next batch. Raises: ConfigError."""
        self.opened().request_rollback(steps)
        self.boundaries.expect_boundary()

    def boundary(self) -> int | None:
        """Capture now, between two steps: ``save_state()``. Return the step; ``None`` if no capture began.

        Within an accumulation of gradients the capture waits for the next optimizer step, with one log line.
        """
        goes_back = self._session is not None and self._session.rollback_requested
        if not self._accelerator.sync_gradients and not goes_back:
            self._capture_requested = True
            self._report_once(
                "save_state() within an accumulation of gradients: captured after the next optimizer step"
            )
            return None
        if not self._capture(force=True):
            return None
        return self.step

    def _at_boundary(self) -> None:
        is_requested = self._capture_requested
        self._capture_requested = False
        self._capture(force=is_requested)

    def _capture(self, *, force: bool) -> bool:
        """Capture this step, or roll back as requested. True if a capture began."""
        session = self.opened()
        self._error_before = _last_error_id()
        self._finish_step(session)
        self._warn_of_hooks()
        self.directories.poll(session.engine)
        if session.rollback_requested:
            session.roll_back()
            return False
        if self._steps_are_uneven:
            return False
        return session.engine.boundary(session.step, force=force)

    def _finish_step(self, session: Session) -> None:
        """Count the optimizer step since the last boundary, if there was one."""
        if self.boundaries.has_stepped:
            self.boundaries.pass_boundary()
            session.finish_step(session.step + 1)

    def save(
        self, directory: str | None, stock: Callable[[str], Any], *, safe_serialization: bool, has_more: bool
    ) -> str:
        """Save into a directory: ``save_state(directory)``. Return the directory. Collective.

        Args:
            directory: ``None``: the next one by automatic naming.
            stock: writes a checkpoint into a directory, as Accelerate does.
            safe_serialization: see ``Accelerator.save_state``.
            has_more: True for further arguments, which only Accelerate handles.
        """
        place = self.directories.begin(directory)
        reason = self._reason_to_save_by_stock(has_more=has_more)
        if reason is None:
            engine = self.opened().engine
            capture = functools.partial(self._capture, force=True)
            if self.directories.save(place, engine, capture, safe_serialization=safe_serialization):
                return place
            reason = "memory or storage cannot take this step now"
        elif self.boundaries.has_stepped and self._accelerator.sync_gradients:
            self._capture(force=True)
        message = "save_state(%r): Accelerate writes it while training waits: %s"
        self._report_once(message, place, reason, severity=logging.INFO)
        self._gate()
        self.directories.save_by_stock(place, stock)
        return place

    def _reason_to_save_by_stock(self, *, has_more: bool) -> str | None:
        """Return the reason why a directory cannot name a snapshot now; ``None`` if it can.

        Collective, as ``opened``.
        """
        if has_more:
            return "it has arguments that Accelerate hands to the model's own way of saving"
        if self._accelerator.distributed_type.name == "FSDP":
            return "its layout for FSDP2 is written by all ranks"
        if not self._accelerator.sync_gradients:
            return "it is within an accumulation of gradients"
        session = self.opened()
        if not session.engine._config.levels:
            return "there is no level that stores snapshots"
        if session.rollback_requested:
            return "training goes back"
        if not self.boundaries.has_stepped and session.engine._recorder.last_step == session.step:
            return "this step was captured before, and more than that may have changed since"
        return None

    def load_directory(self, directory: str | None, stock: Callable[[str | None], Any]) -> Snapshot | None:
        """Load from a directory: ``load_state(directory)``.

        Returns: the snapshot of the directory; ``None`` if Accelerate loaded it.
        """
        chosen = directory
        for chosen, named in self.directories.to_load(directory):
            if named is None:
                break
            snapshot = self._load_named(chosen, named)
            if snapshot is not None:
                return snapshot
            if self.directories.has_checkpoint(chosen):
                break
        self._gate()
        stock(chosen)
        self.boundaries.pass_boundary()
        if chosen is not None:
            self.directories.numbering.continue_behind_loaded(chosen)
            self._start_report = report.from_checkpoint(chosen)
            if self._session is not None:
                self._session.engine._run.tell_start(self._start_report)
        return None

    def _load_named(self, directory: str, named: Named) -> Snapshot | None:
        """Restore the snapshot of a directory; ``None`` if it no longer exists. Collective."""
        session = self.opened()
        if named.place not in [level.url for level in session.engine._config.levels]:
            return None
        self.directories.wait_stored(session.engine)
        self._state.run_load_hooks(directory)
        try:
            return self._restore(session, named.which)
        except SnapshotNotFound as error:
            logger.warning("load_state(%r): the checkpoint of Accelerate is loaded instead: %s", directory, error)
            return None

    @contextlib.contextmanager
    def uneven_steps(self) -> Iterator[None]:
        """Allow processes to do different numbers of steps within it; nothing is captured. Collective at its end."""
        self._report_once(
            "join_uneven_inputs: processes do different numbers of steps within it, so nothing is captured there; call "
            "save_state() between two such blocks"
        )
        self._steps_are_uneven = True
        if not self._state.is_uneven:
            self._state.is_uneven = True
            self.opened().engine._replan()
        try:
            yield
        finally:
            self._steps_are_uneven = False
        # Every process now continues from the largest number of steps.
        session = self.opened()
        steps = torch.tensor([session.step + self.boundaries.has_stepped], device=self._accelerator.device)
        self.boundaries.pass_boundary()
        session.step = int(self._accelerator.gather(steps).max())

    def load(self, which: int | str) -> Snapshot | None:
        """Restore everything that was prepared and registered: ``load_state("latest")``. Blocks. Collective.

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
        self.directories.wait_stored(session.engine)
        return self._restore(session, which)

    def _restore(self, session: Session, which: int | str) -> Snapshot | None:
        snapshot = session.engine.restore(which)
        if snapshot is not None:
            self._began_fresh = False
            session.step = snapshot.step
            self.boundaries.pass_boundary()
        session.engine._preemption.listen()
        return snapshot

    def wait_for_checkpoints(self, timeout_s: float) -> bool:
        """See ``LazyAccelerator.wait_for_checkpoints``. Collective."""
        return self._session is None or self.directories.wait_complete(self._session.engine, timeout_s)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Close the engine: see ``SnapshotEngine.close``. Blocks. Idempotent."""
        session = self._session
        if session is None:
            return
        if self._directory_beside is not None and not os.path.isdir(self._directory_beside):
            logger.info("nothing is stored: the program removed %s", self._default_url)
            session.engine._shutdown.discard()
            self._end_session(session, 0.0)
            return
        if self._end.alive and not session.rollback_requested:
            self._finish_step(session)
            if session.step:
                session.capture(is_last=True)
        session.engine.close()
        self._end_session(session, session.engine._config.drain_timeout_s)

    def forget(self) -> None:
        """Forget the prepared objects: objects that are prepared later belong to another training."""
        self.boundaries.close()
        if self._has_trained:
            self._forget_registered()
        self._follows_fresh_training = self._began_fresh
        self._last_step = 0
        self._capture_requested = False

    def _forget_registered(self) -> None:
        self._has_trained = False
        forgotten = self._state.forget()
        names = ", ".join(type(custom_object).__qualname__ for custom_object in forgotten)
        if names and self._is_main_process:
            logger.warning(
                "free_memory(): another training begins, and what was registered for the one before (%s) is no part of "
                "its snapshots; register again what it uses",
                names,
            )

    def abandon(self, error: BaseException | None = None) -> None:
        """Abandon the engine: memory stays for a restart. ``error``: the reason of the end."""
        if self._session is not None:
            self._session.engine.abandon(error)
            self._end_session(self._session, 0.0)

    def _end_session(self, session: Session, timeout_s: float) -> None:
        self.directories.close(session.engine, timeout_s)
        self._last_step = session.step
        self._leave()

    def _finish(self) -> None:
        """End a training that did not call ``end_training``: normally, or by an uncaught error."""
        error = getattr(sys, "last_value", None)
        # A notebook keeps the last error of any cell: an error before the last boundary did not end this training.
        if error is not None and id(error) != self._error_before:
            self.abandon(error)
            return
        try:
            self.close()
        except RuntimeError as error:  # Python 3.12 and newer start no threads any more at exit
            logger.info("not ended well at exit, the keeper stores the last snapshot: %s", error)
            self.abandon()

    def _report_once(self, message: str, *values: object, severity: int = logging.WARNING) -> None:
        if message not in self._reported:
            self._reported.add(message)
            logger.log(severity, message, *values)


def _last_error_id() -> int | None:
    """Return the identity of the error that the interpreter reported last."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return None
    return id(error)


def _check(accelerator: Any) -> None:
    """Raises: ConfigError, for an accelerator that cannot be captured."""
    kind = accelerator.distributed_type.name
    if kind in _REFUSED:
        raise ConfigError(f"LazyAccelerator: {_REFUSED[kind]}")
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise ConfigError(
            "LazyAccelerator: FSDP 1 cannot be captured: its parameters are pieces of one flat tensor. Set "
            "fsdp_version: 2, or use stock accelerate.Accelerator"
        )
