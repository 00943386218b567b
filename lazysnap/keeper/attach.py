"""Becoming a job's trainer: hello and the keeper's answer."""

import contextlib
import select
import sys
import time
from collections.abc import Callable, Iterator

from lazysnap import faults
from lazysnap.config import SnapshotConfig
from lazysnap.console import say
from lazysnap.errors import JobBusy, KeeperError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import KeeperBusy, Starting, start_keeper, try_connect
from lazysnap.keeper.messages import Connection, OtherVersion, Received
from lazysnap.keeper.protocol import Done, Hello, Welcome
from lazysnap.topology import Team

_BUSY_GRACE_S = 3.0
"""A trainer that was just killed may take a moment to be gone."""
_BUSY_SAID_S = 0.5
"""By then one that was just killed is gone, mostly, and nobody needs to know of it."""
_BUSY_START_S = 1.0
"""Whoever was refused starts no keeper sooner: where that one dies, the trainer that it served replaces it."""
_RETRY_S = 0.02
_RETRY_UNANSWERED_S = 0.002
"""A keeper that was just killed may still accept connections for a moment. Memory waits for the next one."""
_START_AGAIN_S = 0.2
"""A keeper that was started and ended at once is followed by the next; each time after twice as long."""
_START_AGAIN_AT_MOST_S = 2.0
_REAP_S = 1.0

HandOver = Callable[[Connection], None]
"""Gives the keeper what an earlier one held."""


def attach(
    identity: JobIdentity,
    config: SnapshotConfig,
    team: Team,
    hand_over: HandOver = lambda _: None,
) -> tuple[Connection, Received]:
    """A connection as this job's trainer, starting a keeper if there is none, the welcome, and what came with it.

    Memory is handed over with the hello, not after the answer: until then it is lost if this process dies.
    Blocks: at most ``io_timeout_s``.
    Raises: JobBusy, if another trainer is attached; KeeperError.
    """
    deadline = time.monotonic() + config.io_timeout_s
    busy_until = time.monotonic() + _BUSY_GRACE_S
    busy_said_at = time.monotonic() + _BUSY_SAID_S
    start_at = float("-inf")
    pause_s = _START_AGAIN_S
    outcome = ""
    starting: Starting | None = None
    was_there = False
    while True:
        connection = try_connect(identity)
        was_there = connection is not None
        if connection is None and time.monotonic() > start_at:
            if starting is not None:
                outcome = starting.failure()
            start_at = time.monotonic() + pause_s
            pause_s = min(2 * pause_s, _START_AGAIN_AT_MOST_S)
            try:
                starting = start_keeper(identity)
                connection = starting.connection
            except KeeperBusy as error:  # the process that has the lock dies, or listens, in a moment
                outcome = f" ({error})"
                start_at = float("-inf")
                pause_s = _START_AGAIN_S
            except OSError as error:
                outcome = f" ({error})"
        received = Received()
        if connection is not None:
            with _explained(connection):
                connection.send(Hello(config.levels, config.memory, team))
                hand_over(connection)
                if not was_there:
                    faults.point("client.handed_over")
                if _wait(connection, deadline):
                    received = connection.receive() or []
        reply = received[0][0] if received else None
        if isinstance(reply, Welcome):
            assert connection is not None
            connection.peer_pid = reply.pid
            if starting is not None:
                starting.reaper.join(_REAP_S)  # what answers is detached already
            faults.set_peer(connection.peer_pid)
            return connection, received
        if connection is not None:
            connection.close()
        if isinstance(reply, Done):
            faults.point("client.refused")
            if time.monotonic() > busy_until:
                raise JobBusy(_why_busy(identity, reply))
            if time.monotonic() > busy_said_at:
                busy_said_at = float("inf")
                if team.local_rank == 0:
                    say(_waits(identity, reply))
            start_at = max(start_at, time.monotonic() + _BUSY_START_S)
        if time.monotonic() > deadline:
            if connection is not None and was_there and reply is None:
                raise KeeperError(_why_silent(identity, config, connection.peer_pid))
            raise KeeperError(_why_none(identity, outcome))
        time.sleep(_RETRY_UNANSWERED_S if reply is None else _RETRY_S)


def _waits(identity: JobIdentity, reply: Done) -> str:
    return (
        f"waiting {_BUSY_GRACE_S:g} s for another training of job {identity.job_id!r} on {identity.node} to end: "
        f"{reply.text}, also where they are left over from a launcher that was killed"
    )


def _why_busy(identity: JobIdentity, reply: Done) -> str:
    return (
        f"job {identity.job_id!r} runs already on {identity.node}: {reply.text}; or give this one a directory of its "
        "own (without levels: SnapshotConfig(job_id=...))"
    )


def _why_silent(identity: JobIdentity, config: SnapshotConfig, pid: int) -> str:
    within = f"within {config.io_timeout_s:g} s (io_timeout_s)"
    return (
        f"the keeper of job {identity.job_id!r} (process {pid}) did not answer {within}: it is stopped, or the "
        f"machine is overloaded; `kill -CONT {pid}` lets a stopped one go on"
    )


def _why_none(identity: JobIdentity, outcome: str) -> str:
    log = _log_of(identity)
    if log:
        return f"no keeper of job {identity.job_id!r} could be started{outcome}; its log {log} shows why"
    return (
        f"no keeper of job {identity.job_id!r} could be started{outcome}; `{sys.executable} -m lazysnap.keeper "
        f"--foreground --socket {identity.files.socket_path}` shows why"
    )


def _log_of(identity: JobIdentity) -> str:
    """Return the path of the log of this job's keepers; empty, if none of them wrote any."""
    with contextlib.suppress(OSError):
        path = identity.files.log_path
        return str(path) if path.exists() else ""
    return ""


@contextlib.contextmanager
def _explained(connection: Connection) -> Iterator[None]:
    """Ignore an other end that is gone again; explain one that is no keeper of this version."""
    pid = connection.peer_pid
    try:
        yield
    except OSError:
        return
    except OtherVersion as error:
        connection.close()
        raise KeeperError(
            f"process {pid}, at the socket of this job's keeper, is of another version of lazysnap ({error}); end "
            f"it with `kill {pid}`: it stores what it holds, then leaves"
        ) from error
    except KeeperError as error:
        connection.close()
        raise KeeperError(
            f"process {pid}, at the socket of this job's keeper, is no keeper: {error}; end it, or give the job "
            "another name with SnapshotConfig(job_id=...)"
        ) from error


def _wait(connection: Connection, deadline: float) -> bool:
    """Block until something can be read; ``False`` if nothing came before ``deadline``, by the monotonic clock."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))
