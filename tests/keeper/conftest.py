import pytest
from keeper_jobs import Job


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
def job(make_job):
    return make_job()
