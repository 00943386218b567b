"""``lazysnap demo``: kill a real training again and again, resume it, and compare it with one that was never killed."""

import argparse
import itertools
import pathlib
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from lazysnap.cli.chaos_training import Training
from lazysnap.cli.output import Output
from lazysnap.errors import ConfigError, LazySnapError

_STEP = re.compile(r"^step (\d+) loss ")
_STARTED = re.compile(r"^starting at step (\d+) from (\S+)$", re.MULTILINE)
_DONE = re.compile(r"^finished at step \d+: (\w+)$", re.MULTILINE)
_SILENCE_S = 120.0
"""Seconds without a step after which a training counts as hanging."""


class DemoFailed(LazySnapError):
    """The training of the demo did not run as it must."""


def _training(place: pathlib.Path, max_steps: int, *options: str) -> Training:
    command = [sys.executable, "-m", "lazysnap.cli.demo_training", "--max-steps", str(max_steps)]
    return Training([*command, *options], _STEP, place)


def _follow(training: Training, is_met: Callable[[], bool] = lambda: False) -> None:
    """Block until ``is_met``, or the training ended. Raises: DemoFailed, if it hangs."""
    times_s, began_s = training.starts[-1].times_s, time.monotonic()
    while not training.wait(is_met, time.monotonic() + 1.0) and training.code is None:
        if time.monotonic() - max([began_s, *times_s[-1:]]) > _SILENCE_S:
            raise DemoFailed(f"the training printed no step for {_SILENCE_S:.0f} s")


def _train_to_end(training: Training) -> str:
    """Start a training, and return the digest of its final state. Blocks. Raises: DemoFailed."""
    training.start()
    _follow(training)
    _check_ended(training, 0)
    return str(_DONE.findall(training.log.read_text())[-1])


def _train_and_kill(training: Training, at: int, late_s: float, *, with_keeper: bool) -> float:
    """Start a training, and kill it ``late_s`` after step ``at`` was over. Return the time of the kill.

    ``with_keeper``: its keeper, too, so that memory is lost as well. Blocks. Raises: DemoFailed.
    """
    training.start()
    steps = training.starts[-1].steps
    _follow(training, lambda: at in steps)
    time.sleep(late_s)
    if with_keeper and not training.keepers():
        raise DemoFailed(f"the training runs without a keeper; its last lines:\n{training.last_lines(20)}")
    training.end(training.all if with_keeper else training.trainers)
    killed_s = time.monotonic()
    _check_ended(training, -signal.SIGKILL)
    return killed_s


def _check_ended(training: Training, code: int) -> None:
    if not training.wait_ended(time.monotonic() + _SILENCE_S) or training.code != code:
        raise DemoFailed(f"the training ended with code {training.code}; its last lines:\n{training.last_lines(20)}")


def _costs(training: Training, kills_s: list[float], with_keeper: int) -> list[dict[str, Any]]:
    """Return the cost of each kill: steps and seconds of work that were done again, and the time of the restart.

    ``with_keeper``: the number of the kill that took the keeper along.
    """
    costs, times_s = [], dict[int, float]()
    resumed = _STARTED.findall(training.log.read_text())[1:]
    for number, (killed, after) in enumerate(itertools.pairwise(training.starts)):
        times_s.update(zip(killed.steps, killed.times_s, strict=True))
        step, at = int(resumed[number][0]), killed.steps[-1]
        costs.append(
            {
                "killed": "training and keeper" if number == with_keeper else "training",
                "at_step": at,
                "resumed_step": step,
                "from": "memory" if resumed[number][1] == "memory" else "disk",
                "steps_lost": max(0, at - step),
                "seconds_lost": max(0.0, kills_s[number] - times_s.get(step, times_s[1])),
                "restart_s": after.times_s[0] - after.began_s if after.times_s else 0.0,
            }
        )
    return costs


def _show(costs: list[dict[str, Any]], output: Output) -> None:
    """Print the table of kills."""
    names = ("killed", "at_step", "resumed_step", "from", "steps_lost")
    rows = [
        [*(cost[name] for name in names), f"{cost['seconds_lost']:.2f}", f"{cost['restart_s']:.1f} s"] for cost in costs
    ]
    columns = ("killed", "at step>", "resumed step>", "from", "done again>", "seconds lost>", "restart>")
    output.show(output.table("each kill -9, and its cost", *columns, rows=rows))
    output.line("restart: from the start of the process to its first step; nearly all of it is `import torch`")


def run(args: argparse.Namespace, output: Output) -> int:
    """Train, kill, resume and compare. Blocks for half a minute. Returns 1 if anything differs.

    Raises: ConfigError; DemoFailed.
    """
    if not 0 < args.kills <= args.max_steps // 8:
        raise ConfigError(f"--kills must be from 1 to {args.max_steps // 8}, eight steps for each, got {args.kills}")
    dice, part = random.Random(args.seed), args.max_steps // (args.kills + 1)
    with tempfile.TemporaryDirectory(prefix="lazysnap-demo-") as directory:
        place = pathlib.Path(directory)
        output.say(
            f"1. a small transformer trains for {args.max_steps} steps, without snapshots and undisturbed", "bold"
        )
        with _training(place / "undisturbed", args.max_steps) as training:
            undisturbed = _train_to_end(training)
        output.say(
            f"2. the same training with a snapshot of every step is killed with SIGKILL, {args.kills} times", "bold"
        )
        # Every part of the training, the first one too, stores a step before it can be killed.
        options = ("--directory", "{dir}", "--persist-every-n-steps", str(max(1, part // 8)))
        with _training(place / "killed", args.max_steps, *options) as training:
            kills_s = []
            for number in range(args.kills):
                at, late_s = part * number + dice.randint(part // 4 + 1, part), dice.uniform(0, 0.05)
                kills_s.append(_train_and_kill(training, at, late_s, with_keeper=number == args.kills // 2))
                output.say(f"   killed at step {training.starts[-1].steps[-1]}")
            killed = _train_to_end(training)
            kills = _costs(training, kills_s, args.kills // 2)
    _show(kills, output)
    is_equal, is_resumed = undisturbed == killed, all(kill["resumed_step"] > 0 for kill in kills)
    output.line(f"undisturbed {undisturbed}")
    output.line(f"killed      {killed}")
    if not is_equal:
        output.line("FAIL: weights or optimizer state differ from those of the undisturbed training", "bold red")
    elif not is_resumed:
        output.line("FAIL: a start found no snapshot", "bold red")
    else:
        output.line(f"PASS: weights and optimizer state are equal bit for bit after {args.kills} kills", "bold green")
    return output.result(
        ok=is_equal and is_resumed, kills=kills, digests={"undisturbed": undisturbed, "killed": killed}
    )
