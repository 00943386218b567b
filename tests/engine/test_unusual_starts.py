"""Programs that are started in an unusual way: without standard descriptors, or with a path that is not UTF-8."""

import os
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
