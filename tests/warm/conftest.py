import contextlib
import signal

import pytest
from warm_place import Place


@contextlib.contextmanager
def opened(directory):
    """A place, whose processes are ended with it."""
    place = Place(directory)
    yield place
    for process in place.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
    for process in place.processes():
        process.kill()


@pytest.fixture
def place(tmp_path):
    with opened(tmp_path) as place:
        yield place


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory):
    """The place of several tests: what the first one imports, the parents of the others have."""
    with opened(tmp_path_factory.mktemp("warm")) as place:
        yield place
