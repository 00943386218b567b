"""Restarts at one level: every method saves once and loads again and again; a worker of restore.py.

    python benchmarks/restarts.py local /scratch/restarts --out local.jsonl

Before each load the bytes leave the page cache. Who comes first turns with every round.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WARM_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}
"""Makes the C library keep memory that was freed, and hand it out again with its pages in place."""
PHASES = ("imports", "build", "load", "step")
METHODS = ("lightning", "dcp", "lazysnap", "lazysnap-lightning")
SIZES = {
    "tiny": {"layers": 2, "heads": 2, "width": 64, "context": 64, "vocabulary": 256},
    "30m": {"layers": 8, "heads": 8, "width": 512, "context": 128, "vocabulary": 8_192},
    # With AdamW's two moments 1.17 GB of state.
    "100m": {"layers": 12, "heads": 12, "width": 768, "context": 128, "vocabulary": 16_384},
}


def forget(directory: Path) -> None:
    """Take the bytes of all files below from the page cache; they are on the disk."""
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):  # a server's file may go meanwhile
            if not file.is_file() or file.is_symlink():
                continue
            handle = os.open(file, os.O_RDONLY)
            try:
                os.fdatasync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def free_port() -> int:
    """For a rendezvous."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Runner:
    """Runs one job on all its ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def run(self, act: str, method: str, world_size: int) -> list[dict[str, Any]]:
        """The events of each rank by their names, times from the start of its process.

        Raises: RuntimeError, if one did not come to its end.
        """
        args = self._args
        name = f"{method}-{world_size}"
        common = {
            "act": act,
            "method": method,
            "level": args.level,
            "url": f"{args.url}/{name}",
            "options": args.options,
            "size": SIZES[args.size],
            "job_id": f"restore-{args.level}-{name}-{os.getpid()}",
            "world_size": world_size,
            "port": free_port(),
            "threads": max(1, (os.cpu_count() or 1) // world_size),
        }
        if "://" not in common["url"]:
            Path(common["url"]).mkdir(parents=True, exist_ok=True)
        started, ranks = [], []
        for rank in range(world_size):
            command = [sys.executable, str(HERE / "restart.py"), json.dumps({**common, "rank": rank})]
            started.append(time.monotonic())
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(command, env={**os.environ, **WARM_HEAP}, **streams))
        found = []
        try:
            for begun, process in zip(started, ranks, strict=True):
                found.append(self._events(process, begun, act))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return found

    def _events(self, process: "subprocess.Popen[str]", begun: float, act: str) -> dict[str, Any]:
        out, errors = process.communicate(timeout=self._args.deadline_s)
        events = [json.loads(line) for line in out.splitlines() if line.startswith('{"event"')]
        names = {event["event"] for event in events}
        ended_well = process.returncode in (0, -signal.SIGKILL)
        if not ended_well or ("stepped" if act == "load" else "imported") not in names:
            raise RuntimeError((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
        return {event["event"]: {**event, "at": event["at"] - begun} for event in events}


def phases(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of the slowest rank in each phase; ``total`` is from the start of a process to the end of its step."""
    found = []
    for events in ranks:
        load = events["loaded"]["seconds"]
        total = events["stepped"]["at"]
        found.append(
            {
                "imports": events["imported"]["at"],
                "build": events["built"]["at"] - events["imported"]["at"],
                "load": load,
                # With a trainer: what it does besides.
                "step": total - events["built"]["at"] - load,
                "total": total,
            }
        )
    return {name: max(one[name] for one in found) for name in found[0]}


def measure(runner: Runner, args: argparse.Namespace, world_size: int) -> list[dict[str, Any]]:
    """One line per method."""
    methods = [method for method in args.methods if world_size == 1 or "lightning" not in method]
    if args.level == "memory":
        methods = [method for method in methods if method.startswith("lazysnap")]
    for method in methods:
        runner.run("save", method, world_size)
    os.sync()
    taken: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    size: dict[str, int] = {}
    for number in range(args.rounds):
        turned = methods[number % len(methods) :] + methods[: number % len(methods)]
        for method in turned:
            for directory in (*args.forget, *([] if "://" in args.url else [Path(args.url)])):
                forget(directory)
            ranks = runner.run("load", method, world_size)
            taken[method].append(phases(ranks))
            size[method] = sum(events["stepped"]["bytes"] for events in ranks)
    facts = {"measure": "restore", "level": args.level, "ranks": world_size}
    return [
        {
            **facts,
            "method": method,
            "bytes": size[method],
            **{name: [one[name] for one in taken[method]] for name in (*PHASES, "total")},
        }
        for method in methods
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", help="memory, or any name for a storage level")
    parser.add_argument("url", help="of the level; unused for memory")
    parser.add_argument("--options", type=json.loads, default=None, help="storage_options as JSON")
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[1])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--forget", type=Path, action="append", default=[], help="its files leave the page cache")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="for one run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runner = Runner(args)
    with args.out.open("w") as file:
        for world_size in args.ranks:
            for line in measure(runner, args, world_size):
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
