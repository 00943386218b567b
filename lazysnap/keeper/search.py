"""The search of a trainer for a keeper that serves it.

::

    nobody listens ──> start one, with the trainer's slots ──┐
    one listens ─────> connect, and send the same ───────────┴──> its first state: served, or refused

Memory is handed over with the first message, not after the answer: before that it is lost if this process dies.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from lazysnap import faults
from lazysnap.console import say
from lazysnap.core.messages import Farewell, KeeperState, TrainerState
from lazysnap.errors import JobBusy, KeeperError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import KeeperBusy, StartingKeeper, start_keeper, try_connect
from lazysnap.keeper.wire import Channel, Frame, OtherVersion, WireError
from lazysnap.memory.slots import TrainerSlot

_BUSY_GRACE_S = 3.0
"""Seconds until a trainer that was just killed is gone."""
_REPORT_BUSY_S = 0.5
"""Seconds before a busy job is reported: a trainer that was just killed is usually gone by then."""
_BUSY_START_S = 1.0
"""Seconds after a refusal before a new keeper is started: a trainer replaces the keeper that served it sooner."""
_RETRY_S = 0.02
_RETRY_UNANSWERED_S = 0.002
"""Seconds until a killed keeper no longer accepts connections. Memory waits for the next one."""
_START_AGAIN_S = 0.2
"""Seconds after which the next keeper is started if one ended at once; doubled each time."""
_START_AGAIN_AT_MOST_S = 2.0
_REAP_S = 1.0


@dataclass(frozen=True)
class ServingKeeper:
    """A connection to a keeper that serves this trainer."""

    channel: Channel
    sent: TrainerState
    """The state that was sent to it."""
    state: KeeperState
    """Its first state. Its descriptors are in ``frames``."""
    frames: list[Frame]
    """All messages that it has sent."""


class KeeperSearch:
    """One search for the keeper of a job; each search is used once.

    Example::

        served = KeeperSearch(identity, 60.0, hand_over, is_leaving, wake_descriptor).run()
    """

    def __init__(
        self,
        identity: JobIdentity,
        io_timeout_s: float,
        hand_over: Callable[[], tuple[TrainerState, tuple[TrainerSlot, ...]]],
        is_leaving: Callable[[], bool],
        wake_descriptor: int,
    ) -> None:
        """Do nothing yet, but start the time limit.

        Args:
            identity: identity of the job.
            io_timeout_s: seconds after which the search fails.
            hand_over: returns the trainer's state, and its slots in the order of ``state.slots``.
            is_leaving: returns True once no keeper is needed any more.
            wake_descriptor: an eventfd that is written when that may have changed.
        """
        now = time.monotonic()
        self._identity = identity
        self._io_timeout_s = io_timeout_s
        self._hand_over = hand_over
        self._is_leaving = is_leaving
        self._wake_descriptor = wake_descriptor
        self._deadline_s = now + io_timeout_s
        self._busy_until_s = now + _BUSY_GRACE_S
        self._report_busy_at_s = now + _REPORT_BUSY_S
        self._start_at_s = now
        self._start_pause_s = _START_AGAIN_S
        self._starting: StartingKeeper | None = None
        """The last keeper that this search started."""
        self._outcome = ""
        """The reason why it does not serve, in parentheses."""
        self._sent = TrainerState(local_rank=0)
        """The last state that was sent."""
        self._silent_pid: int | None = None
        """The process that listens without answering."""
        self._retry_s = _RETRY_S

    def run(self) -> ServingKeeper | None:
        """Search until a keeper serves this trainer.

        Blocks: at most ``io_timeout_s`` plus a second.
        Returns: the connection; None if the trainer leaves first.
        Raises: JobBusy, if another trainer is attached; KeeperError.
        """
        while not self._is_leaving():
            self._silent_pid = None
            self._retry_s = _RETRY_S
            channel = self._connect()
            if channel is not None:
                served = self._await_state(channel)
                if served is not None:
                    return served
                if self._sent.farewell is not Farewell.NONE:
                    break  # it received the end of the training, and ends without an answer
            if time.monotonic() > self._deadline_s and not self._is_leaving():
                raise KeeperError(self._why_none())
            time.sleep(self._retry_s)
        self._reap()
        return None

    def _connect(self) -> Channel | None:
        """Return a connection on which the state was sent; None if the caller must retry."""
        channel = try_connect(self._identity)
        if channel is None:
            return self._start()
        self._silent_pid = channel.peer_pid
        state, slots = self._hand_over()
        try:
            channel.send(state, _descriptors(slots))
        except OSError:  # the other end has closed
            channel.close()
            self._retry_s = _RETRY_UNANSWERED_S
            return None
        except WireError:
            channel.close()
            raise
        self._sent = state
        return channel

    def _start(self) -> Channel | None:
        """Start a keeper, unless one was started just now."""
        if time.monotonic() < self._start_at_s:
            faults.point("client.no_start_yet")
            return None
        if self._starting is not None:
            self._outcome = self._starting.failure()
        state, slots = self._hand_over()
        try:
            self._starting = start_keeper(self._identity, state, _descriptors(slots))
        except KeeperBusy as error:  # the process that has the lock will die or listen soon
            self._outcome = f" ({error})"
            self._start_pause_s = _START_AGAIN_S
            self._retry_s = _RETRY_UNANSWERED_S
            return None
        except OSError as error:
            self._outcome = f" ({error})"
            self._pause_starts()
            return None
        self._pause_starts()
        self._sent = state
        faults.point("client.handed_over")
        return self._starting.channel

    def _pause_starts(self) -> None:
        self._start_at_s = time.monotonic() + self._start_pause_s
        self._start_pause_s = min(2 * self._start_pause_s, _START_AGAIN_AT_MOST_S)

    def _await_state(self, channel: Channel) -> ServingKeeper | None:
        """Wait for the first state of the keeper; None without one, or if it serves another trainer."""
        frames: list[Frame] = []
        state = None
        is_done = False
        try:
            while state is None and not is_done:
                is_done = time.monotonic() > self._deadline_s or self._is_leaving()
                if not is_done:
                    channel.wait(self._deadline_s - time.monotonic(), self._wake_descriptor)
                    drain(self._wake_descriptor)
                arrived = self._exchange(channel)
                if arrived is None:  # the keeper died, or another one is starting
                    self._silent_pid = None
                    self._retry_s = _RETRY_UNANSWERED_S
                    break
                frames += arrived
                state = _state_in(frames)
            if state is not None and not state.refusal:
                self._become_served(channel, state)
                return ServingKeeper(channel, self._sent, state, frames)
        except BaseException:
            _close(channel, frames)
            raise
        _close(channel, frames)
        if state is not None:
            self._become_refused(state.refusal)
        return None

    def _exchange(self, channel: Channel) -> list[Frame] | None:
        """Send the rest, and return received messages; None at the end. Raises: KeeperError, if the process is no
        keeper.
        """
        try:
            channel.flush()
            return channel.receive()
        except OSError:
            return None
        except OtherVersion as error:
            raise KeeperError(
                f"process {channel.peer_pid}, at the socket of this job's keeper, is of another version of lazysnap "
                f"({error}); end it with `kill {channel.peer_pid}`: it stores what it holds, then leaves"
            ) from error
        except WireError as error:
            raise KeeperError(
                f"process {channel.peer_pid}, at the socket of this job's keeper, is no keeper: {error}; end it, or "
                "give the job another name with SnapshotConfig(job_id=...)"
            ) from error

    def _reap(self) -> None:
        """Wait until the process that starts a keeper has ended, as soon as the keeper is detached."""
        if self._starting is not None:
            self._starting.reaper.join(_REAP_S)

    def _become_served(self, channel: Channel, state: KeeperState) -> None:
        channel.peer_pid = state.pid
        self._reap()
        faults.set_peer(state.pid)

    def _become_refused(self, refusal: str) -> None:
        """Handle that another trainer is attached. Raises: JobBusy, after too long a time."""
        faults.point("client.refused")
        now = time.monotonic()
        self._silent_pid = None
        if now > self._busy_until_s:
            raise JobBusy(
                f"job {self._identity.job_id!r} runs already on {self._identity.node}: {refusal}; or give this one a "
                "directory of its own (without levels: SnapshotConfig(job_id=...))"
            )
        if now > self._report_busy_at_s:
            self._report_busy_at_s = float("inf")
            if self._sent.local_rank == 0:
                say(
                    f"waiting {_BUSY_GRACE_S:g} s for another training of job {self._identity.job_id!r} on "
                    f"{self._identity.node} to end: {refusal}, also if they remain from a killed launcher"
                )
        self._start_at_s = max(self._start_at_s, now + _BUSY_START_S)

    def _why_none(self) -> str:
        """Return the reason why no keeper serves this trainer, for the message."""
        job_id = self._identity.job_id
        if self._silent_pid:
            pid = self._silent_pid
            return (
                f"the keeper of job {job_id!r} (process {pid}) did not answer within {self._io_timeout_s:g} s "
                f"(io_timeout_s): it is stopped, or the machine is overloaded; `kill -CONT {pid}` resumes a stopped one"
            )
        files = self._identity.files
        text = f"no keeper of job {job_id!r} could be started{self._outcome}"
        if files.log_path.exists():
            return f"{text}; its log {files.log_path} shows why"
        return f"{text}; `{sys.executable} -m lazysnap.keeper --foreground --socket {files.socket_path}` shows why"


def drain(descriptor: int) -> None:
    """Clear a non-blocking eventfd."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(descriptor)


def _descriptors(slots: tuple[TrainerSlot, ...]) -> list[int]:
    return [slot.descriptor for slot in slots]


def _state_in(frames: list[Frame]) -> KeeperState | None:
    """Return the first state of the keeper among its messages."""
    for frame in frames:
        if isinstance(frame.message, KeeperState):
            return frame.message
    return None


def _close(channel: Channel, frames: list[Frame]) -> None:
    for frame in frames:
        frame.close()
    channel.close()
