"""Compare the cost of snapshots, and the result of a training after a fault, with what users would take instead.

Each method trains the same model: in a loop with and without snapshots, by turns; from SIGKILL to the first new step;
and under ``lazysnap chaos``, which counts lost steps and compares the result. It takes about 30 minutes on 2 quiet
cores.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.report import Report
from benchmarks.restart import Program, restarts
from benchmarks.stall import lost_ms
from benchmarks.workers import ROOT, Line, last_line

METHODS = {
    # Method: the package whose version is pinned in the extra `scoreboard`.
    "none": "torch",
    "torch.save": "torch",
    "dcp-async": "torch",
    "lightning": "lightning",
    "transformers": "transformers",
    "torch-checkpointing": "torch-checkpointing",
    "lm-resiliency": "lm-resiliency",
    "ravex": "ravex",
    "lazysnap": "lazysnap",
    "lazysnap-lightning": "lazysnap",
}
AT_EVERY_STEP = ("ravex", "lazysnap", "lazysnap-lightning")
"""Methods that take a snapshot of each step; the others take one of every tenth."""
FAULTS = ("kill", "term", "flip", "full", "slow", "hang", "both")
"""``both`` is left out for most methods. It is the last one, so that all methods get the same seeds."""
START, EVERY = 20, 10
"""Steps at the start of a loop that are not timed: the first snapshot makes processes, threads and buffers. Steps
between two snapshots.
"""
SEED = 17582
"""With it all faults strike a training of 40 steps well between two checkpoints, after the first."""
LOOP_S, RESTART_S, FAULT_S = 12.0, 6.0, 14.0
"""Seconds of one loop, one restart and one fault on 2 quiet cores: the first estimate of the time that is left."""
EXACT = {"PASS": "yes", "LOST_WORK": "yes", "SILENT_DIVERGENCE": "NO", "HARD_FAIL": "did not end"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--steps", type=int, default=120, help="of the loop; the first 20 are its start, and not timed")
    parser.add_argument("--repeats", type=int, default=3, help="of the loop, with and without snapshots")
    parser.add_argument("--kills", type=int, default=3, help="from which the time to the first new step is taken")
    parser.add_argument("--seed", type=int, default=SEED, help="of the first fault; each next one has the next")


class Progress:
    """The share of the work that is done, and an estimate of the time that is left."""

    def __init__(self, all_s: float) -> None:
        self._began_s, self._all_s = time.monotonic(), all_s
        self._earlier_s, self._now_s = 0.0, 0.0
        """Estimated seconds of the parts that are over, and of the finished share of the part in progress."""

    def say(self, text: str) -> None:
        took_s, done_s = time.monotonic() - self._began_s, self._earlier_s + self._now_s
        left_s = (self._all_s - done_s) * (took_s / done_s if done_s else 1.0)
        how_far = f"{done_s / self._all_s:.0%}, {took_s / 60:.0f} min, about {left_s / 60:.0f} min left"
        print(f"[{how_far}] {text}", file=sys.stderr, flush=True)

    def done(self, seconds: float) -> None:
        self._now_s += seconds

    def end(self, seconds: float) -> None:
        """Count a part as done, also if it was left out in the middle."""
        self._earlier_s, self._now_s = self._earlier_s + seconds, 0.0


Part = tuple[str, float, Callable[[Progress], Iterable[Line]]]
"""One part of the work: its name, an estimate of its seconds, and the function that yields its lines."""


def parts(method: str, args: argparse.Namespace) -> Iterator[Part]:
    if method != "none":
        yield f"{method}, loop", 2 * args.repeats * LOOP_S, functools.partial(loops, method, args.repeats, args.steps)
    for start in ("cold", "warm") if method.startswith("lazysnap") else ("cold",):
        work = functools.partial(killed, method, start, args.kills)
        yield f"{method}, restart, {start}", args.kills * RESTART_S, work
    # Without a keeper it is the same as `kill`.
    faults = [fault for fault in args.faults if fault != "both" or method.startswith("lazysnap")]
    faults = ["kill"] if method == "none" else faults
    yield f"{method}, faults", (1 + len(faults)) * FAULT_S, functools.partial(struck, method, faults, args.seed)


def run(args: argparse.Namespace, report: Report) -> None:
    plan: dict[str, list[Part]] = {}
    for method in args.methods:
        try:
            metadata.version(METHODS[method])
        except metadata.PackageNotFoundError:
            report.left_out(method, f"{METHODS[method]} is not installed: pip install 'lazysnap[scoreboard]'")
        else:
            plan[method] = list(parts(method, args))
    progress = Progress(sum(seconds for found in plan.values() for _, seconds, _ in found))
    for method, found in plan.items():
        for name, seconds, work in found:
            report.take(name, functools.partial(work, progress))
            progress.end(seconds)
        report.note(summary(report, method))


def summary(report: Report, method: str) -> Line:
    """Return the main figures of a method; those of a part that was left out are ``None``."""
    of_it = [line for line in report.lines if line.get("method") == method]
    loop: Line = next((line for line in of_it if line["measure"] == "loop"), {})
    kill: Line = next((line for line in of_it if line["measure"] == "fault" and line["fault"] == "kill"), {})
    found: Line = {"measure": "scoreboard", "method": method, "version": metadata.version(METHODS[method])}
    found |= {name: loop.get(name) for name in ("blocked_ms", "lost_ms")}
    found |= {"steps_lost": kill.get("steps_again"), "exact": EXACT.get(kill.get("verdict", ""))}
    for start in ("cold", "warm"):
        taken = (line["restart_s"] for line in of_it if line["measure"] == "restart" and line["start"] == start)
        found[f"restart_{start}_s"] = next(taken, None)
    return found


# ------------------------------------------------------------------------------------------------ the loop


def loops(method: str, repeats: int, steps: int, progress: Progress) -> list[Line]:
    """Time the loop without and with snapshots. The order changes with each repeat: neither has an advantage."""
    count = (steps - START) // (1 if method in AT_EVERY_STEP else EVERY)
    with_s, without_s, found = [], [], []
    for repeat in range(repeats):
        for is_saving in (False, True) if repeat % 2 == 0 else (True, False):
            progress.say(f"{method}: loop {'with' if is_saving else 'without'} snapshots, {repeat + 1} of {repeats}")
            line = figures(method, "--steps", str(steps), *([] if is_saving else ["--without"]))
            progress.done(LOOP_S)
            (with_s if is_saving else without_s).append(line["loop_s"])
            found += [line] if is_saving else []
    facts = {"measure": "loop", "method": method, "state_mb": found[0]["state_mb"], "snapshots": count}
    pairs = list(zip(with_s, without_s, strict=True))
    facts |= {name: [line[name] for line in found if line.get(name)] for name in ("blocked_ms", "first_ms")}
    facts["lost_ms"] = [lost_ms(one, base, count) for one, base in pairs]
    facts["slower_percent"] = [100 * (one / base - 1) for one, base in pairs]
    return [{**facts, "loop_s": with_s, "without_s": without_s}]


def figures(method: str, *options: str) -> Line:
    """Return the figures that one loop prints. Raises: RuntimeError, subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory(prefix="lazysnap-scoreboard-", ignore_cleanup_errors=True) as own:
        words = [sys.executable, "-m", "benchmarks.rivals", method, own, *options]
        how: Line = {"capture_output": True, "text": True, "timeout": 300, "check": False}
        done = subprocess.run(words, cwd=ROOT, **how)
    for line in done.stdout.splitlines():
        if line.startswith("figures {"):
            return dict(json.loads(line[8:]))
    raise RuntimeError(f"exit code {done.returncode}: {last_line(done.stderr)}")


