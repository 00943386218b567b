"""The keeper of a job of several ranks, one on each node: whether it lives, what it holds, and its end."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import time

from lazysnap.config import SnapshotConfig
from lazysnap.errors import KeeperUnavailable
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.visit import Visit

_SCANS = 10
"""So many in a row that find no keeper: a process that was forked before the first one runs by the last."""


def keepers(job):
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(job.root)))
    found = []
    for node in (identity.node, *job.nodes):
        connection = try_connect(dataclasses.replace(identity, node=node))
        if connection is not None:
            found.append(connection.peer_pid)
            connection.close()
    return found


def local_ranks(job):
    """For which the keeper of this node holds anything."""
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(job.root)))
    try:
        with contextlib.closing(Visit(identity, 0, 5.0)) as visit:
            return list(visit.holdings.local_ranks)
    except KeeperUnavailable:
        return []


@contextlib.contextmanager
def visits(job):
    """What the keeper of this node holds, by local rank, as soon as all of it has a checksum."""
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(job.root)))
    with contextlib.ExitStack() as stack:
        found = {}
        for number in local_ranks(job):
            deadline = time.monotonic() + 20
            while True:
                visit = Visit(identity, number, 5.0)
                if all(entry.checksums is not None for entry in visit.holdings.entries):
                    break
                visit.close()
                assert time.monotonic() < deadline
            found[number] = visit
            stack.callback(visit.close)
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


def kill_keepers(job):
    """Also those that a trainer has just started: before it runs, such a process shows the trainer's own name."""
    deadline, nobody = time.monotonic() + 10, 0
    while nobody < _SCANS:
        left = processes(job)
        nobody = 0 if left else nobody + 1
        assert time.monotonic() < deadline
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
