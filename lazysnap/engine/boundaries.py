"""The calls at every optimizer step, ``boundary`` and ``gate``, and the preparation of memory."""

import logging
import threading
import time

import torch

from lazysnap import faults
from lazysnap.capture.devices import is_capturing_graph
from lazysnap.capture.gate import OptimizerGates
from lazysnap.capture.plan import check_kinds, versions_of
from lazysnap.core.messages import KeeperState
from lazysnap.engine.messages import MessageKind
from lazysnap.engine.preemption import Preemption
from lazysnap.engine.run import Run
from lazysnap.errors import ConfigError, JobBusy, KeeperError, LazySnapError, StateError
from lazysnap.memory.slot_choice import SlotPhase
from lazysnap.ranks.checks import together
from lazysnap.state.modules import is_uninitialised
from lazysnap.state.sharding import local_of
from lazysnap.state.walk import collector_paused
from lazysnap.warm.steps import Steps

logger = logging.getLogger(__name__)

_SEAL_S = 1.0
"""Seconds that preemption waits for a boundary in progress."""


class Boundaries:
    """Used on the training thread; hooks on optimizers call ``gate``.

    A boundary and a gate hold ``lock``. Sealing, on another thread, waits for it at most ``_SEAL_S``.
    """

    def __init__(self, run: Run, preemption: Preemption) -> None:
        self._config = run.restart.config
        self._source = run.restart.source
        self._world = run.restart.world
        self._run = run
        self._preemption = preemption
        self._recorder = run.recorder
        self._memory = run.recorder.memory
        self._captures = run.recorder.captures
        self._messages = run.recorder.messages
        self._statistics = run.recorder.messages.statistics
        self._supervisor = Steps()
        """Reports the newest step to ``lazysnap run``."""
        self.lock = threading.RLock()
        self.gates = OptimizerGates(self.gate, self._captures.is_disturbed, self._stepped_beside)
        self._optimizer_steps = 0
        """Number of optimizer steps up to the last boundary."""
        self._first_boundary_done = False
        self._awaits_gradients = False
        """True if a due boundary was skipped because of waiting gradients. All ranks agree, because all accumulate
        alike.
        """
        self._is_step_in_graph = False
        """True once an optimizer step was captured into a graph. Its replays run no hooks."""
        self._weights: list[torch.Tensor] = []
        """The optimizers' weights at the last capture, or at the last failed one. Empty if every boundary is due."""
        self._pointers: list[int] = []
        """The addresses of ``_weights`` at that time."""
        self._versions: list[int] | None = None
        """The result of ``_versions_now`` at the last boundary, if that captured nothing."""

    # ---------------------------------------------------------------- memory

    def prepare(self) -> None:
        """See ``SnapshotEngine._prepare``, without ``check_memory``. Does not block."""
        check_kinds(self._source.expected().items())
        self._run.begin_once()
        self._memory.start()
        self.gates.install(self._source.optimizers())
        self._memory.prepare()
        self._preemption.listen()

    def check_memory(self) -> None:
        """Check that memory is available, if ``SnapshotConfig.require_memory`` is set. Then collective.

        Blocks: until all slots exist. Raises: KeeperError, JobBusy or MemoryBoundExceeded, if there is no memory. An
        error on one rank is raised on all.
        """
        if self._config.require_memory:
            together(self._world, "making sure of memory", self._await_memory)

    def _await_memory(self) -> None:
        self.prepare()
        if self._memory.await_all(self._config.io_timeout_s + self._config.collective_timeout_s):
            return
        error = self._memory.error() or KeeperError("the keeper did not make its slots ready in time")
        raise type(error)(f"SnapshotConfig(require_memory=True): {error}")

    def wait_ready(self, timeout_s: float) -> bool:
        """See ``SnapshotEngine._wait_ready``. Blocks. Call ``prepare`` first."""
        is_ready = self._memory.await_all(timeout_s)
        if is_ready:
            self._memory.is_awaited = True
        return is_ready

    # ---------------------------------------------------------------- boundary

    def boundary(self, step: int, *, force: bool) -> bool:
        """See ``SnapshotEngine.boundary``. Blocks."""
        with self.lock:
            self._preemption.listen()
            began = self._pass(step, is_forced=force)
        for optimizer in self.gates.take_replacements():
            self._messages.tell(MessageKind.OTHER_OPTIMIZER, kind=type(optimizer).__qualname__)
        self._optimizer_steps = self.gates.steps
        self._supervisor.reached(step)
        self._preemption.boundary_passed()
        return began

    def _pass(self, step: int, *, is_forced: bool) -> bool:
        """Handle the boundary after ``step``, under ``lock``. Returns: True if a capture of it began."""
        is_last = self._preemption.ends_training
        self._check_boundary_in_graph()
        self.gate()
        started = time.perf_counter()
        self._memory.follow_keeper()
        self._check_job()
        self._run.begin_again_if_earlier(step)
        self._recorder.pass_boundary(step)
        if not self._recorder.is_due(step, force=is_forced or is_last or self._awaits_gradients):
            self._note_uncaptured()
            return False
        self._run.begin_once()
        if self._has_waiting_gradients(step, is_forced=is_forced and not is_last):
            self._note_weights()
            self._note_uncaptured()
            return False
        began = self._capture_due(step, started)
        if is_forced or is_last:
            self._recorder.forbid_repeat()
        return began

    def _check_boundary_in_graph(self) -> None:
        if is_capturing_graph():
            raise ConfigError(
                "engine.boundary() is being captured into a graph, where it would run once and never again: call "
                "it after replay(), and engine.gate() before it"
            )

    def _check_job(self) -> None:
        refusal = self._memory.client.refusal()
        if refusal is not None:
            raise refusal

    def _has_waiting_gradients(self, step: int, *, is_forced: bool) -> bool:
        """True if gradients wait for the next step of their optimizer, so that ``step`` must be skipped. Hot.

        ``is_forced``: capture the step anyway.
        """
        self._awaits_gradients = False
        if self._is_step_in_graph:
            return False  # replays of a graph run no hooks
        gradients = self.gates.gradients
        optimizers = self._source.optimizers()
        self.gates.install(optimizers)  # without its hooks all gradients of a new optimizer seem to wait
        awaited = gradients.awaited(optimizers)
        if not awaited:
            return False
        names_of_awaited = []
        for name, optimizer in self._source.named_optimizers().items():
            if optimizer in awaited:
                names_of_awaited.append(name)
        names = ", ".join(names_of_awaited)
        if is_forced or gradients.abandon_late(awaited):
            self._messages.tell(MessageKind.GRADIENTS_LOST, step=step, names=names)
            return False
        if any(gradients.is_kept_long(optimizer) for optimizer in awaited):
            self._messages.tell(MessageKind.GRADIENTS_WAIT, step=step, names=names)
        self._statistics.skipped["gradients waited for an optimizer step"] += 1
        self._awaits_gradients = True
        return True

    def _capture_due(self, step: int, started: float) -> bool:
        began = self.capture(step, started)
        if not self._first_boundary_done:
            self._first_boundary_done = True
            self._report_sizes()
            self.check_memory()
            if not began and self._config.require_memory:
                began = self.capture(step, started)
        if not began:
            self._versions = None
            if self._recorder.may_retry:  # otherwise ``capture_last`` does not retry
                self._note_weights()
                self._note_uncaptured()
        return began

    def _report_sizes(self) -> None:
        plan = self._recorder.state.plan
        if plan is None:
            return
        try:
            self._memory.report_sizes(plan.layout.size_bytes)
        except (OSError, ValueError) as error:  # only the report needs it
            logger.info("the memory of the training is unknown: %s", error)

    def capture(self, step: int, started: float) -> bool:
        """Capture ``step``, under ``lock``. ``started``: the start time of this boundary. Returns: True if a capture
        began.

        Raises: StateError, at the first capture; JobBusy; errors of the program's own code.
        """
        waited_before_s = self._statistics.memory_wait_s
        began = False
        try:
            self.gates.install(self._source.optimizers())
            if self._config.every_n_steps != 1:
                self._note_weights()
            with collector_paused():
                began = self._recorder.begin(step)
        except StateError as error:
            self._recorder.skip("the state could not be captured")
            if not self._recorder.encoded_once:
                raise
            self._messages.tell(MessageKind.NOT_CAPTURED, step=step, kind=StateError, text=error)
        except JobBusy:
            raise
        except Exception as error:
            if not _is_of_capture(error):
                raise
            text = f"{type(error).__name__}: {error}"
            self._messages.tell(MessageKind.NOT_CAPTURED, step=step, kind=type(error), text=text)
            self._recorder.skip("the capture failed")
        seconds = time.perf_counter() - started
        self._statistics.waited_s += seconds
        if began:
            self._statistics.boundary.add(seconds - (self._statistics.memory_wait_s - waited_before_s))
        return began

    @property
    def has_stepped(self) -> bool:
        """True if an optimizer stepped since the last boundary."""
        return self.gates.steps != self._optimizer_steps

    # ---------------------------------------------------------------- the last boundary

    def last_boundary(self, step: int) -> bool:
        """See ``SnapshotEngine._last_boundary``. Blocks."""
        deadline_s = time.monotonic() + self._config.io_timeout_s
        # A short training may end before all slots exist.
        while self._recorder.last_step != step and not self.boundary(step, force=True):
            left_s = deadline_s - time.monotonic()
            if left_s < 0 or not self._recorder.may_retry:
                break  # ``close`` reports it
            self.prepare()
            # While the keeper is silent, no boundary waits for a slot.
            if not self._memory.client.wait(self._is_keeper_answering, left_s):
                break
            left_s = deadline_s - time.monotonic()
            if not self.wait_ready(max(0.0, left_s)):
                break
        self.finish_copies()
        self._recorder.forbid_repeat()
        return self._recorder.last_step == step and not self._captures.has_lost_newest

    def _is_keeper_answering(self, _: KeeperState) -> bool:
        return not self._memory.client.is_silent

    def capture_last(self) -> None:
        """Capture the state of the last boundary, if it was not due or found no slot, unless weights changed since.

        Collective. Blocks: as ``last_boundary``.
        """
        recorder = self._recorder
        step = recorder.seen_step
        is_captured = step == recorder.last_step
        is_open = step is not None and not is_captured and (step != recorder.last_due or recorder.may_retry)
        can_be_captured = is_captured or (is_open and self._is_unchanged())
        votes = self._world.exchange("the last step", [step, can_be_captured])
        if step is not None and all(vote == [step, True] for vote in votes):
            self._source.end()
            self.last_boundary(step)
        elif is_open:
            logger.info("step %d, which was not captured, is not captured at the end: weights changed since", step)

    def _note_uncaptured(self) -> None:
        """Save what ``capture_last`` needs of a boundary that captured nothing. Hot."""
        self._versions = self._versions_now()
        self._source.note_boundary()

    def _note_weights(self) -> None:
        self._weights = []
        for optimizer in self._source.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if not is_uninitialised(parameter):
                        self._weights.append(local_of(parameter))
        self._pointers = [weight.data_ptr() for weight in self._weights]

    def _versions_now(self) -> list[int] | None:
        """Return optimizer steps and versions of weights; ``None`` if they may change undetected. Hot."""
        if self._is_step_in_graph:
            return None  # replays change them without a trace
        return [self.gates.steps, *versions_of(self._weights)]

    def _is_unchanged(self) -> bool:
        """True if weights did not change since the last boundary, which captured nothing."""
        if self._versions is None or self._versions != self._versions_now():
            return False
        return self._pointers == [weight.data_ptr() for weight in self._weights]

    # ---------------------------------------------------------------- gate

    def gate(self) -> None:
        """See ``SnapshotEngine.gate``. Blocks. Hot."""
        with self.lock:
            if is_capturing_graph():
                self._check_step_in_graph()
            if not self._captures.is_copying:
                return
            started = time.perf_counter()
            has_finished = self._captures.finish(self._config.io_timeout_s) is not None
            if has_finished:
                faults.point("engine.gated")
            self._recorder.count_ended()
            seconds = time.perf_counter() - started
            self._statistics.waited_s += seconds
            if has_finished:
                self._statistics.gate.add(seconds)

    def _check_step_in_graph(self) -> None:
        if self._captures.is_copying:
            raise ConfigError(
                "an optimizer step is being captured into a graph while lazysnap copies the weights: the graph cannot "
                'wait for that. Call engine.wait(until="captured", timeout_s=60) right before the capture, and '
                "engine.gate() before every replay()"
            )
        self._is_step_in_graph = True
        self._messages.tell(MessageKind.IN_GRAPH)

    def _stepped_beside(self) -> None:
        if self._captures.discard("an optimizer stepped while it was copied, without engine.gate() before it"):
            self.gate()

    def finish_copies(self) -> None:
        """Call ``gate``, then wait for the copies from devices. Blocks: at most twice ``io_timeout_s``."""
        self.gate()
        self.gate()  # after the first gate only a device may still be copying

    def wait_copied(self, timeout_s: float) -> bool:
        """Pass the gate once the running copy has read its sources. Blocks: at most ``timeout_s`` for it.

        Returns: False after the deadline; then the copy continues, and training has not passed the gate.
        """
        if not self._captures.wait_read(timeout_s):
            return False
        self.finish_copies()
        return True

    def wait_captured(self, step: int, timeout_s: float) -> bool:
        """Block until the capture of ``step``, or a later one, is whole in the memory of a live keeper.

        Returns: False after the deadline, or if the capture was dropped.
        """
        self.finish_copies()
        deadline_s = time.monotonic() + timeout_s
        phase = self._memory.phase_of(step)
        # A copy that hangs may still end, and a lost keeper is being replaced.
        while phase is SlotPhase.CAPTURING or (phase is SlotPhase.WHOLE and not self._memory.client.is_connected):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.001)
            phase = self._memory.phase_of(step)
        newest = self._memory.newest_held_step()
        return phase is SlotPhase.WHOLE or (newest is not None and newest >= step)

    def seal(self, timeout_s: float) -> None:
        """Stop capturing. Blocks: until the copies are done, at most ``timeout_s``. Thread-safe.

        Waits at most ``_SEAL_S`` for a boundary in progress. Drops a copy that takes longer, to leave time for storing.
        """
        self._recorder.is_sealed = True
        if self.lock.acquire(timeout=min(_SEAL_S, timeout_s)):
            try:
                self._captures.finish(timeout_s / 2)
                self._captures.finish(timeout_s / 4)  # after the first call only a device may still be copying
                self._recorder.count_ended()
            finally:
                self.lock.release()

    def close(self) -> None:
        """Remove the hooks, stop the copy thread, and release state and slots. Blocks: at most some seconds."""
        self.gates.remove()
        self._recorder.check.cancel()
        self._captures.close(self._config.io_timeout_s)
        self._recorder.state.forget_plan()
        self._source.release()
        self._weights = []


_LIBRARIES = ("lazysnap", "torch", "numpy", "msgspec")
"""Packages whose errors in a capture drop that capture, but do not end training."""


def _is_of_capture(error: Exception) -> bool:
    """True if lazysnap, or a package that it captures with, raised an error.

    Other errors belong to the program: a signal handler may raise in any call, and means the training loop.
    """
    if isinstance(error, LazySnapError):
        return True
    trace = error.__traceback__
    assert trace is not None  # it was caught
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _LIBRARIES
