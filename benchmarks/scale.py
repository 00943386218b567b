"""Count what lazysnap costs with several real ranks: collectives, messages, files, bytes, planning."""

import argparse
import functools
import itertools
import math
import operator
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from benchmarks.workers import DEADLINE_S, Line, call, call_each_rank, columns

KINDS = ("ddp", "fsdp")
STEPS = 3
"""Snapshots of each real training after the first."""
STATE_MB = 3.2
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "new_group")
SOCKET_CALLS = ("send", "sendall", "sendmsg", "recv", "recv_into", "recvmsg")
STORE_CALLS = ("add", "get", "set", "check", "wait", "compare_set", "delete_key", "multi_get", "multi_set")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--counted", type=int, nargs="*", default=[2, 4, 8], help="numbers of real ranks")


def run(args: argparse.Namespace, report: Report) -> None:
    for ranks, kind in itertools.product(args.counted, KINDS):
        work = functools.partial(call, "scale.count", {"kind": kind, "ranks": ranks}, OMP_NUM_THREADS="1")
        report.take(f"scale.count {kind} {ranks}", work)
    collectives = [line["collectives_per_snapshot"] for line in report.of("counted")]
    report.target("collectives per snapshot", "<= {}", 0, max(collectives, default=math.nan))


# ------------------------------------------------------------------------------------------------ counted, in a worker


def count(job: Line) -> Iterator[Line]:
    """A worker: two starts of a training; the second resumes from storage."""
    kind = job["kind"]
    ranks = job["ranks"]
    first = columns(call_each_rank("scale.rank", {**job, "steps": STEPS}, ranks))
    files = _files_of(Path(job["url"]))
    second = columns(call_each_rank("scale.rank", {**job, "steps": 1}, ranks))
    resumed = set(second["resumed"])
    if resumed != {1 + STEPS}:
        raise RuntimeError(f"{kind}, {ranks} ranks: resumed {resumed}, expected {1 + STEPS}")
    snapshots = columns(list(itertools.chain(*first["per_snapshot"])))
    making = columns(first["engine"])
    first_boundary = columns(first["boundary"])
    planning = columns(first["planning"])
    yield {
        "measure": "counted",
        "kind": kind,
        "ranks": ranks,
        "collectives_planning": max(map(operator.add, making["collectives"], first_boundary["collectives"])),
        "collectives_per_snapshot": max(snapshots["collectives"]),
        "collectives_restart": max(columns(second["restore"])["collectives"]),
        "collectives_close": max(columns(first["close"])["collectives"]),
        "messages_per_snapshot_and_rank": statistics.fmean(snapshots["messages"]),
        "round_trips_per_snapshot_and_rank": statistics.fmean(snapshots["round_trips"]),
        **files,
        "mb_per_rank": [size_bytes / 1e6 for size_bytes in first["shard_bytes"]],
        **{name: max(values) for name, values in planning.items()},
    }


def _files_of(level: Path) -> Line:
    """What one start stored."""
    num_files = sum(path.is_file() for path in level.rglob("*/*"))
    shard_bytes = [path.stat().st_size for path in level.rglob("*.safetensors")]
    manifest_bytes = [path.stat().st_size for path in level.rglob("*.json")]
    num_snapshots = len({path.parent for path in level.rglob("*.json")})
    return {
        "files_per_snapshot": num_files / num_snapshots,
        "mb_per_snapshot": sum(shard_bytes) / num_snapshots / 1e6,
        "manifest_kb": statistics.fmean(manifest_bytes) / 1e3,
    }


class Counts:
    """Calls since the last ``take``: collectives of this package, its sockets (to the keeper), the group's store."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._counter: Counter[str] = Counter()
        self._watch("collectives", dist, COLLECTIVES)
        self._watch("messages", socket.socket, SOCKET_CALLS)
        self._watch("round_trips", dist.Store, STORE_CALLS)

    def _watch(self, kind: str, owner: Any, names: tuple[str, ...]) -> None:
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, self._counted(kind, getattr(owner, name)))

    def _counted(self, kind: str, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)  # what raises moved nothing
            caller = sys._getframe(1).f_globals.get("__name__", "")
            self._counter[kind] += kind != "collectives" or caller.startswith("lazysnap")
            return result

        return counted

    def take(self) -> dict[str, int]:
        counts = {name: self._counter[name] for name in ("collectives", "messages", "round_trips")}
        self._counter.clear()
        return counts


def rank(job: Line) -> Iterator[Line]:
    """A worker: resumes, or starts; trains; tells what was counted."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import lazysnap.engine  # noqa: F401  no part of planning
    from benchmarks.training import engine_of, layers, ready

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = layers(STATE_MB)
    width = model[0].in_features
    if job["kind"] == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        for module in (*model, model):
            fully_shard(module)
    counts = Counts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    planning: Line = {}

    def clocked(name: str, cpu_s: Any, work: Any) -> Any:
        """The first time of each; ``cpu_s``: the clock of its processor time."""
        started = time.perf_counter()
        cpu_started = cpu_s()
        result = work()
        planning.setdefault(f"{name}_cpu_ms", 1e3 * (cpu_s() - cpu_started))
        planning.setdefault(f"{name}_ms", 1e3 * (time.perf_counter() - started))
        return result

    job = {**job, "job_id": job["directory"]}
    state = {"model": model, "optimizer": optimizer}
    dist.barrier()  # what is timed is no wait for one that starts later
    # Of the process: collectives run on threads of their own.
    engine = clocked("engine", time.process_time, functools.partial(engine_of, job, state, keep_last=100))
    answer: Line = {"planning": planning, "per_snapshot": [], "engine": counts.take()}
    engine.restore("latest")
    answer["restore"] = counts.take()
    answer["resumed"] = engine.step

    def train(step: int) -> bool:
        model(torch.ones(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return clocked("first_boundary", time.thread_time, functools.partial(engine.boundary, step))

    first = answer["resumed"] + 1
    train(first)
    ready(engine)  # the first boundary asks for memory
    engine.wait(until="durable", timeout_s=DEADLINE_S)
    dist.barrier()
    answer["boundary"] = counts.take()
    for step in range(first + 1, first + 1 + job["steps"]):
        if not train(step) or not engine.wait(step, until="durable", timeout_s=DEADLINE_S):
            raise RuntimeError(f"step {step} did not become durable: {engine.statistics()}")
        answer["per_snapshot"].append(counts.take())
    answer["shard_bytes"] = engine.statistics().shard_bytes
    engine.close()
    yield {**answer, "close": counts.take()}
    dist.barrier()
    os._exit(0)  # gloo's own tear-down aborts or hangs now and then, with or without snapshots
