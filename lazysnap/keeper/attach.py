"""Becoming a job's trainer: hello and the keeper's answer."""

import dataclasses
import time

from lazysnap import faults
from lazysnap.config import SnapshotConfig
from lazysnap.errors import JobBusy, KeeperUnavailable
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import reach_keeper
from lazysnap.keeper.messages import Connection, Received
from lazysnap.keeper.team import Team

_BUSY_GRACE_S = 3.0
"""A trainer that was just killed may take a moment to be gone."""
_RETRY_S = 0.02


def attach(identity: JobIdentity, config: SnapshotConfig, team: Team) -> tuple[Connection, Received]:
    """A connection as this job's trainer, starting a keeper if there is none, and what came with the welcome.

    Blocks: at most ``keeper_timeout_s``. Raises: JobBusy, if another trainer is attached; KeeperUnavailable.
    """
    deadline = time.monotonic() + config.keeper_timeout_s
    busy_until = time.monotonic() + _BUSY_GRACE_S
    while True:
        connection = reach_keeper(identity, deadline)
        received = _say_hello(connection, config, team, deadline)
        reply = received[0][0] if received else None
        if reply is not None and reply["type"] == "welcome":
            faults.set_peer(int(reply["pid"]))
            return connection, received[1:]
        connection.close()
        if reply is not None and reply["type"] == "busy" and time.monotonic() > busy_until:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reply["since"]))
            raise JobBusy(
                f"job {identity.job_id!r} runs already on this node: process {reply['pid']}, since {since}; "
                "end it, or give this one another directory or SnapshotConfig(job_id=...)"
            )
        if time.monotonic() > deadline:
            raise KeeperUnavailable(
                f"the keeper of job {identity.job_id!r} is still writing what an earlier run left; try again "
                "when it is done"
            )
        time.sleep(_RETRY_S)


def _say_hello(connection: Connection, config: SnapshotConfig, team: Team, deadline: float) -> Received:
    levels = [dataclasses.asdict(level) for level in config.levels]
    memory = config.memory
    try:
        wanted = {"levels": levels, "linger_s": memory.linger_s, "max_bytes": memory.max_bytes}
        connection.send({"type": "hello", **wanted, "team": vars(team)})
        connection.set_receive_timeout(max(0.1, deadline - time.monotonic()))
        return connection.receive() or []
    except OSError:
        return []
