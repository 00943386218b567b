"""One rank: it trains and has a copy made, by lazysnap or by blocking stock code, or it loads one.

usage: stock_rank.py SETTINGS_JSON     (mode, directory, level, result, name, stock, stateful, fails)
"""

import json
import os
import pathlib
import sys

import torch
from accelerate import Accelerator
from stock_net import Prepared

import lazysnap
from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.errors import LevelUnavailable
from lazysnap.export.copies import Copy, NamedCopies
from lazysnap.integrations.accelerate.blocking import save_blocking

TIMEOUT_S = 200


def save(settings: dict) -> dict:
    prepared = Prepared(seed=1, stateful=settings.get("stateful", False))
    level = PersistentLevel(settings["level"], every_n_steps=1000)
    config = SnapshotConfig(levels=(level,), job_id=settings["level"], memory=MemoryLevel(linger_s=5))
    engine = SnapshotEngine(config, prepared.objects())
    prepared.train(3)
    assert engine.wait_ready(TIMEOUT_S)
    assert engine.boundary(3, force=True)
    engine.keep(settings["name"])
    prepared.accelerator.save_state(settings["stock"])
    bits = prepared.bits()  # training goes on: the random numbers are drawn after the capture
    is_main = prepared.accelerator.is_main_process
    copies = NamedCopies(level, engine.release)
    if is_main:
        copies.save(Copy(directory=settings["directory"], name=settings["name"]))
    prepared.train(2)
    if is_main:
        assert copies.wait(TIMEOUT_S), settings
        assert copies.close(1.0)
    prepared.accelerator.wait_for_everyone()
    engine.close()
    return bits


def load(settings: dict) -> dict:
    prepared = Prepared(seed=2, stateful=settings.get("stateful", False))
    prepared.progress.facts = {}
    prepared.accelerator.load_state(settings["directory"])
    return prepared.bits()


def late(settings: dict) -> dict:
    """Save a step that was captured before, when much has changed since: once by stock, once by lazysnap."""
    prepared = Prepared(seed=1, stateful=settings["stateful"])
    accelerator = prepared.accelerator
    level = PersistentLevel(settings["level"], every_n_steps=1000)
    config = SnapshotConfig(levels=(level,), job_id=settings["level"], memory=MemoryLevel(linger_s=5))
    lazysnap.attach(accelerator, config)
    assert accelerator.engine.wait_ready(TIMEOUT_S)
    prepared.train(3)
    assert accelerator.save_state() == 3
    assert accelerator.engine.wait(3, until="captured", timeout_s=TIMEOUT_S)  # what moves no version would be copied
    prepared.schedule.step()
    prepared.progress.facts["best"] = 0.25
    prepared.mix(7)
    accelerator.step += 5
    if settings["changed"] == "weights":
        prepared.model.get_parameter("embedding.weight").data.mul_(2)  # moves no version
    elif settings["changed"] == "optimizer":
        next(iter(prepared.optimizer.state.values()))["exp_avg"].mul_(2)
    Accelerator.save_state(accelerator, settings["stock"])
    accelerator.save_state(settings["directory"])
    bits = prepared.bits()
    prepared.train(2)
    accelerator.end_training()
    return bits


def block(settings: dict) -> dict:
    """Save with blocking stock code; on the rank ``fails`` the second time it fails."""
    prepared = Prepared(seed=1)
    accelerator = prepared.accelerator
    prepared.train(1)
    save_blocking(accelerator, settings["directory"], accelerator.save_state)
    bits = prepared.bits()
    prepared.train(1)

    def fail(directory: str) -> None:
        accelerator.save_state(directory)
        if accelerator.process_index == settings["fails"]:
            raise OSError(28, "No space left on device")

    try:
        save_blocking(accelerator, settings["directory"], fail)
    except (OSError, LevelUnavailable) as error:
        bits["error"] = str(error)
    return bits


def main(settings: dict) -> None:
    torch.set_num_threads(1)
    result = {"save": save, "late": late, "load": load, "block": block}[settings["mode"]](settings)
    rank = int(os.environ.get("RANK", "0"))
    pathlib.Path(f"{settings['result']}.{rank}").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