# ------------------------------------------------------------------------------------------------ faults


def killed(method: str, start: str, kills: int, progress: Progress) -> Iterator[Line]:
    words = ("-m", "benchmarks.rivals", method, "{directory}/files", "--steps", "1000")
    program, taken = Program(words, prints_steps=True, deadline_s=120.0), []
    progress.say(f"{method}: {kills} kills, each start {start}")
    for one in restarts(program, start, kills):
        taken.append(one)
        progress.done(RESTART_S)
        progress.say(f"{method}: {one:.1f} s from SIGKILL to the first new step")
    yield {"measure": "restart", "method": method, "start": start, "restart_s": taken}


def struck(method: str, faults: list[str], seed: int, progress: Progress) -> Iterator[Line]:
    """Run one method under all faults."""
    progress.say(f"{method}: undisturbed, then {', '.join(faults)}")
    with tempfile.TemporaryDirectory(prefix="lazysnap-scoreboard-", ignore_cleanup_errors=True) as own:
        words = ["-m", "lazysnap.cli", "chaos", "--json", "--dir", f"{own}/chaos", "--faults", ",".join(faults)]
        words += ["--seed", str(seed), "--may-lose", str(EVERY), "--max-restarts", "3", "--result", "result.pt"]
        words += ["--", sys.executable, "-m", "benchmarks.rivals", method, "{dir}"]
        with Path(own, "result").open("w+") as out:
            chaos = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True)
            try:
                assert chaos.stderr is not None
                for said in chaos.stderr:
                    progress.done(FAULT_S)
                    progress.say(f"{method}: {said.strip()}")
            finally:
                chaos.terminate()  # it ends the training, too
                chaos.wait()
            out.seek(0)
            result = json.loads(last_line(out.read()) or "{}")
    if "runs" not in result:
        raise RuntimeError(last_line(result.get("error", f"exit code {chaos.returncode}")))
    verdicts = {"measure": "verdicts", "method": method, **dict.fromkeys(FAULTS)}
    for one in result["runs"]:
        again = "" if one["steps_again"] is None else f", {one['steps_again']} again"
        verdicts[one["fault"]] = one["verdict"] + again
        facts = {name: one[name] for name in ("fault", "seed", "at_step", "verdict", "steps_again", "restarts")}
        facts |= {"seconds": one["seconds"], "reason": "; ".join(filter(None, (one["what"], one["reason"])))}
        yield {"measure": "fault", "method": method, **facts}
    yield verdicts
