import contextlib
import dataclasses
import os
import signal
import time

import pytest
from jobs import Job, Zygote

from lazysnap.config import SnapshotConfig
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.visit import Visit, keepers_here


def keepers(job):
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(job.root)))
    found = []
    for number in keepers_here(identity):
        connection = try_connect(dataclasses.replace(identity, local_rank=number))
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


@pytest.fixture
def end_keepers():
    """Memory is lost."""
    return kill_keepers


@pytest.fixture(scope="session")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def make_shared_job(zygote, tmp_path_factory):
    jobs = []

    def make(name, **settings):
        jobs.append(Job(zygote, tmp_path_factory.mktemp(name), **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        kill_keepers(job)


@pytest.fixture
def make_job(zygote, tmp_path):
    jobs = []

    def make(name="job", **settings):
        jobs.append(Job(zygote, tmp_path / name, **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        kill_keepers(job)


@pytest.fixture
def job(make_job):
    return make_job()
