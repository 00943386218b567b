"""One rank of a small DDP training that rolls back: ``rollback_rank.py SETTINGS_JSON``.

Settings: rank, world, meeting, root, journal; ``bad``: by batch, the rank whose loss is NaN there; ``never``:
batches that are not there; ``back``: after the last step the ranks go back so many steps; ``kind``: ddp or fsdp;
``nodes``: by rank; with them a step counts once it is protected.
"""

import datetime
import json
import os
import random
import socket
import sys

import torch
import torch.distributed as dist
from support.bits import digest
from support.waiting import TIMEOUT_S, capture_for_all
from support.watching import Watch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lazysnap import MemoryLevel, PersistentLevel, Redundancy, SnapshotConfig, SnapshotEngine


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank, world = settings["rank"], settings["world"]
    if "nodes" in settings:
        socket.gethostname = lambda: settings["nodes"][rank]
    journal = os.open(settings["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(*words: object) -> None:
        os.write(journal, (" ".join(map(str, [rank, *words])) + "\n").encode())

    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings['meeting']}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=30),
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 48), torch.nn.Dropout(0.3), torch.nn.Linear(48, 12))
    if settings["kind"] == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    levels = (PersistentLevel(settings["root"] + "/level", every_n_steps=1),) if settings.get("storage") else ()
    config = SnapshotConfig(levels=levels, memory=MemoryLevel(linger_s=30.0), redundancy=Redundancy(every_n_steps=1))
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    snapshot = engine.restore("latest")
    step = snapshot.step if snapshot else 0
    write("resumed", step, digest([list(model.parameters()), list(optimizer.state.values())]))
    if settings.get("look"):
        engine.abandon()
        os._exit(0)
    assert engine._wait_ready(timeout_s=TIMEOUT_S)
    watch = Watch(engine)
    for number in range(step, settings["batches"]):
        if number in settings["never"]:
            continue
        generator = torch.Generator().manual_seed(10 * number + rank)
        batch = torch.randn(8, 12, generator=generator)
        if settings["bad"].get(str(number)) == rank:
            batch *= float("nan")
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if watch.see(loss):
            step = watch.last.step
            write("back", step, watch.last.level)
            continue
        step += 1
        engine.boundary(step)
        engine.gate()
        write("trained", step, digest([list(model.parameters()), list(optimizer.state.values())]))
    if "nodes" in settings:
        capture_for_all(engine, step)
        write("protected", step, engine.wait(step, until="protected", timeout_s=TIMEOUT_S))
    if settings.get("back"):
        step = engine.rollback(steps=settings["back"]).step
        write("back", step, digest([list(model.parameters()), list(optimizer.state.values())]))
        if "nodes" in settings:
            write("protected", step, engine.wait(step, until="protected", timeout_s=TIMEOUT_S))
        engine.abandon()
        sys.stdout.flush()
        os._exit(9)
    write(
        "ended",
        step,
        digest([list(model.parameters()), list(optimizer.state.values())]),
        torch.rand(()).item(),
        random.random(),
    )
    write("closed", engine.close())
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
