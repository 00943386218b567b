"""What does lazysnap cost with many ranks? Counted with real ones, then simulated up to 16,384.

    python benchmarks/scale.py
    python benchmarks/scale.py --counted 2 --simulated 8,64,512 --json

Counted: trainings over gloo on this machine, DDP and FSDP2; collectives, messages between trainer and keeper, files and
bytes, time until the first capture. Simulated: one rank of N runs the package's own code, 8 ranks per node, on made-up
names, manifests and answers of the others: its plan, its restart from storage in the same and in half the world, its
retention. How: docs/benchmarks.md.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import scale_rank
import simulated
from rich.console import Console
from rich.table import Table

TIMEOUT_S = 240.0
LIMIT_S = 10.0
KINDS = ("ddp", "fsdp")
Line = dict[str, Any]

console = Console(stderr=True)


# ------------------------------------------------------------------------------------------------ counted


def start_all(kind: str, world: int, place: Path, *, start: int, steps: int) -> list[Line]:
    """One start of all ranks; what each said, in the order of the ranks."""
    settings = {
        "kind": kind,
        "world": world,
        "meeting": str(place / f"meeting{start}"),
        "level": str(place / "level"),
        "job_id": str(place),
        "steps": steps,
    }
    # Forked: each would import torch again otherwise. Nothing was computed here so far, no thread of torch's runs.
    forks = multiprocessing.get_context("fork")
    pipes = [forks.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        forks.Process(target=scale_rank.run, args=({**settings, "rank": rank}, answer))
        for rank, (_, answer) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    try:
        deadline = time.monotonic() + TIMEOUT_S
        said = []
        for number, (question, _) in enumerate(pipes):
            if not question.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"{kind}: rank {number} of {world} said nothing within {TIMEOUT_S:g} s")
            said.append(question.recv())
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
    return said


def count(kind: str, world: int, steps: int) -> Line:
    """Two starts of a training: the second resumes from storage."""
    with tempfile.TemporaryDirectory(prefix="lazysnap-scale-") as directory:
        first = start_all(kind, world, Path(directory), start=0, steps=steps)
        level = Path(directory, "level")
        shards, manifests = sorted(level.rglob("*.safetensors")), sorted(level.rglob("*.json"))
        files = [path for path in level.rglob("*") if path.is_file()]
        snapshots = len({path.parent for path in manifests})
        shard_bytes = [rank["shard_bytes"] for rank in first]
        manifest_bytes = sum(path.stat().st_size for path in manifests) / len(manifests)
        written = sum(path.stat().st_size for path in shards) / snapshots
        second = start_all(kind, world, Path(directory), start=1, steps=1)
    if {rank["resumed"] for rank in second} != {1 + steps}:
        raise RuntimeError(
            f"{kind}, {world} ranks: resumed {[rank['resumed'] for rank in second]}, expected {1 + steps}"
        )
    each = [one for rank in first for one in rank["per_snapshot"]]
    return {
        "measure": "counted",
        "kind": kind,
        "ranks": world,
        "collectives": {
            "planning": max(rank["making"]["collectives"] + rank["first_boundary"]["collectives"] for rank in first),
            "per_snapshot": max(one["collectives"] for one in each),
            "restart": max(rank["restore"]["collectives"] for rank in second),
            "close": max(rank["close"]["collectives"] for rank in first),
        },
        "messages_per_snapshot_and_rank": statistics.fmean(one["messages"] for one in each),
        "round_trips_per_snapshot_and_rank": statistics.fmean(one["round_trips"] for one in each),
        "files_per_snapshot_and_rank": len(files) / snapshots / world,
        "shard_bytes": shard_bytes,
        "bytes_per_snapshot": written,
        "manifest_bytes": manifest_bytes,
        "plan_cpu_s": max(rank["making_cpu_s"] + rank["boundary_cpu_s"] for rank in first),
        **{
            name: max(rank[name] for rank in first)
            for name in ("making_cpu_s", "boundary_cpu_s", "making_s", "boundary_s")
        },
    }


# ------------------------------------------------------------------------------------------------ simulated


def figures(line: Line) -> Line:
    """Without the words that were told."""
    return {name: value for name, value in line.items() if name != "said"}


def simulate(ranks: int) -> Iterator[Line]:
    """All lines for one number of ranks; of a restart the rank for which it takes longest of the first, a middle one
    and the last.
    """
    for kind in KINDS:
        yield {"measure": "plan", "kind": kind, "ranks": ranks, **figures(simulated.plan(kind, ranks))}
        for now in (ranks, ranks // 2):
            each = [figures(simulated.resolve(kind, ranks, now, rank)) for rank in sorted({0, now // 2, now - 1})]
            worst = {name: max(one[name] for one in each) for name in each[0]}
            yield {"measure": "restart", "kind": kind, "ranks": ranks, "now": now, **worst}
    yield {"measure": "retention", "ranks": ranks, **simulated.retention(ranks)}


# ------------------------------------------------------------------------------------------------ tables


def table(title: str, *columns: str) -> Table:
    """Numbers to the right."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if not number else "right")
    return made


