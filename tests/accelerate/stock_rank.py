"""One rank: it trains and has a copy made, by lazysnap or by blocking stock code, or it loads one.

usage: stock_rank.py SETTINGS_JSON     (mode, directory, level, result, name, stock, stateful, fails)
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
from lazysnap.errors import LevelError
from lazysnap.exports.background import BackgroundCheckpoints
from lazysnap.exports.folder import begin
from lazysnap.integrations.accelerate import saving
from lazysnap.integrations.accelerate.saving import Directories, Wanted

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
    is_main = prepared.accelerator.is_main_process
    checkpoints = BackgroundCheckpoints(level, engine.release)
    if is_main:
        begin(settings["directory"])
        checkpoints.save(settings["directory"], settings["name"])
    prepared.train(2)
    if is_main:
        assert checkpoints.wait(TIMEOUT_S), settings
        assert checkpoints.close(1.0)
    prepared.accelerator.wait_for_everyone()
    engine.close()
    return bits


def load(settings: dict) -> dict:
    prepared = Prepared(seed=2, stateful=settings.get("stateful", False))
    prepared.progress.facts = {}
    prepared.accelerator.load_state(settings["directory"])
    return prepared.bits()


def door(settings: dict) -> dict:
    """Save by save_state of an attached accelerator, train on, and load what was saved at once."""
    saving.SMALL_BYTES = settings["small_bytes"]
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
    assert os.path.isdir(settings["directory"])
    prepared.train(2)
    accelerator.load_state(settings["directory"])
    loaded = prepared.bits(draw=False)
    accelerator.end_training()
    return {"saved": bits, "loaded": loaded}


def slow(settings: dict) -> dict:
    """Wait for a checkpoint that takes longer than the deadline of the program's process group, then load it."""
    saving.SMALL_BYTES = 0
    prepared = Prepared(seed=1)
    accelerator = prepared.accelerator
    config = SnapshotConfig(levels=(PersistentLevel(settings["level"], every_n_steps=1000),), job_id=settings["level"])
    lazysnap.attach(accelerator, config)
    assert accelerator.engine._wait_ready(TIMEOUT_S)
    prepared.train(3)
    os.environ["LAZYSNAP_FAULT"] = "export.folder.whole:1:stop"  # of the process that makes the checkpoint
    accelerator.save_state(settings["directory"])
    del os.environ["LAZYSNAP_FAULT"]
    bits = prepared.bits(draw=False)
    prepared.train(1)
    if accelerator.is_main_process:
        threading.Thread(target=_go_on_later, args=(pathlib.Path(settings["directory"]),)).start()
    torch.distributed.barrier()
    gloo = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    gloo._set_default_timeout(datetime.timedelta(seconds=DEADLINE_S))
    waited = accelerator.wait_for_checkpoints()
    gloo._set_default_timeout(datetime.timedelta(seconds=TIMEOUT_S))
    accelerator.load_state(settings["directory"])
    loaded = prepared.bits(draw=False)
    accelerator.end_training()
    return {"waited": waited, "saved": bits, "loaded": loaded}


def _go_on_later(directory: pathlib.Path) -> None:
    """Let the stopped process go on when the deadline of the group is long over."""
    pid = stopped_in(directory)
    stopped = time.monotonic()
    until(lambda: time.monotonic() > stopped + 2 * DEADLINE_S, timeout_s=TIMEOUT_S)
    os.kill(pid, signal.SIGCONT)


def block(settings: dict) -> dict:
    """Save with blocking stock code; on the rank ``fails`` the second time it fails."""
    prepared = Prepared(seed=1)
    accelerator = prepared.accelerator
    prepared.train(1)
    Directories(accelerator, None).save_at_once(settings["directory"], Wanted(None, accelerator.save_state))
    bits = prepared.bits()
    prepared.train(1)

    def fail(directory: str) -> None:
        accelerator.save_state(directory)
        if accelerator.process_index == settings["fails"]:
            raise OSError(28, "No space left on device")

    try:
        Directories(accelerator, None).save_at_once(settings["directory"], Wanted(None, fail))
    except (OSError, LevelError) as error:
        bits["error"] = str(error)
    return bits


def main(settings: dict) -> None:
    result = {"save": save, "door": door, "load": load, "block": block, "slow": slow}[settings["mode"]](settings)
    rank = int(os.environ.get("RANK", "0"))
    pathlib.Path(f"{settings['result']}.{rank}").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.executable = os.environ["LAZYSNAP_TEST_PYTHON"]
    main(json.loads(sys.argv[1]))
