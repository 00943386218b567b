"""A training in a control group: ``limited_training.py DIRECTORY WIDTH STEPS [KILL]``. One rank, or those of torchrun.

Prints what it resumed from, where its slots lie, and a digest of its weights at the end; or that it kills itself, at
the step KILL.
"""

import hashlib
import logging
import os
import signal
import sys

import torch

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine


def where(engine):
    if engine.statistics().unprotected is not None:
        return "refused"
    return "files" if all(slot.is_file for slot in engine._client.slots()) else "memory"


def main(directory, width, steps, kill=0):
    logging.basicConfig(level=logging.WARNING)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    torch.ones(int(os.environ.get("LOADED", "0")), dtype=torch.uint8)  # as a checkpoint is loaded, and is gone then
    model = torch.nn.Linear(width, width, bias=False)
    # Of RMSprop it is not known how much state it makes: other slots are asked for behind the first step.
    kind = torch.optim.RMSprop if "LOADED" in os.environ else torch.optim.AdamW
    optimizer = kind(model.parameters(), foreach=False)
    if torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    level = PersistentLevel(directory, every_n_steps=1000)
    memory = MemoryLevel(linger_s=120)
    # The newest capture is resumed, not the one before it: where that was held is what the tests look at.
    config = SnapshotConfig(levels=(level,), memory=memory, io_timeout_s=60, verify_restart=False)
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    snapshot = engine.restore("latest")
    print("fresh" if snapshot is None else f"{snapshot.level}:{snapshot.step}", flush=True)
    with engine:
        while engine.step < steps:
            model(torch.randn(2, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.boundary()
            if engine.step == kill:
                assert engine.wait(until="captured", timeout_s=60)
                print(where(engine), "killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        print(where(engine), flush=True)
    weights = b"".join(tensor.detach().numpy().tobytes() for tensor in model.parameters())
    print(hashlib.sha256(weights).hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
