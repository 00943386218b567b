"""``lazysnap demo``: kill a real training again and again, resume it, and compare it with one that was never killed."""

import argparse
import itertools
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lazysnap.cli.output import Output
from lazysnap.config import SnapshotConfig
from lazysnap.errors import ConfigError, LazySnapError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect

_STEP = re.compile(r"^step (\d+) loss [\d.]+$")
_RESUMED = re.compile(r"^lazysnap\S*: resumed step (\d+) of run \w+ \(?.*?from (memory|\S+?):")
_DONE = re.compile(r"^finished at step \d+: (\w+)$")
_SILENCE_S = 120.0
"""Seconds without a line after which a training counts as hanging."""


class DemoFailed(LazySnapError):
    """The training of the demo did not run as it must."""


@dataclass
class _Start:
    """One start of the training, and the lines it printed."""

    started_s: float
    times_s: dict[int, float] = field(default_factory=dict)
    """Time at which each step was over."""
    resumed: tuple[int, str] = (0, "nothing")
    """The step that it resumed, and from where."""
    digest: str | None = None
    """The digest of the final state; ``None`` if it was killed before."""
    killed_s: float = 0.0


class _Demo:
    """Starts and kills trainings. ``directory``: for snapshots and for the job's name."""

    def __init__(self, directory: str, max_steps: int, dice: random.Random) -> None:
        self._directory = directory
        self._max_steps = max_steps
        self._dice = dice
        self._job_id = f"demo-{os.path.basename(directory)}"  # of its own: it meets no other job of this user

    def train(self, *options: str, kill_at: int | None = None, with_keeper: bool = False) -> _Start:
        """Run the training to its end, or kill it some moment after ``kill_at`` is over.

        ``with_keeper``: kill the keeper first, so that memory is lost as well.
        Blocks. Raises: DemoFailed, if the training hangs or ends with an error.
        """
        command = [sys.executable, "-m", "lazysnap.cli.demo_training", "--max-steps", str(self._max_steps), *options]
        start = _Start(time.monotonic())
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LAZYSNAP_JOB_ID": self._job_id},
        ) as process:
            printed: list[str] = []
            try:
                for line in _lines(process):
                    printed.append(line)
                    if match := _STEP.match(line):
                        start.times_s[int(match[1])] = time.monotonic()
                    elif match := _RESUMED.match(line):
                        start.resumed = (int(match[1]), "memory" if match[2] == "memory" else "disk")
                    elif match := _DONE.match(line):
                        start.digest = match[1]
                    if not start.killed_s and kill_at is not None and kill_at in start.times_s:
                        time.sleep(self._dice.uniform(0, 0.05))  # anywhere within a step
                        if with_keeper:
                            self._kill_keeper()
                        process.kill()
                        start.killed_s = time.monotonic()
            finally:
                process.kill()
            if process.wait() != (-signal.SIGKILL if start.killed_s else 0):
                last = "\n".join(printed[-20:])
                raise DemoFailed(f"the training ended with code {process.returncode}; its last lines:\n{last}")
        return start

    def train_and_kill(self, kills: int) -> Iterator[_Start]:
        """Run the training with snapshots, and kill it ``kills`` times; the last start runs to its end."""
        part = self._max_steps // (kills + 1)
        # Every part of the training, the first one too, stores a step before it can be killed.
        options = ("--directory", self._directory, "--persist-every-n-steps", str(max(1, part // 8)))
        for number in range(kills):
            at = part * number + self._dice.randint(part // 4 + 1, part)
            yield self.train(*options, kill_at=at, with_keeper=number == kills // 2)
        yield self.train(*options)

    def _kill_keeper(self) -> None:
        connection = try_connect(JobIdentity.from_config(SnapshotConfig(job_id=self._job_id)))
        if connection is None or not connection.peer_pid:  # 0: it just died, and to the kernel means this group
            raise DemoFailed("the training runs without a keeper: its lines above say why")
        os.kill(connection.peer_pid, signal.SIGKILL)
        connection.close()


def _lines(process: "subprocess.Popen[bytes]") -> Iterator[str]:
    """Yield the lines of ``process`` as they come. Raises: DemoFailed, if none comes for ``_SILENCE_S``."""
    assert process.stdout is not None
    rest = b""
    while select.select([process.stdout], [], [], _SILENCE_S)[0]:
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    raise DemoFailed(f"the training printed nothing for {_SILENCE_S:.0f} s")


def _costs(starts: list[_Start]) -> list[dict[str, Any]]:
    """Return the cost of each kill: steps and seconds of work that were done again, and the time of the restart."""
    costs, times_s = [], {}
    for killed, after in itertools.pairwise(starts):
        times_s.update(killed.times_s)
        step, level = after.resumed
        at = max(killed.times_s)
        costs.append(
            {
                "killed": "training",
                "at_step": at,
                "resumed_step": step,
                "from": level,
                "steps_lost": max(0, at - step),
                "seconds_lost": max(0.0, killed.killed_s - times_s.get(step, times_s[1])),
                "restart_s": min(after.times_s.values(), default=after.started_s) - after.started_s,
            }
        )
    return costs


def _show(costs: list[dict[str, Any]], output: Output) -> None:
    """Print the table of kills."""
    columns = ("at step>", "resumed step>", "from", "steps lost>", "seconds lost>", "restart>")
    table = output.table("each kill -9, and its cost", "killed", *columns)
    for cost in costs:
        seconds = (f"{cost['seconds_lost']:.2f}", f"{cost['restart_s']:.1f} s")
        names = ("killed", "at_step", "resumed_step", "from", "steps_lost")
        table.add_row(*(output.cell(cost[name]) for name in names), *seconds)
    output.show(table)
    output.line("restart: from the start of the process to its first step; nearly all of it is `import torch`")


def add_arguments(demo: argparse.ArgumentParser) -> None:
    """Those of this command."""
    demo.add_argument("--max-steps", type=int, default=200, metavar="N", help="optimizer steps of the training (200)")
    demo.add_argument("--kills", type=int, default=3, metavar="N", help="times that it is killed (3)")
    demo.add_argument("--seed", type=int, default=1603, help="seed of the moments of the kills")


def run(args: argparse.Namespace, output: Output) -> int:
    """Train, kill, resume and compare. Blocks for half a minute. Returns 1 if anything differs.

    Raises: ConfigError; DemoFailed.
    """
    if not 0 < args.kills <= args.max_steps // 8:
        raise ConfigError(f"--kills must be from 1 to {args.max_steps // 8}, eight steps for each, got {args.kills}")
    with tempfile.TemporaryDirectory(prefix="lazysnap-demo-") as directory:
        demo = _Demo(directory, args.max_steps, random.Random(args.seed))
        output.say(
            f"1. a small transformer trains for {args.max_steps} steps, without snapshots and undisturbed", "bold"
        )
        undisturbed = demo.train()
        output.say(
            f"2. the same training with a snapshot of every step is killed with SIGKILL, {args.kills} times", "bold"
        )
        starts = []
        for start in demo.train_and_kill(args.kills):
            starts.append(start)
            if start.killed_s:
                output.say(f"   killed at step {max(start.times_s)}")
    kills = _costs(starts)
    kills[args.kills // 2]["killed"] = "training and keeper"
    _show(kills, output)
    is_equal = undisturbed.digest is not None and undisturbed.digest == starts[-1].digest
    is_resumed = all(kill["resumed_step"] > 0 for kill in kills)
    output.line(f"undisturbed {undisturbed.digest}")
    output.line(f"killed      {starts[-1].digest}")
    if not is_equal:
        output.line("FAIL: weights or optimizer state differ from those of the undisturbed training", "bold red")
    elif not is_resumed:
        output.line("FAIL: a start found no snapshot", "bold red")
    else:
        output.line(f"PASS: weights and optimizer state are equal bit for bit after {args.kills} kills", "bold green")
    digests = {"undisturbed": undisturbed.digest, "killed": starts[-1].digest}
    return output.result(ok=is_equal and is_resumed, kills=kills, digests=digests)
