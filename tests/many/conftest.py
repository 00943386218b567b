import pytest
from jobs import Job
from rank_keepers import kill_keepers


@pytest.fixture
def end_keepers():
    """Memory is lost."""
    return kill_keepers


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