def show_counted(lines: list[Line]) -> Table:
    """Real ranks."""
    made = table(
        "counted, real ranks over gloo",
        "", "ranks", "collectives: planning", "per snapshot", "restart", "close", "messages per snapshot and rank",
        "round trips to the store", "files per snapshot and rank", "MB per rank", "MB per snapshot", "manifest kB",
    )  # fmt: skip
    for line in lines:
        bytes_ = line["shard_bytes"]
        made.add_row(
            line["kind"],
            str(line["ranks"]),
            *(str(line["collectives"][when]) for when in ("planning", "per_snapshot", "restart", "close")),
            f"{line['messages_per_snapshot_and_rank']:.1f}",
            f"{line['round_trips_per_snapshot_and_rank']:.1f}",
            f"{line['files_per_snapshot_and_rank']:g}",
            f"{min(bytes_) / 1e6:.2f} to {max(bytes_) / 1e6:.2f}",
            f"{line['bytes_per_snapshot'] / 1e6:.2f}",
            f"{line['manifest_bytes'] / 1e3:.1f}",
        )
    return made


def show_planning(lines: list[Line]) -> Table:
    """What real ranks spend until their first capture may begin, each figure that of the slowest rank."""
    names = ("making_cpu_s", "boundary_cpu_s", "plan_cpu_s", "making_s", "boundary_s")
    made = table(
        "planning, real ranks over gloo, ms: the engine with its exchanges, and the first boundary",
        *("", "ranks", "engine CPU", "first boundary CPU", "both CPU", "engine", "first boundary"),
    )
    for line in lines:
        made.add_row(line["kind"], str(line["ranks"]), *(f"{line[name] * 1e3:.1f}" for name in names))
    return made


def growth(line: Line, before: Line | None, name: str) -> str:
    """The figure, and the exponent by which it grew with the number of ranks."""
    value = line[name]
    text = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
    if before is None or not before[name] or not value:
        return text
    return f"{text} (^{math.log(value / before[name]) / math.log(line['ranks'] / before['ranks']):.1f})"


def show_simulated(lines: list[Line]) -> list[Table]:
    """One rank of N; in brackets the exponent of growth since the line above."""
    restart = ("cpu_s", "told_bytes", "lists", "survey_reads", "shards_opened")
    retention = ("cpu_s", "operations", "list", "get", "is_leased", "delete", "delete_directory")
    shown = {
        "plan": ("one rank's plan", ("cpu_s", "making_s", "told_bytes", "shard_bytes", "manifest_bytes")),
        "restart": ("one rank's restart from storage", restart),
        "retention": ("one rank's retention, per snapshot", retention),
    }
    tables = []
    for measure, (title, names) in shown.items():
        made = table(title, "", "ranks", *names)
        before: dict[str, Line] = {}
        for line in (line for line in lines if line["measure"] == measure):
            world = "" if "now" not in line else " same world" if line["now"] == line["ranks"] else " half of them now"
            label = f"{line.get('kind', '')}{world}"
            made.add_row(label, f"{line['ranks']:,}", *(growth(line, before.get(label), name) for name in names))
            before[label] = line
        tables.append(made)
    return tables


def show_targets(lines: list[Line]) -> Table:
    """Each met, or not."""
    made = Table(title="targets", title_justify="left")
    for column in ("target", "reached", "asked", ""):
        made.add_column(column)

    def check(text: str, reached: float | None, asked: float, form: str) -> None:
        if reached is None:
            made.add_row(text, "", "", "[yellow]not measured")
        else:
            made.add_row(
                text, form.format(reached), form.format(asked), "[green]met" if reached <= asked else "[red]not met"
            )

    for measure in ("plan", "restart"):
        seconds = [line["cpu_s"] for line in lines if line["measure"] == measure and line["ranks"] >= 16_384]
        check(f"{measure} at 16,384 ranks, CPU of one process", max(seconds, default=None), LIMIT_S, "{:.2f} s")
    collectives = [line["collectives"]["per_snapshot"] for line in lines if line["measure"] == "counted"]
    check("collectives per snapshot", max(collectives, default=None), 0, "{:.0f}")
    kept = [line for line in lines if line["measure"] == "retention"]
    grown = kept[-1]["operations"] / kept[0]["operations"] if len(kept) > 1 else None
    check("retention per snapshot and rank, most ranks against fewest", grown, 1.0, "{:,.1f}x")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(item) for item in text.split(",") if item]  # noqa: E731
    parser.add_argument("--counted", type=numbers, default=[2, 4, 8], help="numbers of real ranks")
    parser.add_argument("--steps", type=int, default=3, help="snapshots of each real training after the first")
    parser.add_argument("--simulated", type=numbers, default=[8, 64, 512, 4096, 16_384], help="numbers of ranks")
    parser.add_argument("--json", action="store_true", help="lines of JSON instead of tables")
    args = parser.parse_args()
    lines: list[Line] = []
    # Keepers are started by the dozen: compiled once, wherever the environment says that nothing is to be written.
    bytecode = tempfile.TemporaryDirectory(prefix="lazysnap-bytecode-")
    os.environ.update(PYTHONPYCACHEPREFIX=bytecode.name, PYTHONDONTWRITEBYTECODE="", OMP_NUM_THREADS="1")
    for world in args.counted:
        for kind in KINDS:
            console.print(f"[dim]{kind}, {world} ranks ...")
            lines.append(count(kind, world, args.steps))
    bytecode.cleanup()
    for ranks in args.simulated:
        console.print(f"[dim]{ranks:,} ranks, simulated ...")
        lines += simulate(ranks)
    if args.json:
        for line in lines:
            print(json.dumps(line))
        return
    out = Console(width=max(160, Console().width))
    counted = [line for line in lines if line["measure"] == "counted"]
    out.print(show_counted(counted))
    out.print(show_planning(counted))
    for made in (*show_simulated(lines), show_targets(lines)):
        out.print(made)


if __name__ == "__main__":
    main()
