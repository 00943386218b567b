"""A training of one of the cases, as a process that is killed: ``odd_trainer.py CASE DIRECTORY STEPS RESULT [DEATH]``.

DEATH is ``trainer:STEP``: SIGKILL behind the boundary of that step; or ``both:STEP``: when that step is durable, first
the keeper, then the trainer. Without a directory (``-``) there is no engine: how it would have gone.
"""

import hashlib
import json
import os
import random
import select
import signal
import sys
import time
import warnings

import torch
from odd_cases import CASES
from support.waiting import TIMEOUT_S, stop

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk


def tensor_bytes(tensor):
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def facts(state):
    """A checksum of every tensor, by name, and the small state as text."""
    walked = walk(ObjectState(state).collect())
    found = {}
    for name, tensor in zip(walked.names, walked.tensors, strict=True):
        kind = f"{tensor.dtype} {list(tensor.shape)}"
        found[name.replace("_orig_mod.", "")] = f"{kind} {hashlib.sha256(tensor_bytes(tensor)).hexdigest()[:16]}"
    return found, walked.text.replace("_orig_mod.", "")


def die(engine, step, death):
    kind, at = death.split(":")
    if step != int(at):
        return
    engine.gate()
    if kind == "both":
        assert engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
        keeper = engine._client.keeper_pid
        gone, trainer = os.pidfd_open(keeper), os.getpid()
        if os.fork():
            signal.pause()
        # The trainer is stopped meanwhile: it would start another keeper, which has the memory.
        stop(trainer)
        os.kill(keeper, signal.SIGKILL)
        select.select([gone], [], [], TIMEOUT_S)
        os.kill(trainer, signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    name, directory, steps, result, *death = sys.argv[1:]
    warnings.simplefilter("ignore")
    # A restart begins with other values: what is not restored shows.
    seed = 1 if os.environ.get("RESTARTED") else 0
    torch.manual_seed(seed)
    random.seed(seed)
    case = CASES[name]()
    resumed, engine = [0, "nothing"], None
    if directory == "-":
        case.prepare(0)
    else:
        levels = (PersistentLevel(directory, every_n_steps=1, keep_last=2),)
        config = SnapshotConfig(levels=levels, memory=MemoryLevel(linger_s=60))
        engine = SnapshotEngine(config, case.state)
        case.prepare(int(os.environ.get("RESTARTED") or 0))
        snapshot = engine.restore("latest")
        resumed = [snapshot.step, snapshot.level] if snapshot else resumed
        print("resumed", *resumed, flush=True)
        assert engine._wait_ready(TIMEOUT_S)
    for step in range(resumed[0] + 1, int(steps) + 1):
        case.step(step)
        if engine is not None:
            deadline = time.monotonic() + TIMEOUT_S
            while not engine.boundary(step):
                assert engine._wait_ready(TIMEOUT_S)
                assert time.monotonic() < deadline, engine.statistics().skipped
            if death:
                die(engine, step, death[0])
    found, text = facts(case.state)
    statistics = engine.statistics() if engine is not None else None
    if engine is not None:
        assert engine.close()
    with open(result, "w") as file:
        json.dump(
            {
                "facts": found,
                "text": text,
                "resumed": resumed,
                "is_right": bool(case.is_right()),
                "problems": [] if statistics is None else [statistics.torn, statistics.failed, statistics.skipped],
            },
            file,
        )


if __name__ == "__main__":
    main()
