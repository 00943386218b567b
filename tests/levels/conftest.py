import fault_proxy
import pytest


@pytest.fixture
def s3_proxy(s3_server):
    """Before the server, to break requests."""
    with fault_proxy.before(f"127.0.0.1:{s3_server.port}", s3_server.sign) as proxy:
        yield proxy
