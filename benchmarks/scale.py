"""What does lazysnap cost with many ranks? Counted with real ones, then simulated up to 16,384."""

import argparse
import math
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.frame import Line, Report, Targets, call, table

KINDS = ("ddp", "fsdp")
MOST = 16_384
DEADLINE_S = 240.0
WIDTH, LAYERS = 256, 4
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "new_group")
SOCKET_CALLS = ("send", "sendall", "sendmsg", "recv", "recv_into", "recvmsg")
STORE_CALLS = ("add", "get", "set", "check", "wait", "compare_set", "delete_key", "multi_get", "multi_set")
COUNTS = ("collectives", "messages", "round_trips")
KEYS = ("measure", "kind", "ranks", "now")
_CPU = ("making_cpu_s", "boundary_cpu_s", "making_s", "boundary_s")
_SHOWN = {
    "plan": ("cpu_s", "told_bytes", "manifest_bytes"),
    "restart": ("cpu_s", "told_bytes", "lists", "survey_reads", "shards_opened"),
    "retention": ("cpu_s", "operations"),
    "coordinator": ("cpu_s", "messages", "bytes"),
}
COMPARED = (
    "collectives", "messages_per_snapshot_and_rank", "round_trips_per_snapshot_and_rank", "files_per_snapshot",
    "bytes_per_snapshot", "manifest_bytes", *_CPU, *dict.fromkeys(sum(_SHOWN.values(), ())),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--counted", type=int, nargs="*", default=[2, 4, 8], help="numbers of real ranks")
    parser.add_argument("--steps", type=int, default=3, help="snapshots of each real training after the first")
    parser.add_argument("--simulated", type=int, nargs="*", default=[8, 64, 512, 4096, MOST], help="numbers of ranks")


def run(args: argparse.Namespace, report: Report) -> None:
    works: list[tuple[str, Line]] = [
        ("scale.count", {"kind": kind, "ranks": ranks, "steps": args.steps}) for ranks in args.counted for kind in KINDS
    ]
    works += [("simulated.run", {"ranks": ranks}) for ranks in args.simulated]
    with tempfile.TemporaryDirectory(prefix="lazysnap-bytecode-") as bytecode:
        # Keepers are started by the dozen: compiled once, wherever the environment says that nothing is to be written.
        more = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
        for function, settings in works:
            report.progress(f"{function} {settings} ...")
            try:
                for line in call(function, settings, args.timeout_s, **more):
                    report.note(line)
            except (RuntimeError, TimeoutError) as error:
                report.left_out(error, function=function, **settings)
    report.show(*tables(report), targets(report).table())


def tables(report: Report) -> list[str]:
    lines = list(report.of("counted"))
    names = ("messages_per_snapshot_and_rank", "round_trips_per_snapshot_and_rank", "files_per_snapshot")
    rows: list[list[Any]] = []
    for line in lines:
        sizes = (line["shard_bytes"], line["bytes_per_snapshot"], line["manifest_bytes"])
        each = [[one / 1e3 for one in size] if isinstance(size, list) else size / 1e3 for size in sizes]
        rows.append(
            [line["kind"], line["ranks"], *line["collectives"].values(), *(line[name] for name in names), *each]
        )
    columns = (
        "", "ranks", "collectives: planning", "per snapshot", "restart", "close", "messages per snapshot and rank",
        "round trips to the store", "files per snapshot", "kB per rank", "kB per snapshot", "manifest kB",
    )  # fmt: skip
    planning = [(line["kind"], line["ranks"], *(1e3 * line[name] for name in _CPU)) for line in lines]
    made = [
        table("Counted, real ranks over gloo", columns, rows),
        table(
            "Planning, ms of the slowest rank",
            ("", "ranks", "engine CPU", "first boundary CPU", "engine", "first boundary"),
            planning,
        ),
    ]
    for measure, names in _SHOWN.items():
        found: list[list[Any]] = []
        before: dict[str, Line] = {}
        for line in report.of(measure):
            now = "" if "now" not in line else " same world" if line["now"] == line["ranks"] else " half of them now"
            label = f"{line.get('kind', '')}{now}"
            found.append([label, line["ranks"], *(grown(line, before.get(label), name) for name in names)])
            before[label] = line
        # In brackets the exponent of growth since the line above.
        made.append(table(f"One process of N: {measure}", ("", "ranks", *names), found))
    return made


def grown(line: Line, before: Line | None, name: str) -> Any:
    if before is None or not before[name] or not line[name]:
        return line[name]
    return f"{line[name]:,.3g} (^{math.log(line[name] / before[name]) / math.log(line['ranks'] / before['ranks']):.1f})"


def targets(report: Report) -> Targets:
    made = Targets()
    for measure in ("plan", "restart"):
        seconds = [line["cpu_s"] for line in report.of(measure) if line["ranks"] >= MOST]
        made.check(f"{measure} at {MOST:,} ranks, CPU of one process", "<= {} s", 10, max(seconds, default=math.nan))
    collectives = [line["collectives"]["per_snapshot"] for line in report.of("counted")]
    made.check("collectives per snapshot", "<= {}", 0, max(collectives, default=math.nan))
    asked = [line["operations"] for line in report.of("retention")] or [math.nan]
    made.check("retention per snapshot and rank, most ranks against fewest", "<= {} times", 1, asked[-1] / asked[0])
    return made


# ------------------------------------------------------------------------------------------------ counted, in a worker


def count(settings: Line) -> Iterator[Line]:
    """A worker: two starts of a training; the second resumes from storage."""
    kind, ranks = settings["kind"], settings["ranks"]
    with tempfile.TemporaryDirectory(prefix="lazysnap-scale-") as directory:
        first = _start_all(settings, directory, 0)
        level = Path(directory, "level")
        shards, manifests = sorted(level.rglob("*.safetensors")), sorted(level.rglob("*.json"))
        snapshots = len({path.parent for path in manifests})
        found: Line = {
            "files_per_snapshot": sum(path.is_file() for path in level.rglob("*")) / snapshots,
            "bytes_per_snapshot": sum(path.stat().st_size for path in shards) / snapshots,
            "manifest_bytes": statistics.fmean(path.stat().st_size for path in manifests),
        }
        second = _start_all({**settings, "steps": 1}, directory, 1)
    resumed = {one["resumed"] for one in second}
    if resumed != {1 + settings["steps"]}:
        raise RuntimeError(f"{kind}, {ranks} ranks: resumed {resumed}, expected {1 + settings['steps']}")
    each = [one for rank in first for one in rank["per_snapshot"]]
    found["collectives"] = {
        "planning": max(one["making"]["collectives"] + one["first_boundary"]["collectives"] for one in first),
        "per_snapshot": max(one["collectives"] for one in each),
        "restart": max(one["restore"]["collectives"] for one in second),
        "close": max(one["close"]["collectives"] for one in first),
    }
    for name in ("messages", "round_trips"):
        found[f"{name}_per_snapshot_and_rank"] = statistics.fmean(one[name] for one in each)
    found |= {name: max(one[name] for one in first) for name in _CPU}
    facts = {"measure": "counted", "kind": kind, "ranks": ranks}
    yield {**facts, **found, "shard_bytes": [one["shard_bytes"] for one in first]}


def _start_all(settings: Line, directory: str, number: int) -> list[Line]:
    """One start of all ranks; what each said, in the order of the ranks."""
    import torch.distributed.fsdp  # noqa: F401  once, before the fork

    # Forked: each would import torch again otherwise. Nothing was computed here so far, no thread of torch's runs.
    forks = multiprocessing.get_context("fork")
    pipes = [forks.Pipe(duplex=False) for _ in range(settings["ranks"])]
    job = {**settings, "directory": directory, "start": number}
    ranks = [forks.Process(target=_rank, args=({**job, "rank": r}, answer)) for r, (_, answer) in enumerate(pipes)]
    for rank in ranks:
        rank.start()
    try:
        deadline, said = time.monotonic() + DEADLINE_S, []
        for rank, (question, _) in enumerate(pipes):
            if not question.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"rank {rank} of {settings['ranks']} said nothing within {DEADLINE_S:g} s")
            said.append(question.recv())
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
    return said


