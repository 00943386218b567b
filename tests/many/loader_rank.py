"""One rank of a plain loop over ``DistributedSampler`` that stops at a step; started as a process.

usage: loader_rank.py SETTINGS_JSON     (rank, world, meeting, directory, samples, batch, stop, trace)

``trace`` gets one line: the samples of each epoch that this start trained.
"""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from lazysnap import PersistentLevel, ResumableLoader, SnapshotConfig, SnapshotEngine


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank, world, stop = settings["rank"], settings["world"], settings["stop"]
    dist.init_process_group("gloo", init_method=f"file://{settings['meeting']}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.arange(float(settings["samples"])).unsqueeze(1)
    sampler = DistributedSampler(data, world, rank, shuffle=True)
    loader = ResumableLoader(DataLoader(data, batch_size=settings["batch"], sampler=sampler))
    progress = {"epoch": 0}
    config = SnapshotConfig(levels=(PersistentLevel(settings["directory"], every_n_steps=1),), verify_restart=False)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "progress": progress}
    trained = {}
    with SnapshotEngine(config, state) as engine:
        engine.restore("latest")
        while engine.step < stop:
            sampler.set_epoch(progress["epoch"])
            for batch in loader:
                model(batch / settings["samples"]).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                trained.setdefault(progress["epoch"], []).extend(int(number) for number in batch)
                engine.boundary()
                if engine.step >= stop:
                    break
            else:
                progress["epoch"] += 1
    pathlib.Path(settings["trace"]).write_text(json.dumps(trained))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
