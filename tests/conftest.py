"""What tests on several workers must share: a server that is started once, a process that others are forked from."""

import pathlib
import shutil
import uuid

import pytest
import seaweed

SHARED = ("nfs", "faults", "many")


def pytest_collection_modifyitems(items):
    for item in items:
        directory = pathlib.Path(item.path).parent.name
        if directory in SHARED:
            item.add_marker(pytest.mark.xdist_group(directory))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """A real S3 server, one for all tests of a process; it is never stopped for longer than a test."""
    directory = tmp_path_factory.mktemp("seaweed")
    with seaweed.running(directory) as server:
        yield server
    shutil.rmtree(directory)


@pytest.fixture
def s3_url():
    """A prefix that nobody else uses."""
    return f"s3://{seaweed.BUCKET}/{uuid.uuid4().hex}/run"
