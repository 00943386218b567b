"""The calls round every optimizer step, ``boundary`` and ``gate``, and what makes memory ready for the first."""

import logging
import threading
import time

import torch

from lazysnap import faults
from lazysnap.capture.devices import is_capturing_graph
from lazysnap.capture.gate import OptimizerGates
from lazysnap.capture.plan import check_kinds
from lazysnap.engine import report
from lazysnap.engine.history import CaptureState
from lazysnap.engine.messages import Event
from lazysnap.engine.parts import Parts
from lazysnap.engine.preemption import Preemption
from lazysnap.engine.run import Run
from lazysnap.errors import ConfigError, JobBusy, KeeperError, LazySnapError, StateError
from lazysnap.ranks.checks import together
from lazysnap.state.gc_pause import collector_paused
from lazysnap.state.modules import is_uninitialised
from lazysnap.state.sharding import local_of
from lazysnap.warm.steps import Steps

logger = logging.getLogger(__name__)

_SEAL_S = 1.0
"""Seconds that preemption waits for a boundary that is under way."""


class Boundaries:
    """Used on the training thread; hooks on optimizers call ``gate``.

    It is large because boundary, gate, the last boundary and sealing hold one lock and count the same steps.
    """

    def __init__(self, parts: Parts, run: Run, preemption: Preemption) -> None:
        self._parts = parts
        self._run = run
        self._preemption = preemption
        self._reached = Steps()
        self._recorder = parts.recorder
        self._captures = parts.recorder.captures
        self.lock = threading.RLock()
        self.gates = OptimizerGates(self.gate, self._captures.is_disturbed, self._stepped_beside)
        self._steps = 0
        """Steps of optimizers up to the last boundary."""
        self._is_past_first = False
        """True if the first boundary is over."""
        self._weights: list[torch.Tensor] = []
        """The optimizers' weights at the last capture, if not every boundary is due, or at the last one that failed."""
        self._pointers: list[int] = []
        """Their addresses then."""
        self._awaits_gradients = False
        """True if a boundary that was due is not captured yet, since gradients waited there."""
        self._facts: list[int] | None = None
        """See ``_weights_now``, at the last boundary, if that captured nothing."""

    # ---------------------------------------------------------------- memory

    def prepare(self) -> None:
        """See ``SnapshotEngine._prepare``, without ``check_memory``. Does not block."""
        check_kinds(self._parts.source.expected().items())
        self._run.tell_start()
        self._run.begin_once()
        self._recorder.slots.register()  # before slots that an earlier start left are made ready
        self._parts.client.start()
        self.gates.install(self._parts.source.optimizers())
        self._recorder.prepare()
        self.listen()

    def listen(self, exception: type[BaseException] = SystemExit, *, overrules_handler: bool = False) -> None:
        """See ``Preemption.listen``. ``prepare`` and the first ``boundary`` do that, too."""
        self._preemption.listen(self._parts.client, exception, overrules_handler=overrules_handler)

    @property
    def listens(self) -> bool:
        """True after ``listen``."""
        return self._preemption.listens

    def check_memory(self) -> None:
        """Make sure of memory, where ``SnapshotConfig.require_memory`` is set. Collective then.

        Blocks: until it is there. Raises: KeeperError, JobBusy or MemoryBoundExceeded, if there is none; with
        several ranks an error on one of them is raised on all.
        """
        if self._parts.config.require_memory:
            together(self._parts.world, "making sure of memory", self._await_memory)

    def _await_memory(self) -> None:
        self.prepare()
        config = self._parts.config
        if self._await_slots(config.io_timeout_s + config.collective_timeout_s):
            return
        error = self._memory_error() or KeeperError("the keeper did not make its slots ready in time")
        raise type(error)(f"SnapshotConfig(require_memory=True): {error}")

    def _memory_error(self) -> LazySnapError | None:
        return self._parts.client.refusal() or self._recorder.memory_error()

    def _await_slots(self, timeout_s: float) -> bool:
        """Block until all slots are there; ``False`` after the deadline, or once there is no memory for them."""
        deadline_s = time.monotonic() + timeout_s
        while not self._recorder.is_ready():
            self._recorder.drain_events()
            self._recorder.slots.return_surplus()
            if self._memory_error() is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(0.005)
        return True

    def wait_ready(self, timeout_s: float) -> bool:
        """See ``SnapshotEngine._wait_ready``. Blocks; ``prepare`` was called."""
        is_ready = self._await_slots(timeout_s)
        self._recorder.waits_for_memory = self._recorder.waits_for_memory or is_ready
        return is_ready

    # ---------------------------------------------------------------- boundary

    def boundary(self, step: int, *, force: bool) -> bool:
        """See ``SnapshotEngine.boundary``. Blocks."""
        began = self._pass(step, force=force or self._preemption.ends_training)
        for optimizer in self.gates.take_replacements():
            self._parts.messages.tell(Event.OTHER_OPTIMIZER, kind=type(optimizer).__qualname__)
        self._steps = self.gates.steps
        self._reached.reached(step)
        self._preemption.boundary_passed()
        return began

    def _pass(self, step: int, *, force: bool) -> bool:
        with self.lock:
            self.listen()
            if is_capturing_graph():
                raise ConfigError(
                    "engine.boundary() is being captured into a graph, where it would run once and never again: call "
                    "it behind replay(), and engine.gate() before it"
                )
            self.gate()
            started = time.perf_counter()
            self._recorder.drain_events()
            refusal = self._parts.client.refusal()
            if refusal is not None:
                raise refusal
            last = self._recorder.seen_step or 0
            if step < last:  # a loop that begins again
                self._parts.messages.tell(Event.BEGINS_AGAIN, step=step, last=last)
                self._run.begin_again(step)
            if not self._recorder.is_due(step, force=force or self._awaits_gradients):
                self._note()
                return False
            self._run.tell_start()
            self._run.begin_once()
            if self._has_waiting_gradients(step, is_forced=force and not self._preemption.ends_training):
                self._look_at_weights()
                self._note()
                return False
            began = self.capture(step, started) if self._is_past_first else self._capture_first(step, started)
            if not began:
                self._facts = None
                if self._recorder.may_retry:  # else ``capture_last`` does not try again
                    self._look_at_weights()
                    self._note()
            return began

    def _has_waiting_gradients(self, step: int, *, is_forced: bool) -> bool:
        """True if gradients wait for the next step of their optimizer, so that ``step`` is not captured. Hot.

        ``is_forced``: it is captured all the same.
        """
        self._awaits_gradients = False
        if self._parts.messages.is_known("graph"):
            return False  # a graph that is replayed steps without a hook
        gradients = self.gates.gradients
        optimizers = self._parts.source.optimizers()
        if not self._is_past_first:
            self.gates.install(optimizers)  # without its hooks no step is seen, and all gradients seem to wait
        awaited = gradients.awaited(optimizers)
        if not awaited:
            return False
        named = self._parts.source.named_optimizers().items()
        names = ", ".join(name for name, optimizer in named if optimizer in awaited)
        if is_forced or gradients.abandon_late(awaited):
            self._parts.messages.tell(Event.GRADIENTS_LOST, step=step, names=names)
            return False
        if any(gradients.is_kept_long(optimizer) for optimizer in awaited):
            self._parts.messages.tell(Event.GRADIENTS_WAIT, step=step, names=names)
        self._parts.statistics.skipped["gradients wait for an optimizer step"] += 1
        self._awaits_gradients = True
        return True

    def _capture_first(self, step: int, started: float) -> bool:
        began = self.capture(step, started)
        self._is_past_first = True
        try:
            self._tell_sizes()
        except (OSError, ValueError) as error:  # the machine does not say, and training needs no answer
            logger.info("what the training takes is not known: %s", error)
        self.check_memory()
        return began or (self._parts.config.require_memory and self.capture(step, started))

    def _tell_sizes(self) -> None:
        sizes, parts = self._recorder.sizes(), self._parts
        if sizes is None:
            return  # nothing could be planned
        is_protected = self._recorder.protection.cause is None
        line = report.opening(parts.config, sizes, parts.world.size, is_protected=is_protected)
        parts.messages.tell(Event.TAKES, line=line)
        for lack in report.shortages(parts.config, sizes.state_bytes, len(parts.world.node_ranks)):
            parts.messages.tell(Event.NO_ROOM, **lack)

    def capture(self, step: int, started: float) -> bool:
        """Capture ``step``; ``True`` if that began. ``started``: when this boundary began. Under ``lock``.

        Raises: StateError, at the first capture; JobBusy; what code of the program raises.
        """
        recorder, statistics, tell = self._recorder, self._parts.statistics, self._parts.messages.tell
        waited_before_s = statistics.memory_wait_s
        try:
            optimizers = self._parts.source.optimizers()
            self.gates.install(optimizers)
            if self._parts.config.every_n_steps != 1:
                self._look_at_weights()
            with collector_paused():
                began = recorder.begin(step)
        except StateError as error:
            began = recorder.skip("unsupported state")
            if not recorder.encoded_once:
                raise
            tell(Event.UNSUPPORTED, step=step, text=error)
        except JobBusy:
            raise
        except Exception as error:
            if not _is_of_capture(error):
                raise
            tell(Event.NOT_CAPTURED, step=step, text=f"{type(error).__name__}: {error}")
            began = recorder.skip("error")
        seconds = time.perf_counter() - started
        statistics.waited_s += seconds
        if began:
            statistics.boundary.add(seconds - (statistics.memory_wait_s - waited_before_s))
        return began

    @property
    def has_stepped(self) -> bool:
        """True if an optimizer stepped since the last boundary."""
        return self.gates.steps != self._steps

    # ---------------------------------------------------------------- the last boundary

    def last_boundary(self, step: int) -> bool:
        """See ``SnapshotEngine._last_boundary``. Blocks."""
        deadline = time.monotonic() + self._parts.config.io_timeout_s
        # A short training may end before all memory is there.
        while self._recorder.last_step != step and not self.boundary(step, force=True):
            left_s = deadline - time.monotonic()
            if left_s < 0 or not self._recorder.may_retry:
                break  # ``close`` says so
            self.prepare()
            if not self.wait_ready(left_s):
                break
            time.sleep(0.005)
        self.finish_copies()
        return self._recorder.last_step == step

    def capture_last(self) -> None:
        """Capture the state of the last boundary, if that was not due, or found no slot. Not where weights changed
        since. Collective. Blocks: as ``last_boundary``.
        """
        recorder, world = self._recorder, self._parts.world
        step = recorder.seen_step
        is_open = step is not None and step != recorder.last_step and (step != recorder.last_due or recorder.may_retry)
        is_same = is_open and self._facts is not None and self._facts == self._weights_now()
        is_same = is_same and self._pointers == [weight.data_ptr() for weight in self._weights]
        told = world.exchange("the last step", [step, is_same or step == recorder.last_step])
        if step is not None and all(other == [step, True] for other in told):
            self._parts.source.end()
            self.last_boundary(step)
        elif is_open:
            logger.info("step %d, which was not captured, is not captured at the end: weights changed since", step)

    def _note(self) -> None:
        """Note what ``capture_last`` needs of a boundary that captured nothing. Hot."""
        self._facts = self._weights_now()
        self._parts.source.note_boundary()

    def _look_at_weights(self) -> None:
        optimizers = self._parts.source.optimizers()
        held = (one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"])
        self._weights = [local_of(one) for one in held if not is_uninitialised(one)]
        self._pointers = [weight.data_ptr() for weight in self._weights]

    def _weights_now(self) -> list[int] | None:
        """Steps of optimizers and versions of weights; ``None`` if these may change unseen. Hot."""
        if self._parts.messages.is_known("graph"):
            return None  # a graph that is replayed changes them without any sign
        return [self.gates.steps, *(weight._version for weight in self._weights)]

    # ---------------------------------------------------------------- gate

    def gate(self) -> None:
        """See ``SnapshotEngine.gate``. Blocks. Hot."""
        with self.lock:
            if is_capturing_graph():
                self._check_graph()
            if not self._captures.is_copying:
                return
            started = time.perf_counter()
            has_finished = self._captures.finish(self._parts.config.io_timeout_s) is not None
            if has_finished:
                faults.point("engine.gated")
            self._recorder.count_ended()
            seconds = time.perf_counter() - started
            self._parts.statistics.waited_s += seconds
            if has_finished:
                self._parts.statistics.gate.add(seconds)

    def _check_graph(self) -> None:
        if self._captures.is_copying:
            raise ConfigError(
                "an optimizer step is being captured into a graph while lazysnap copies the weights: the graph cannot "
                'wait for that. Call engine.wait(until="captured", timeout_s=60) right before the capture, and '
                "engine.gate() before every replay()"
            )
        self._parts.messages.tell(Event.IN_GRAPH)

    def _stepped_beside(self) -> None:
        if self._captures.discard("an optimizer stepped without passing the gate"):
            self._parts.messages.tell(Event.STEPPED_BESIDE)
            self.gate()

    def finish_copies(self) -> None:
        """``gate``, then wait for what devices still copy. Blocks: at most twice ``io_timeout_s``."""
        self.gate()
        self.gate()  # behind the gate only a device can still be copying

    def wait_captured(self, step: int, timeout_s: float) -> bool:
        """Block until the capture of ``step`` is whole in the memory of a live keeper; ``False`` after the deadline, or
        if it was dropped.
        """
        self.finish_copies()
        deadline_s = time.monotonic() + timeout_s
        history = self._recorder.history
        state = history.state_of(step)
        # A copy that hangs may still end. A keeper that was lost is being replaced.
        while state in (CaptureState.COPYING, CaptureState.ALONE):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.001)
            state = history.state_of(step)
        return state is CaptureState.HELD

    def seal(self, timeout_s: float) -> None:
        """Capture nothing any more. Blocks: until the copies are done, at most ``timeout_s``.

        A boundary under way is waited for only ``_SEAL_S``. A copy that takes longer is dropped: the rest of the time
        is for storing what memory has. Any thread may call this.
        """
        self._recorder.is_sealed = True
        if self.lock.acquire(timeout=min(_SEAL_S, timeout_s)):
            try:
                self._captures.finish(timeout_s / 2)
                self._captures.finish(timeout_s / 4)  # behind the gate only a device can still be copying
                self._recorder.count_ended()
            finally:
                self.lock.release()

    def close(self) -> None:
        """Take the hooks off, stop the copy thread, let go of state and slots. Blocks: at most some seconds."""
        self.gates.remove()
        self._captures.close(self._parts.config.io_timeout_s)
        self._recorder.close()
        self._parts.source.release()
        self._weights = []


_LIBRARIES = ("lazysnap", "torch", "numpy", "msgspec")
"""Packages whose errors in a capture cost that capture, not the training."""


def _is_of_capture(error: Exception) -> bool:
    """True if lazysnap, or a package that it captures with, raised an error.

    Others are the program's: a signal handler runs in the middle of any call, and its exception is meant for the loop.
    """
    if isinstance(error, LazySnapError):
        return True
    trace = error.__traceback__
    assert trace is not None  # it was caught
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _LIBRARIES
