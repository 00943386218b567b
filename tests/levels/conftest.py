import shutil
import uuid

import fault_proxy
import pytest
import seaweed


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """A real S3 server; it is never stopped for longer than a test."""
    directory = tmp_path_factory.mktemp("seaweed")
    with seaweed.running(directory) as server:
        yield server
    shutil.rmtree(directory)


@pytest.fixture
def s3_url():
    """A prefix that nobody else uses."""
    return f"s3://{seaweed.BUCKET}/{uuid.uuid4().hex}/run"


@pytest.fixture
def s3_proxy(s3_server):
    """Before the server, to break requests."""
    with fault_proxy.before(f"127.0.0.1:{s3_server.port}", s3_server.sign) as proxy:
        yield proxy
