"""The last line after preemption names the level that has the step, not the first one."""

import signal
import subprocess
import sys

from support.listing import files_below
from support.waiting import until

PROGRAM = """
import sys
import torch
from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
levels = tuple(PersistentLevel(url, every_n_steps=1) for url in sys.argv[1:])
config = SnapshotConfig(levels=levels, preemption_timeout_s=4)
engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
engine.restore("latest")
with engine:
    while True:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        engine.boundary()
"""


def test_where_the_first_level_fails_the_line_names_the_one_that_has_the_step(tmp_path):
    broken, works = tmp_path / "broken", tmp_path / "works"
    broken.write_text("a file where the level's directory would be")
    command = [sys.executable, "-c", PROGRAM, str(broken), str(works)]
    with subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True) as run:
        until(lambda: works.exists() and files_below(works, "*.json"))
        run.send_signal(signal.SIGTERM)
        text = run.stdout.read()

    assert run.returncode == 143, text
    assert f"is durable at {works}" in text
    assert f"is durable at {broken}" not in text
    assert "NOT DURABLE" not in text
