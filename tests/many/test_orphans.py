"""A start beside workers whose launcher was killed: they train on, and the start names them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from support.programs import ENVIRONMENT, TWO_RANKS, output_of

PROGRAM = """
import os, sys, time, torch
import torch.distributed as dist
from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = SnapshotConfig(levels=(PersistentLevel(sys.argv[1]),), memory=MemoryLevel(linger_s=1))
engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
engine.restore("latest")
while True:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.boundary()
    os.write(1, b"process %d trains\\n" % os.getpid())
    time.sleep(0.01)
"""
LONGEST_TRACEBACK = 8
"""Lines of a rank that is refused, its message in them: nothing of what lazysnap does within ``restore``."""


def orphans_of(launcher):
    """Kill the launcher once both workers train; their processes."""
    workers = set()
    for line in launcher.stdout:
        trains = re.match(r"process (\d+) trains", line)
        if trains is not None:
            workers.add(int(trains[1]))
        if len(workers) == 2:
            break
    launcher.kill()
    launcher.wait()
    return sorted(workers)


def named_in(line):
    """Processes that a message advises to kill. It names them by rank, and ranks are forked in any order."""
    advice = re.search(r"`kill ([\d ]+)`", line)
    if advice is None:
        return []
    return sorted(int(pid) for pid in advice[1].split())


def test_a_start_beside_orphans_of_a_killed_launcher_names_them_and_each_rank_ends_with_a_short_message(
    forking_python, tmp_path
):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    arguments = [str(program), str(tmp_path / "run")]
    torchrun = [str(Path(sys.executable).with_name("torchrun")), *TWO_RANKS[2:], "--no-python"]
    launcher = subprocess.Popen(
        [forking_python, *torchrun, forking_python, *arguments],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    workers = orphans_of(launcher)
    try:
        text = output_of(*TWO_RANKS, *arguments, code=1)
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.stdout.close()

    waits = [line for line in text.splitlines() if "waiting" in line]
    refused = [line for line in text.splitlines() if "JobBusy: " in line]
    assert [named_in(line) for line in waits] == [workers], text
    assert text.index(waits[0]) < text.index(refused[0])
    assert sorted(named_in(line) for line in refused) == [[], workers], text
    for rank in (0, 1):
        assert 0 < text.count(f"[rank{rank}]:") <= LONGEST_TRACEBACK
    assert "During handling" not in text
    assert "direct cause" not in text
