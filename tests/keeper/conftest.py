import tempfile

import pytest
from keeper_jobs import Job
from support.node_rig import RUN, STARTS, Rig


@pytest.fixture
def make_job(tmp_path):
    jobs = []

    def make(name="a"):
        jobs.append(Job(f"{tmp_path}/{name}", tmp_path))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def runtime_directory():
    """An empty directory of this user alone, with a short path."""
    with tempfile.TemporaryDirectory(prefix="lazysnap-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield directory


@pytest.fixture
def job(make_job):
    return make_job()


@pytest.fixture
def rig():
    """Makes trainings, which have begun unless ``start`` is ``None``, and end with the test."""
    rigs = []

    def make(*levels, start=STARTS[0], run_id=RUN, **settings):
        rigs.append(Rig(*levels, **settings))
        return rigs[-1] if start is None else rigs[-1].begin(start, run_id=run_id)

    yield make
    for made in rigs:
        made.close()
