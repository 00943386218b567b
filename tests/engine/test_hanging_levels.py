"""A level that hangs is passed over by a restart, and keeps no process from ending."""

import socket
import subprocess
import sys
import textwrap

import pytest
from small_training import TIMEOUT_S, Training

from lazysnap import PersistentLevel, SnapshotConfig


@pytest.fixture
def dead():
    """The URL of a server that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"ftp://127.0.0.1:{listener.getsockname()[1]}/run"


def config(job, *levels):
    return SnapshotConfig(job_id=job.job_id, levels=levels, memory=job.config().memory, keeper_timeout_s=TIMEOUT_S)


def test_a_level_that_does_not_answer_is_passed_over_and_named(job, tmp_path, dead):
    good = tmp_path / "good"
    training = job.start(good)
    training.run(1, 2)
    assert training.engine.close()

    second = Training(config(job, PersistentLevel(dead, timeout_s=0.5), PersistentLevel(str(good))))
    job.trainings.append(second)
    snapshot = second.engine.fetch("latest")

    assert (snapshot.step, snapshot.level) == (2, str(good))
    assert any(dead in problem and "did not move" in problem for problem in snapshot.skipped)


SCRIPT = """
    import sys
    import torch
    from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine

    config = SnapshotConfig(levels=(PersistentLevel(sys.argv[1], timeout_s=0.5),), keeper_timeout_s=60)
    engine = SnapshotEngine(config, {"model": torch.nn.Linear(2, 2)})
    print(engine.restore("latest"))
    engine.close(drain=False)
"""


def test_the_process_ends_all_the_same(dead):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), dead],
        capture_output=True,
        text=True,
        timeout=4 * TIMEOUT_S,  # torch is imported
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
