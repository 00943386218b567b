import contextlib

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

    How many nodes they are on makes no difference.
    """
    traces = {}

    def ask(kind, ranks=4):
        if (kind, ranks) not in traces:
            with _clusters(tmp_path_factory.mktemp, zygote) as make:
                training = Training(make(1), kind, local=ranks, has_level=False)
                training.start(training.cluster.nodes)
                training.wait()
                traces[kind, ranks] = training.lines()
            assert len(traces[kind, ranks]) == ranks * STEPS
        return traces[kind, ranks]

    return ask
