import signal

import pytest
from warm_place import Place


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    for process in place.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
    for process in place.processes():
        process.kill()
