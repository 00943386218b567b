import pytest
from jobs import Job
from rank_keepers import kill_keepers


@pytest.fixture
def end_keepers():
    """Memory is lost."""
    return kill_keepers


@pytest.fixture(scope="module")
def make_shared_job(zygote, tmp_path_factory):
    """Makes jobs for the tests of a module. Their keepers end with the module: ``tests/conftest.py``."""

    def make(name, **settings):
        return Job(zygote, tmp_path_factory.mktemp(name), **settings)

    return make


@pytest.fixture
def make_job(zygote, tmp_path):
    """Makes jobs for one test. Their keepers end with it: ``tests/conftest.py``."""

    def make(name="job", **settings):
        return Job(zygote, tmp_path / name, **settings)

    return make


@pytest.fixture
def job(make_job):
    return make_job()
