"""One rank of a training that torchrun started on some nodes, with the loop of the README. It resumes from "latest".

usage: train.py SETTINGS_JSON

``kind``: ddp, fsdp (FSDP2), hsdp; ``levels``, ``steps``, ``trace``. The trace gets a line for each step that this rank
trained: rank, step, loss, digest of the state of all ranks; and one for its start: rank, "resumed", step, level.
``durable_at`` and ``protected_at``: there it waits for its snapshot; ``protects_every``: steps from one that is due for
protection to the next; ``pause_s``: after each step;
``hold_at``: it goes no further before there is a file called as the
trace and ".go".
"""

import datetime
import json
import logging
import os
import sys
import time

import torch
import torch.distributed as dist
from support.bits import digest
from support.waiting import capture_for_all, until
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lazysnap import MemoryLevel, PersistentLevel, Redundancy, ResumableLoader, SnapshotConfig, SnapshotEngine

SAMPLES, WIDTH = 256, 16


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    world = dist.get_world_size()
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(4 * WIDTH, 3)
    )
    if kind in ("fsdp", "hsdp"):
        sizes, names = ((world,), ("shard",)) if kind == "fsdp" else ((world // 2, 2), ("replica", "shard"))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    # Unless parameters may be unused, DDP changes its buckets after the first step: no two runs would be equal.
    return DistributedDataParallel(model, find_unused_parameters=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    trace = os.open(settings["trace"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(*words: object) -> None:
        os.write(trace, (" ".join(map(str, [rank, *words])) + "\n").encode())

    def is_let_go() -> bool:
        return os.path.exists(settings["trace"] + ".go")

    model = build(settings["kind"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = ResumableLoader(DataLoader(data, batch_size=8, sampler=sampler))
    torch.manual_seed(1000 + rank)  # each rank draws its own dropout
    progress = {"epoch": 0}
    given = settings.get("config", {})
    if given.get("redundancy") == "auto":
        # The parity of "auto", at other steps.
        parity = 1 if int(os.environ["GROUP_WORLD_SIZE"]) < 4 else 2
        given["redundancy"] = Redundancy(parity=parity, every_n_steps=settings.get("protects_every", 1))
    config = SnapshotConfig(
        levels=tuple(PersistentLevel(**level) for level in settings["levels"]),
        memory=MemoryLevel(linger_s=settings.get("linger_s", 60.0)),
        collective_timeout_s=30.0,
        verify_restart=False,
        **given,
    )
    state = {"model": model, "optimizer": optimizer, "loader": loader, "progress": progress}
    with SnapshotEngine(config, state) as engine:
        snapshot = engine.restore("latest")
        write("resumed", *((snapshot.step, snapshot.level) if snapshot else (0, "nothing")))
        while engine.step < settings["steps"]:
            sampler.set_epoch(progress["epoch"])
            for (batch,) in loader:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                write(
                    engine.step + 1, loss.item().hex(), digest([*model.parameters(), optimizer.state_dict()["state"]])
                )
                engine.boundary()
                if engine.step in (settings.get("durable_at"), settings.get("protected_at")):
                    capture_for_all(engine, engine.step)
                if engine.step == settings.get("durable_at"):
                    write("durable", engine.wait(until="durable", timeout_s=60))
                if engine.step == settings.get("protected_at"):
                    write("protected", engine.wait(until="protected", timeout_s=60))
                time.sleep(settings.get("pause_s", 0.0))
                if engine.step == settings.get("hold_at"):
                    write("held")
                    until(lambda: engine.statistics() and is_let_go(), timeout_s=300)  # warnings are heard
                if engine.step == settings["steps"]:
                    break
            else:
                progress["epoch"] += 1
    write("closed")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own tear-down aborts or hangs now and then, with or without snapshots


if __name__ == "__main__":
    main()
