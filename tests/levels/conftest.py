import fault_proxy
import pytest

from lazysnap.levels import local, remote


@pytest.fixture
def s3_proxy(s3_server):
    """Before the server, to break requests."""
    with fault_proxy.before(f"127.0.0.1:{s3_server.port}", s3_server.sign) as proxy:
        yield proxy


@pytest.fixture
def a_day_later(monkeypatch):
    """Let what nobody holds count as a day old."""
    for module in (local, remote):
        monkeypatch.setattr(module, "ABANDONED_AFTER_S", -3600.0)
