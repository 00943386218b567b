"""Two tiers of tests, and what tests on several workers must share.

``--tier full``, also without the option, runs everything. ``--tier quick`` runs what is not slow; tests of properties
try fewer examples there. In every run of a tier the examples are the same. Slow is what is marked ``slow`` (it takes
more than 0.3 s, or waits for time to pass), what needs a real server, and in folders that start whole trainings all
that is not marked ``quick``.
"""

import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import uuid

import hypothesis
import pytest
import seaweed
from support.keepers import end_keepers
from support.newest import resume_newest
from support.zygote import Zygote

from lazysnap import faults
from lazysnap.levels.storage import Storage

TRAINING_FOLDERS = (
    "accelerate",
    "device",
    "faults",
    "huggingface",
    "lightning",
    "many",
    "nfs",
    "nodes",
    "oddities",
    "power",
    "preemption",
    "warm",
)
"""Their tests are slow unless they are marked ``quick``."""
REAL_SERVERS = ("s3_server",)
"""Fixtures that make a test slow."""


def pytest_addoption(parser):
    parser.addoption("--tier", choices=("quick", "full"), default="full", help="quick: what is not slow")


def pytest_configure(config):
    # A job in the background ignores these, and so would every program that a test starts and interrupts.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # Threads of torch spin while they wait for one another: beside other workers that takes three times as long. Bits
    # depend on their number, too: here, and in all programs that tests start, it is the same.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:  # the conftest.py of a folder that was named to pytest comes before this
        sys.modules["torch"].set_num_threads(1)
    if "LAZYSNAP_RUNTIME_DIR" not in os.environ:
        runtime_directory = tempfile.TemporaryDirectory(prefix="lazysnap-", dir="/tmp", ignore_cleanup_errors=True)
        config.add_cleanup(runtime_directory.cleanup)
        os.environ["LAZYSNAP_RUNTIME_DIR"] = runtime_directory.name
    # Programs that tests start find the package ``support``, too.
    paths = [str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    resume_newest()
    # Else Hypothesis also tries numbers from the modules that happen to be imported, and a seed means little. Versions
    # before 6.131.30, which pyproject.toml takes too, lack this function.
    if hypothesis.__version_info__ >= (6, 131, 30):
        hypothesis.internal.conjecture.providers._get_local_constants = hypothesis.internal.constants_ast.Constants
    # The same examples in every run, however slow the machine is: no test fails by chance.
    common = {
        "deadline": None,
        "derandomize": True,
        "suppress_health_check": [hypothesis.HealthCheck.too_slow],
    }
    hypothesis.settings.register_profile("full", **common)
    hypothesis.settings.register_profile("quick", max_examples=10, **common)
    hypothesis.settings.load_profile(config.getoption("tier"))


def pytest_report_header(config):
    return f"tier: {config.getoption('tier')}"


def pytest_ignore_collect(collection_path, config):
    """Where the quick tier takes nothing, it imports nothing: frameworks take seconds in each worker."""
    if config.getoption("tier") != "quick" or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    is_slow = collection_path.parent.name in TRAINING_FOLDERS or re.search(r"^pytestmark = [^=]*mark\.slow", text, re.M)
    return True if is_slow and "mark.quick" not in text else None


def _needs_server(item):
    return any(name in REAL_SERVERS for name in item.fixturenames)


def _is_slow(item):
    if item.get_closest_marker("quick"):
        return False
    if item.get_closest_marker("slow") or item.path.parent.name in TRAINING_FOLDERS:
        return True
    return _needs_server(item)


def _group(item, *, is_quick):
    """The tests with one name here run on one worker; ``None``: this one runs anywhere."""
    if _needs_server(item) and item.get_closest_marker("xdist_group") is None:
        return "server"  # one server is enough for all of them
    # In the quick tier they are few: one process that has imported the frameworks is enough for all of them.
    if is_quick and "zygote" in item.fixturenames:
        return "zygote"
    if is_quick and item.path.parent.name == "huggingface":
        return "huggingface"
    return None


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(config, items):
    is_quick = config.getoption("tier") == "quick"
    for item in items:
        group = _group(item, is_quick=is_quick)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    slow, quick = [], []
    for item in items:
        (slow if _is_slow(item) else quick).append(item)
    if is_quick:
        config.hook.pytest_deselected(items=slow)
        items[:] = quick
    else:  # no worker begins with what takes long when the others are done
        items[:] = slow + quick


@pytest.fixture(autouse=True)
def _no_keeper_outlives_its_test(request):
    """One that was abandoned would hold its memory for minutes."""
    yield
    end_keepers(f"{request.node.nodeid} (call)")


@pytest.fixture(autouse=True, scope="module")
def _no_keeper_outlives_its_module(request):
    yield
    end_keepers(f"{request.node.nodeid}::")


@pytest.fixture(scope="session")
def zygote():
    """Starts the trainings of all tests of a worker."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def forking_python(zygote, tmp_path_factory):
    """A program that starts what Python would, in a tenth of a second."""
    return str(zygote.python(tmp_path_factory.mktemp("zygote")))


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


@pytest.fixture
def a_day_later(monkeypatch):
    """Let what nobody holds count as a day old."""
    monkeypatch.setattr(Storage, "abandoned_after_s", -3600.0)


@pytest.fixture
def passing(monkeypatch):
    """Do something whenever a fault point is passed: ``passing(lambda name: ...)``."""

    def arm(work):
        original = faults.point

        def point(name):
            work(name)
            original(name)

        monkeypatch.setattr(faults, "point", point)

    return arm


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
