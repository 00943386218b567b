import contextlib
import fcntl
import json
import os

import pytest
from support.nodes import Cluster, why_not
from trainings import STEPS, Training


@contextlib.contextmanager
def _clusters(directory, zygote):
    if (reason := why_not()) is not None:
        pytest.skip(reason)

    def make(num_nodes=2):
        made = ends.enter_context(Cluster(directory("cluster"), num_nodes))
        made.python = str(zygote.python(made.shared))
        return made

    with contextlib.ExitStack() as ends:
        yield make


@pytest.fixture
def make_cluster(tmp_path_factory, zygote):
    """Starts nodes, all of which are killed when the test is over."""
    with _clusters(tmp_path_factory.mktemp, zygote) as make:
        yield make


@pytest.fixture
def cluster(make_cluster):
    return make_cluster()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, zygote):
    """The trace of a training that nothing happens to, and that nothing is captured of: by kind, and number of ranks.

    How many nodes they are on makes no difference. One worker trains it, the others read what it wrote.
    """
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent

    def ask(kind, ranks=4):
        path = directory / f"undisturbed-{kind}-{ranks}"
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with _clusters(tmp_path_factory.mktemp, zygote) as make:
                    training = Training(make(1), kind, local=ranks, has_level=False)
                    training.start(training.cluster.nodes)
                    training.wait()
                    path.write_text(json.dumps(training.lines()))
        lines = [tuple(line) for line in json.loads(path.read_text())]
        assert len(lines) == ranks * STEPS
        return lines

    return ask
