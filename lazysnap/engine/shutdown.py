"""Ends an engine: closed, abandoned as after a crash, or discarded."""

import contextlib
import functools

from lazysnap.console import said_after
from lazysnap.core.messages import Farewell
from lazysnap.engine import report
from lazysnap.engine.best import BestSnapshots
from lazysnap.engine.boundaries import Boundaries
from lazysnap.engine.messages import MessageKind
from lazysnap.engine.preemption import Preemption
from lazysnap.engine.run import Run
from lazysnap.engine.statistics import NO_SLOTS, Statistics
from lazysnap.engine.stored import store_everywhere
from lazysnap.errors import WaitTimeout

_SILENCE_S = 3.0
"""Seconds that the end of a training waits for storage before it reports that."""


class Shutdown:
    """The end of an engine. OPEN -> CLOSED (``is_closed``), once. Used on the training thread."""

    def __init__(self, run: Run, boundaries: Boundaries, preemption: Preemption, best: BestSnapshots) -> None:
        self._config = run.restart.config
        self._world = run.restart.world
        self._run = run
        self._boundaries = boundaries
        self._preemption = preemption
        self._best = best
        self._recorder = run.recorder
        self._captures = run.recorder.captures
        self._memory = run.recorder.memory
        self._client = run.client
        self._messages = run.recorder.messages
        self._statistics = run.recorder.messages.statistics
        self.is_closed = False
        self.is_replaced = False
        """True if a later engine of this process replaced this one."""
        self._has_ended_well = False
        """The result of ``close``."""

    def statistics(self) -> Statistics:
        """See ``SnapshotEngine.statistics``."""
        if not self.is_closed:  # otherwise the connection to the keeper was closed
            with self._boundaries.lock:
                self._memory.follow_keeper()
                self._recorder.count_ended()
            self._statistics.last_whole_step = self._memory.newest_held_step()
            self._statistics.unprotected = self._memory.unprotected
        return self._statistics.copied()

    # ---------------------------------------------------------------- the good end

    def close(self, *, drain: bool) -> bool:
        """See ``SnapshotEngine.close``. Collective. Blocks."""
        if self.is_closed:
            return self._has_ended_well
        if not self._preemption.begin_close():  # the training is preempted, not over
            self.abandon(None)
            return False
        try:
            return self._close(drain=drain)
        finally:
            self._preemption.leave()  # ends the process here after a signal

    def _close(self, *, drain: bool) -> bool:
        durable = False
        over = False
        captured = True
        has_own = False
        try:
            self._boundaries.finish_copies()
            over = self._world.ends()
            if drain and over:
                self._capture_last()
            self._recorder.forbid_repeat()
            self._recorder.check.wait(self._config.io_timeout_s)
            has_own = self._captures.newest_whole_step() is not None
            self._client.seal()  # memory stays: a step with a name is stored, even if newer ones exist
            durable = not drain or self._drain(is_common=over)
            captured = not drain or self._has_captured_last()
            self._memory.sum_up()
        finally:
            self._leave()
            if over:
                self._world.close()
            # This start may not free the memory of an earlier start before it captured something itself.
            is_last = durable and over and has_own
            if is_last:
                self._client.leave(Farewell.OVER, self._config.io_timeout_s)
            else:
                self._client.leave(Farewell.LEFT, self._config.io_timeout_s)
        ending = report.EndKind.LINGERING
        if is_last:
            ending = report.EndKind.CLOSED
        self._tell_end(ending)
        self._has_ended_well = durable and captured
        return self._has_ended_well

    def _capture_last(self) -> None:
        try:
            self._boundaries.capture_last()
        except WaitTimeout as error:  # a rank that dies here would leave no whole capture
            self._messages.tell(MessageKind.END_UNKNOWN, text=error)

    def _drain(self, *, is_common: bool) -> bool:
        """Wait until the newest capture is durable at every level."""
        resumed = self._run.resumed
        is_there = self._captures.newest_whole_step() is not None or resumed is None or not resumed.only_in_memory
        durable = self._drain_all(is_common=is_common) and is_there
        if durable and self._client.was_connected:
            self._await_names(is_common=is_common)
        self._memory.follow_keeper()
        if not durable and is_there and self._memory.newest_held_step() is None:  # otherwise ``_tell_end`` reports it
            loss = "the last snapshot is not at every level, and memory does not have it"
            self._messages.tell(MessageKind.NOT_DURABLE, what=loss, fate=self._reason())
        return durable

    def _await_names(self, *, is_common: bool) -> None:
        """Block until the first level has all names. Collective, if ``is_common``."""
        self._client.wait_names(self._config.io_timeout_s)
        if is_common and self._best.release_surplus():
            self._client.wait_names(self._config.io_timeout_s)

    def _drain_all(self, *, is_common: bool) -> bool:
        """Wait for all ranks, and fail if one of them failed. Collective, if ``is_common``: all ranks call it."""
        world = self._world
        newest = self._captures.newest_whole_step()

        def drain(last: int | None) -> bool:
            if not self._client.was_connected:
                return True
            with self._telling(last):
                return store_everywhere(self._run, last, self._config.drain_timeout_s)

        if world.is_alone or not is_common:
            return drain(newest)
        try:
            steps = world.exchange("the last snapshot", newest)
            is_same = len(set(steps)) == 1
            # Different steps make no whole snapshot: wait for the newest step that all ranks have.
            last = None
            if None not in steps:
                last = min(steps)
            done = world.exchange_after("making the last snapshot durable", functools.partial(drain, last))
        except WaitTimeout as error:
            self._messages.tell(MessageKind.END_UNKNOWN, text=error)
            return False
        return all(done) and is_same

    def _telling(self, step: int | None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a long wait for storage is reported."""
        config = self._config
        if step is None or self._world.rank != 0 or not config.levels:
            return contextlib.nullcontext()

        def line() -> str:
            where = ", ".join(self._lacking(step)) or "the keeper"
            return f"waiting for {where} to store step {step}, at most {config.drain_timeout_s:g} s (drain_timeout_s)"

        return said_after(_SILENCE_S, line)

    def _lacking(self, step: int) -> list[str]:
        """Return the URLs of the levels that may lack that step or a later one. Thread-safe."""
        levels = enumerate(self._config.levels)
        return [level.url for index, level in levels if not self._client.is_complete(step, index)]

    def _has_captured_last(self) -> bool:
        last = self._recorder.last_due
        newest = self._captures.newest_whole_step()
        if last is None or last == newest:
            return True
        newest_text = "none"
        if newest is not None:
            newest_text = f"that of step {newest}"
        self._messages.tell(MessageKind.LAST_NOT_CAPTURED, step=last, newest=newest_text, reason=self._reason())
        return False

    def _reason(self) -> str:
        """Return the known reason for missing captures, and advice."""
        cause = self._memory.unprotected
        if cause is not None:
            return f"This training is NOT protected in memory: {cause}; {self._memory.what_is_lost()}"
        if self._statistics.skipped[NO_SLOTS]:
            return "Its memory was not ready in time (io_timeout_s)"
        return "The messages above say why"

    # ---------------------------------------------------------------- other ends

    def abandon(self, error: BaseException | None) -> None:
        """See ``SnapshotEngine.abandon``."""
        if self.is_closed:
            return
        self._preemption.training_failed(error, is_alone=self._world.is_alone)
        try:
            self._boundaries.finish_copies()
            self._leave()
            self._client.leave(Farewell.LEFT, self._config.io_timeout_s)
            if not self._preemption.ends_training:  # the exception explains the end
                self._tell_end(report.EndKind.ABANDONED, error)
        finally:
            self._preemption.leave()
        if error is None:  # otherwise preemption ends the training
            self._preemption.end_training()

    def give_way(self) -> None:
        """Become replaced by a later engine of this process. Abandons this one."""
        if not self.is_closed:
            self.is_replaced = True
            self.abandon(None)

    def discard(self) -> None:
        """Close the connection, and let the keeper free the memory: nothing of this training is needed. Blocks: asks
        the keeper.
        """
        if not self.is_closed:
            self._boundaries.gate()
            self._run.drop("engine.discard", lambda entry: True)
            self._leave()
            self._client.leave(Farewell.OVER, self._config.io_timeout_s)
            self._preemption.leave()

    def _leave(self) -> None:
        self.statistics()  # the last settings with a keeper
        self.is_closed = True
        self._recorder.end_names()
        self._boundaries.close()

    def _tell_end(self, ending: report.EndKind, error: BaseException | None = None) -> None:
        resumed = self._run.resumed
        untrained = None
        if resumed is not None and resumed.step == self._recorder.seen_step:
            untrained = resumed
        step_in_memory = self._statistics.last_whole_step
        if step_in_memory is None and resumed is not None and resumed.in_memory:
            step_in_memory = resumed.newest_step
        durable_step = None
        newest_durable = self._run.newest_durable()
        if newest_durable is not None:
            durable_step, _ = newest_durable
        if not self._run.is_begun:
            error = None
        end = report.EndFacts(
            ending,
            self._config,
            ranks=self._world.size,
            untrained=untrained,
            is_finished=self._run.restart.source.is_finished(),
            failing=self._failing(),
            error=error,
            step=(self._recorder.seen_step or 0) + 1,
            durable=durable_step,
            in_memory=step_in_memory,
        )
        for line in report.summary(self._statistics, end):
            self._messages.tell(MessageKind.END, line=line)
        warning = report.not_durable(self._statistics, end)
        if warning:
            self._messages.tell(MessageKind.NOT_DURABLE, **warning)

    def _failing(self) -> list[str]:
        """Return the URLs of failing levels, from the last state of the keeper."""
        levels = zip(self._config.levels, self._client.state.levels, strict=False)
        return [level.url for level, state in levels if state.failure]
