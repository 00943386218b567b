import tempfile

import pytest


@pytest.fixture
def make_job(tmp_path):
    from keeper_jobs import Job

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
