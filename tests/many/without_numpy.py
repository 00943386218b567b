"""Two ranks of a training in a Python without numpy; both are forked from this process, after torch was imported.

usage: python -c WITHOUT_NUMPY without_numpy.py DIRECTORY

Prints the step that each rank resumed from, and what its own mistake raised.
"""

import os
import pathlib
import sys

import torch
import torch.distributed as dist

from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine
from lazysnap.errors import WaitTimeout
from lazysnap.ranks.world import World


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(directory: pathlib.Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory / 'meeting'}", rank=rank, world_size=2)
    config = SnapshotConfig(job_id=str(directory), memory=MemoryLevel(linger_s=20))
    model = torch.nn.Linear(4, 2, bias=False)
    weight = model.weight.detach()
    for start in range(2):
        engine = SnapshotEngine(config, {"model": model})
        snapshot = engine.restore("latest")
        if start:
            say(rank, "resumed", None if snapshot is None else snapshot.step, int(weight.sum()))
            engine.close(drain=False)
        else:
            weight.fill_(1)
            assert engine.boundary(1)
            engine.gate()
            dist.barrier()
            engine.abandon()
            weight.zero_()
    try:
        World(20.0).exchange("talking", object())
    except (TypeError, WaitTimeout) as error:
        say(rank, "mistake", type(error).__name__)
    dist.destroy_process_group()


if __name__ == "__main__":
    place, child = pathlib.Path(sys.argv[2]), os.fork()
    train(place, int(child == 0))
    if child:
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
