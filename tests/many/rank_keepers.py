"""The keeper of a job of several ranks, one on each node: whether it lives, what it holds, and its end."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import time

import support.keepers
from support.waiting import TIMEOUT_S, until

from lazysnap.config import SnapshotConfig
from lazysnap.errors import KeeperError
from lazysnap.keeper.asking import NeighbourMemory
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect

_SCANS = 10
"""So many in a row that find no keeper: what leaves the session of its rank runs as a keeper by the last."""


def keepers(job):
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(job.root)))
    found = []
    for node in (identity.node, *job.nodes):
        pid = support.keepers.keeper_of(dataclasses.replace(identity, node=node))
        if pid is not None:
            found.append(pid)
    return found


def keeper_of(job, node):
    """The process that is the keeper of a node."""
    return support.keepers.keeper_of(_identity(job, node))


def end_nodes(job, *nodes):
    """Kill the keepers of these nodes, and with them all that the nodes held. The ranks are dead."""
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(job.root)))
    for node in nodes:
        connection = try_connect(dataclasses.replace(identity, node=node))
        with contextlib.closing(connection):
            os.kill(connection.peer_pid, signal.SIGKILL)
            until(functools.partial(_has_ended, connection))


def _has_ended(connection):
    return connection.receive() is None


def _identity(job, node):
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(job.root)))
    return identity if node is None else dataclasses.replace(identity, node=node)


def local_ranks(job, node=None):
    """For which the keeper of a node, this one by default, holds anything."""
    identity = _identity(job, node)
    try:
        with contextlib.closing(NeighbourMemory(identity, 0, TIMEOUT_S)) as neighbour:
            return list(neighbour.inventory.local_ranks)
    except KeeperError:
        return []


@contextlib.contextmanager
def neighbours(job, node=None):
    """What the keeper of a node, this one by default, holds, by local rank, as soon as all of it has a checksum."""
    identity = _identity(job, node)
    with contextlib.ExitStack() as stack:
        found = {}
        for number in local_ranks(job, node):
            deadline = time.monotonic() + TIMEOUT_S
            while True:
                neighbour = NeighbourMemory(identity, number, TIMEOUT_S)
                if all(entry.checksums is not None for entry in neighbour.inventory.entries):
                    break
                neighbour.close()
                assert time.monotonic() < deadline
            found[number] = neighbour
            stack.callback(neighbour.close)
        yield found


def processes(job):
    """All processes that are a keeper of this job, or are about to be."""
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(job.root)))
    words = {dataclasses.replace(identity, node=node).arguments[-1].encode() for node in (identity.node, *job.nodes)}
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if words & set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found


def about_to_be(job):
    """What ranks forked before they died: until it runs, such a process shows the name of its rank, in its session."""
    ranks = {int(pid) for _, _, pid in job.events("pid")}
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            session = int(path.read_text().rsplit(")", 1)[1].split()[3])
            found += [int(path.parent.name)] if session in ranks else []
    return found


def kill_keepers(job):
    """Also those that a rank has just started. The ranks are dead."""
    deadline, nobody = time.monotonic() + TIMEOUT_S, 0
    while nobody < _SCANS:
        left = processes(job) + about_to_be(job)
        nobody = 0 if left else nobody + 1
        assert time.monotonic() < deadline
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
