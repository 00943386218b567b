"""The keepers of a job of several ranks: which live, what they hold, and their end."""

import contextlib
import dataclasses
import os
import signal
import time

from lazysnap.config import SnapshotConfig
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.visit import Visit, keepers_here


def keepers(job):
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(job.root)))
    found = []
    for node in (identity.node, *job.nodes):
        here = dataclasses.replace(identity, node=node)
        for number in keepers_here(here):
            connection = try_connect(dataclasses.replace(here, local_rank=number))
            if connection is not None:
                found.append(connection.peer_pid)
                connection.close()
    return found


@contextlib.contextmanager
def visits(job):
    """What the keepers hold, by local rank, as soon as all of it has a checksum."""
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(job.root)))
    with contextlib.ExitStack() as stack:
        found = {}
        for number in keepers_here(identity):
            deadline = time.monotonic() + 20
            while True:
                visit = Visit(dataclasses.replace(identity, local_rank=number), 5.0)
                if all(entry.checksums is not None for entry in visit.holdings.entries):
                    break
                visit.close()
                assert time.monotonic() < deadline
            found[number] = visit
            stack.callback(visit.close)
        yield found


def kill_keepers(job):
    deadline = time.monotonic() + 10
    while left := keepers(job):
        assert time.monotonic() < deadline
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
