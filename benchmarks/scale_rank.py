"""One real rank over gloo that counts what its engine does: collectives, messages to its keeper; started by scale.py.

python benchmarks/scale_rank.py SETTINGS_JSON     (kind, rank, world, meeting, level, job_id, steps, resumes)
"""

import os
import sys
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.engine.board import Board
from lazysnap.keeper.messages import Connection

COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
    "new_group",
)
WIDTH, LAYERS = 256, 4
DEADLINE_S = 60.0


class Counts:
    """What this package called since the last ``take``; what the training itself does is not in it."""

    def __init__(self) -> None:
        self._counter: Counter[str] = Counter()
        for name in COLLECTIVES:
            setattr(dist, name, self._counted(name, getattr(dist, name)))
        send, receive = Connection.send, Connection.receive

        def counted_send(connection: Any, *args: Any, **kwargs: Any) -> None:
            self._counter["messages"] += 1
            send(connection, *args, **kwargs)

        def counted_receive(connection: Any, **kwargs: Any) -> Any:
            messages = receive(connection, **kwargs)
            self._counter["messages"] += len(messages or ())
            return messages

        Connection.send, Connection.receive = counted_send, counted_receive  # type: ignore[method-assign]
        asked = Board._asked

        def counted_asked(board: Any, what: str, ask: Any) -> Any:
            self._counter["round_trips"] += 1
            return asked(board, what, ask)

        Board._asked = counted_asked  # type: ignore[method-assign]

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").startswith("lazysnap"):
                self._counter["collectives"] += 1
            return call(*args, **kwargs)

        return counted

    def take(self) -> dict[str, int]:
        """Since the last time."""
        found = {name: self._counter[name] for name in ("collectives", "messages", "round_trips")}
        self._counter.clear()
        return found


def build(kind: str) -> torch.nn.Module:
    """The model in its wrapper."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def run(settings: dict[str, Any], answer: Any) -> None:
    """Resume, or start; train; send what was counted into the pipe ``answer``. Ends the process.

    ``settings``: kind, rank, world, meeting, level, job_id, steps.
    """
    torch.set_num_threads(1)
    counts = Counts()
    meeting = f"file://{settings['meeting']}"
    dist.init_process_group("gloo", init_method=meeting, rank=settings["rank"], world_size=settings["world"])
    torch.manual_seed(0)
    model = build(settings["kind"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    level = PersistentLevel(settings["level"], every_n_steps=1, keep_last=100)
    config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=5.0), job_id=settings["job_id"])
    said: dict[str, Any] = {"rank": settings["rank"]}
    dist.barrier()  # what is timed is no wait for one that starts later
    # Of the process: collectives run on threads of their own.
    started, cpu_started = time.perf_counter(), time.process_time()
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    said["making_s"], said["making_cpu_s"] = time.perf_counter() - started, time.process_time() - cpu_started
    said["making"] = counts.take()
    snapshot = engine.restore("latest")
    said["restore"] = counts.take()
    said["resumed"] = snapshot.step if snapshot else 0
    said["per_snapshot"] = []

    def train(step: int) -> bool:
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        started, cpu_started = time.perf_counter(), time.thread_time()
        began = engine.boundary(step)
        said.setdefault("boundary_s", time.perf_counter() - started)
        said.setdefault("boundary_cpu_s", time.thread_time() - cpu_started)
        return began

    first = said["resumed"] + 1
    train(first)
    engine.wait_ready(DEADLINE_S)  # the first boundary asks for memory
    engine.wait(until="durable", timeout_s=DEADLINE_S)
    dist.barrier()
    said["first_boundary"] = counts.take()
    for step in range(first + 1, first + 1 + settings["steps"]):
        if not train(step):
            raise RuntimeError(f"step {step} was not captured")
        if not engine.wait(step, until="durable", timeout_s=DEADLINE_S):
            raise RuntimeError(f"step {step} did not become durable")
        engine.statistics()
        said["per_snapshot"].append(counts.take())
    said["shard_bytes"] = engine.statistics().shard_bytes
    engine.close()
    said["close"] = counts.take()
    answer.send(said)
    dist.barrier()
    os._exit(0)  # gloo's own tear-down aborts or hangs now and then, with or without snapshots