class Counts:
    """Calls since the last ``take``: collectives of this package, its sockets (to the keeper), the group's store."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._counter: Counter[str] = Counter()
        for name in COLLECTIVES:
            setattr(dist, name, self._counted("collectives", getattr(dist, name), of_package=True))
        for name in SOCKET_CALLS:
            setattr(socket.socket, name, self._counted("messages", getattr(socket.socket, name)))
        for name in filter(lambda name: hasattr(dist.Store, name), STORE_CALLS):
            setattr(dist.Store, name, self._counted("round_trips", getattr(dist.Store, name)))

    def _counted(self, what: str, call: Any, *, of_package: bool = False) -> Any:
        import sys

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)  # what raises moved nothing
            caller = sys._getframe(1).f_globals.get("__name__", "")
            self._counter[what] += not of_package or caller.startswith("lazysnap")
            return result

        return counted

    def take(self) -> dict[str, int]:
        found = {name: self._counter[name] for name in COUNTS}
        self._counter.clear()
        return found


def _rank(job: Line, answer: Any) -> None:
    """Resume, or start; train; send what was counted into the pipe ``answer``. Ends the process."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from benchmarks.training import ready
    from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

    torch.set_num_threads(1)
    meeting = f"file://{job['directory']}/meeting{job['start']}"
    dist.init_process_group("gloo", init_method=meeting, rank=job["rank"], world_size=job["ranks"])
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if job["kind"] == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    counts = Counts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    level = PersistentLevel(f"{job['directory']}/level", every_n_steps=1, keep_last=100)
    config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=5.0), job_id=job["directory"])
    said: Line = {"per_snapshot": []}
    dist.barrier()  # what is timed is no wait for one that starts later
    # Of the process: collectives run on threads of their own.
    started, cpu_started = time.perf_counter(), time.process_time()
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    said["making_s"], said["making_cpu_s"] = time.perf_counter() - started, time.process_time() - cpu_started
    said["making"] = counts.take()
    snapshot = engine.restore("latest")
    said["restore"], said["resumed"] = counts.take(), snapshot.step if snapshot else 0

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
    ready(engine)  # the first boundary asks for memory
    engine.wait(until="durable", timeout_s=DEADLINE_S)
    dist.barrier()
    said["first_boundary"] = counts.take()
    for step in range(first + 1, first + 1 + job["steps"]):
        if not train(step):
            raise RuntimeError(f"step {step} was not captured")
        if not engine.wait(step, until="durable", timeout_s=DEADLINE_S):
            raise RuntimeError(f"step {step} did not become durable")
        said["per_snapshot"].append(counts.take())
    said["shard_bytes"] = engine.statistics().shard_bytes
    engine.close()
    said["close"] = counts.take()
    answer.send(said)
    dist.barrier()
    os._exit(0)  # gloo's own tear-down aborts or hangs now and then, with or without snapshots
