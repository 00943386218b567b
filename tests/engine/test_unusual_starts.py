"""Programs that are started in an unusual way: without standard descriptors or /proc, with limits, or with a path that
is not UTF-8.
"""

import os
import resource
import subprocess
import sys

import pytest

from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.errors import ConfigError

STEPS = 8
PROGRAM = f"""
import sys, torch
from lazysnap import SnapshotEngine
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = SnapshotEngine(sys.argv[1], {{"model": model, "optimizer": optimizer}})
engine.restore("latest")
for _ in range({STEPS}):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.boundary()
engine.close()
"""


@pytest.mark.slow
def test_a_training_whose_standard_descriptors_are_closed_is_stored(tmp_path):
    directory = tmp_path / "run"
    arguments = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", PROGRAM, str(directory)]

    subprocess.run(arguments, timeout=120, check=True)

    assert list(directory.glob(f"step-{STEPS:08}-*"))


def test_a_path_or_name_that_is_not_utf8_is_refused_at_once_and_named(tmp_path, monkeypatch):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff")
    monkeypatch.setenv("LAZYSNAP_JOB_ID", path)

    with pytest.raises(ConfigError, match=r"run-\\udcff' is not UTF-8"):
        PersistentLevel(path)
    with pytest.raises(ConfigError, match=r"run-\\udcff' is not UTF-8"):
        SnapshotEngine(SnapshotConfig(), {"position": {"step": 0}})


def _run_without_proc(*arguments):
    """Run a command in a mount namespace of its own whose /proc is empty."""
    hide = 'mount -t tmpfs none /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", hide, "sh", *arguments]
    return subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_training_without_proc_is_stored(tmp_path):
    if _run_without_proc("true").returncode != 0:
        pytest.skip("needs the right to make a mount namespace")
    directory = tmp_path / "run"

    done = _run_without_proc(sys.executable, "-c", PROGRAM, str(directory))

    assert done.returncode == 0, done.stderr
    assert "(newest: step 8)" in done.stderr
    assert list(directory.glob(f"step-{STEPS:08}-*"))


LIMITED = """
import resource, sys, time, torch
from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))  # smaller than a slot, larger than a snapshot
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = SnapshotEngine(SnapshotConfig(levels=[PersistentLevel(sys.argv[1])]), {"model": model, "optimizer": optimizer})
engine.restore("latest")
step = 0
def train():
    global step
    step += 1
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.boundary()
train()
print("went on", file=sys.stderr, flush=True)
deadline = time.monotonic() + 60
resource.prlimit(engine._client.keeper_pid, resource.RLIMIT_FSIZE, (hard, hard))
while not engine.statistics().began and time.monotonic() < deadline:
    train()
engine.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY, reason="this process has a hard limit"
)
def test_a_limit_of_file_sizes_below_a_slot_is_named_at_the_first_boundary_and_memory_is_asked_for_again(
    forking_python, tmp_path
):
    """Training goes on. The limit of the running keeper is raised, as ``prlimit`` of the shell does."""
    arguments = [forking_python, "-c", LIMITED, str(tmp_path / "run")]

    done = subprocess.run(arguments, timeout=120, capture_output=True, text=True, check=True)

    before, after = done.stderr.split("went on")
    assert "NOT protected in memory: the machine refused" in before
    assert "File too large; the keeper has the limit of its training for the size of a file: raise it" in before
    assert "protected in memory again" in after
    assert list((tmp_path / "run").glob("step-*"))
