"""One rank: it trains and has a copy made, by lazysnap or by blocking stock code, or it loads one.

usage: stock_rank.py SETTINGS_JSON     (mode, directory, level, result, name, stock, stateful)
"""

import datetime
import json
import os
import pathlib
import signal
import sys
import threading
import time

import torch
from accelerate import Accelerator
from fillers import stopped_in
from stock_net import Prepared
from support.waiting import until

import lazysnap
from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

TIMEOUT_S = 200
DEADLINE_S = 3


def save(settings: dict) -> dict:
    prepared = Prepared(seed=1, stateful=settings.get("stateful", False))
    level = PersistentLevel(settings["level"], every_n_steps=1000)
    config = SnapshotConfig(levels=(level,), job_id=settings["level"], memory=MemoryLevel(linger_s=5))
    engine = SnapshotEngine(config, prepared.objects())
    prepared.train(3)
    assert engine._wait_ready(TIMEOUT_S)
    assert engine.boundary(3, force=True)
    engine.keep(settings["name"])
    prepared.accelerator.save_state(settings["stock"])
    bits = prepared.bits()  # training goes on: the random numbers are drawn after the capture
    prepared.train(2)
    assert engine.wait(3, timeout_s=TIMEOUT_S)
    if prepared.accelerator.is_main_process:
        lazysnap.export(settings["level"], settings["directory"], which=3, format="accelerate")
    prepared.accelerator.wait_for_everyone()
    engine.close()
    return bits


def load(settings: dict) -> dict:
    prepared = Prepared(seed=2, stateful=settings.get("stateful", False))
    prepared.progress.facts = {}
    prepared.accelerator.load_state(settings["directory"])
    return prepared.bits()


def integration(settings: dict) -> dict:
    """Save by save_state of an attached accelerator, train on, and load what was saved at once."""
    prepared = Prepared(seed=1, stateful=settings.get("stateful", False))
    accelerator = prepared.accelerator
    level = PersistentLevel(settings["level"], every_n_steps=1000)
    config = SnapshotConfig(levels=(level,), job_id=settings["level"], memory=MemoryLevel(linger_s=5))
    lazysnap.attach(accelerator, config)
    assert accelerator.engine._wait_ready(TIMEOUT_S)
    prepared.train(3)
    Accelerator.save_state(accelerator, settings["stock"])
    bits = prepared.bits(draw=False)
    accelerator.save_state(settings["directory"])
    prepared.train(2)
    found = accelerator.load_state(settings["directory"])
    loaded = prepared.bits(draw=False)
    assert accelerator.wait_for_checkpoints(TIMEOUT_S)
    accelerator.end_training()
    return {"step": found.step, "saved": bits, "loaded": loaded}


def slow(settings: dict) -> dict:
    """Wait for a checkpoint that takes longer than the deadline of the program's process group, then load it."""
    prepared = Prepared(seed=1)
    accelerator = prepared.accelerator
    config = SnapshotConfig(levels=(PersistentLevel(settings["level"], every_n_steps=1000),), job_id=settings["level"])
    lazysnap.attach(accelerator, config)
    assert accelerator.engine._wait_ready(TIMEOUT_S)
    prepared.train(3)
    os.environ["LAZYSNAP_FAULT"] = "export.whole:1:stop"  # of the process that makes the checkpoint
    accelerator.save_state(settings["directory"])
    bits = prepared.bits(draw=False)
    prepared.train(1)
    if accelerator.is_main_process:
        threading.Thread(target=_go_on_later, args=(pathlib.Path(settings["directory"]),)).start()
    torch.distributed.barrier()
    gloo = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    gloo._set_default_timeout(datetime.timedelta(seconds=DEADLINE_S))
    waited = accelerator.wait_for_checkpoints()
    gloo._set_default_timeout(datetime.timedelta(seconds=TIMEOUT_S))
    Accelerator.load_state(accelerator, settings["directory"])
    loaded = prepared.bits(draw=False)
    accelerator.end_training()
    return {"waited": waited, "saved": bits, "loaded": loaded}


def _go_on_later(directory: pathlib.Path) -> None:
    """Let the stopped process go on when the deadline of the group is long over."""
    pid = stopped_in(directory)
    stopped = time.monotonic()
    until(lambda: time.monotonic() > stopped + 2 * DEADLINE_S, timeout_s=TIMEOUT_S)
    os.kill(pid, signal.SIGCONT)


def main(settings: dict) -> None:
    result = {"save": save, "integration": integration, "load": load, "slow": slow}[settings["mode"]](settings)
    rank = int(os.environ.get("RANK", "0"))
    pathlib.Path(f"{settings['result']}.{rank}").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.executable = os.environ["LAZYSNAP_TEST_PYTHON"]
    main(json.loads(sys.argv[1]))
