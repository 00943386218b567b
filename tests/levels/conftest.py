import fault_proxy
import pytest

from lazysnap.levels.storage import Storage


@pytest.fixture
def s3_proxy(s3_server):
    """Before the server, to break requests."""
    with fault_proxy.before(f"127.0.0.1:{s3_server.port}", s3_server.sign) as proxy:
        yield proxy


@pytest.fixture
def a_day_later(monkeypatch):
    """Let what nobody holds count as a day old."""
    monkeypatch.setattr(Storage, "abandoned_after_s", -3600.0)
