"""A training that runs in a control group: ``limited_training.py DIRECTORY WIDTH STEPS``. One rank, or torchrun's."""

import logging
import os
import sys

import torch

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine


def main(directory, width, steps):
    logging.basicConfig(level=logging.WARNING)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    config = SnapshotConfig(
        levels=(PersistentLevel(directory, every_n_steps=steps),), memory=MemoryLevel(linger_s=1), keeper_timeout_s=60
    )
    with SnapshotEngine(config, {"model": model, "optimizer": optimizer}) as engine:
        for _ in range(steps):
            model(torch.randn(2, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.boundary()
        print("protected" if engine.statistics().unprotected is None else "refused", flush=True)
    print("ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
