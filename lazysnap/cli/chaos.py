"""``lazysnap chaos``: run a training with faults, and compare it with runs without faults. ``demo`` has its own
training.
"""

import argparse
import ctypes
import itertools
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lazysnap.cli.chaos_training import LOGS, CommandStart, Training, copy_directory, step_of
from lazysnap.cli.output import OK, Output, command_words, count_of, without_end
from lazysnap.errors import ConfigError
from lazysnap.shard.checksum import digest

FAULTS = ("kill", "keeper", "both", "stop", "stop-keeper", "term", "flip")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_CLOCK = re.compile(r"\d{4}-\d\d-\d\d|\d\d?:\d\d(?::\d\d)?(?:[.,]\d+)?")
_MAX_RESTARTS = 5
_LONGEST_STOP_S = 30.0

_STYLES = {"PASS": "green", "LOST_WORK": "yellow"}
_ADVICE = {
    "LOST_WORK": "the restart found no checkpoint, or an old one: its log says which",
    "SILENT_DIVERGENCE": "something that decides the next step is not restored (a batch drawn ahead, an average of the "
    "weights, a random generator, a position in the data), or a damaged file was believed",
    "HARD_FAIL": "the same command, started again, must resume by itself, also if its newest checkpoint is damaged: "
    "its log shows where it failed",
}


# ---------------------------------------------------------------- the result


class Printed:
    """The numbers that are equal in the output of two undisturbed runs: no times, rates or process ids."""

    def __init__(self, first: list[str], second: list[str]) -> None:
        """``first``, ``second``: all lines of the runs."""
        second_columns = _columns(second)
        self._alike = set()
        """Form and place of the numbers that are compared."""
        for column, numbers in _columns(first).items():
            if second_columns.get(column) == numbers:
                self._alike.add(column)
        self.lines = self.of(first)

    def of(self, lines: list[str]) -> dict[tuple[str, ...], str]:
        """Return the lines by their compared parts."""
        compared = {}
        for line in lines:
            form, numbers = _split(line)
            key = [form]
            for place, number in enumerate(numbers):
                if (form, place) in self._alike:
                    key.append(number)
            if len(key) > 1:
                compared[tuple(key)] = line.strip()
        return compared


def _split(line: str) -> tuple[str, list[str]]:
    """Return the form of a line, and its numbers. Times of the day are neither."""
    line = _CLOCK.sub("", line)
    return _NUMBER.sub("#", line), _NUMBER.findall(line)


def _columns(lines: list[str]) -> dict[tuple[str, int], list[str]]:
    """Return the numbers at each place of each form of line."""
    columns: dict[tuple[str, int], list[str]] = {}
    for line in lines:
        form, numbers = _split(line)
        for place, number in enumerate(numbers):
            if "lazysnap" not in form and "%|" not in form:  # progress bars have rates
                columns.setdefault((form, place), []).append(number)
    return columns


def digests(files: pathlib.Path, pattern: str | None) -> dict[str, str]:
    """Return the digest of each file that matches; of each tensor in it, if ``torch.save`` wrote it."""
    values: dict[str, str] = {}
    if pattern is None:
        return values
    for path in sorted(files.glob(pattern)):
        name = path.relative_to(files)
        data = path.read_bytes()
        tensors = {}
        if data.startswith(b"PK\x03\x04"):
            tensors = _tensors(path)
        for tensor, value in tensors.items():
            values[f"{tensor} of {name}"] = value
        if not tensors:
            values[str(name)] = digest(data)
    return values


def _tensors(path: pathlib.Path) -> dict[str, str]:
    import pickle

    import torch
    from torch.utils import _pytree

    try:
        leaves, _ = _pytree.tree_flatten_with_path(torch.load(path, map_location="cpu", weights_only=True))
    except (RuntimeError, pickle.UnpicklingError):  # of types that weights_only refuses, or not written by torch
        return {}
    values = {}
    for key, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            values[_pytree.keystr(key)] = f"{leaf.dtype} {tuple(leaf.shape)} {digest(bytes_of(leaf))}"
    return values


def bytes_of(tensor: Any) -> bytes:
    """Return a copy of the bytes of a tensor on the CPU, in row-major order. It needs no NumPy."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(values.data_ptr(), values.nbytes)


def difference(undisturbed: dict[str, str], disturbed: dict[str, str]) -> str:
    """Return a text for the differences; empty if both are bit for bit equal."""
    changed = []
    for name in sorted(undisturbed | disturbed):
        if undisturbed.get(name) != disturbed.get(name):
            changed.append(name)
    if not changed:
        return ""
    return f"{len(changed)} of {len(undisturbed)} differ, the first is {changed[0]}"


# ---------------------------------------------------------------- verdicts


@dataclass
class Trial:
    """One training under one fault."""

    fault: str
    done: str = ""
    at_step: int | None = None
    verdict: Literal["PASS", "LOST_WORK", "SILENT_DIVERGENCE", "HARD_FAIL"] = "PASS"
    reason: str = ""
    steps_again: int | None = None
    """Steps that were trained before the fault, and again after it; ``None``: no steps are printed."""
    restarts: int = 0
    seconds: float = 0.0
    log: str = ""


class Chaos:
    """All runs of a command."""

    def __init__(self, args: argparse.Namespace, place: pathlib.Path) -> None:
        """Run it twice undisturbed. Blocks. Raises: ConfigError, also if it cannot be judged."""
        self._args = args
        self._words = command_words(args)
        self._place = place
        self.linked: list[str] = []
        self.has_keeper = False
        self.has_snapshots = False
        began_s = time.monotonic()
        first, self.files = self._run_undisturbed("undisturbed")
        self.seconds = time.monotonic() - began_s
        second, files = self._run_undisturbed("undisturbed-again")
        self.steps = first.steps
        if first.steps != sorted(first.steps):
            self.steps = []  # they begin again with each epoch
        gaps_s = [after - before for before, after in itertools.pairwise(first.times_s)]
        self._step_s = statistics.median(gaps_s or [0.0])
        if args.result is not None and not self.files:
            raise ConfigError(f"--result {args.result} matches no file that the command left in its directory")
        changed = difference(self.files, files)
        if changed:
            raise ConfigError(f"two undisturbed runs differ: {changed}; seed all random generators of the command")
        self.printed = Printed(first.lines, second.lines)
        values_compared = False
        for key, line in self.printed.lines.items():
            if len(key) > 2 or step_of(line) is None:
                values_compared = True
        if not self.files and not values_compared:
            raise ConfigError(
                "two undisturbed runs print no number alike but that of the step: print the loss and seed all random "
                "generators, or name a file to compare, as in `lazysnap chaos --result model.pt -- python train.py`"
            )

    def _training(self, name: str) -> Training:
        training = Training(self._place / name, self._words)
        self.linked = copy_directory(pathlib.Path.cwd(), training.files, self._args.result)
        return training

    def _run_undisturbed(self, name: str) -> tuple[CommandStart, dict[str, str]]:
        with self._training(name) as training:
            training.start()
            while not training.wait(0.2):
                self.has_keeper = self.has_keeper or bool(training.keepers())
            if training.code:
                raise ConfigError(
                    f"without a fault the command ended with code {training.code}; its last lines, of {training.log}:\n"
                    + training.last_lines(15)
                )
        self.has_snapshots = bool(training.newest_snapshot())
        files = digests(training.files, self._args.result)
        shutil.rmtree(training.files)
        return training.starts[0], files

    def impossible(self, fault: str) -> str:
        """Return the reason why a fault is impossible; empty if it is possible."""
        if fault in ("keeper", "both", "stop-keeper") and not self.has_keeper:
            return "the command has no keeper of lazysnap"
        if fault == "flip" and not self.has_snapshots:
            return "the command stores no snapshot of lazysnap in its directory"
        return ""

    def disturb(self, fault: str) -> Trial:
        """Run the command with a fault, start it again until it ends well, and judge. Blocks. Raises: ConfigError."""
        trial = Trial(fault)
        with self._training(fault) as training:
            began_s = time.monotonic()
            until_s = began_s + self._deadline_s
            training.start()
            self._strike(training, trial, until_s)
            self._finish(training, trial, until_s)
            trial.seconds = time.monotonic() - began_s
            trial.log = str(training.log)
        if trial.verdict == "PASS":
            shutil.rmtree(training.files)
        return trial

    def _strike(self, training: Training, trial: Trial, until_s: float) -> None:
        """Inject the fault at a time that the seed determines, after a snapshot is stored and before the last fifth."""
        dice = random.Random(f"{trial.fault} {self._args.seed}")
        share = 0.8 * dice.random()
        late_s = dice.random() * self._step_s
        steps = training.starts[0].steps
        if self.steps:
            struck_step = self.steps[int(share * len(self.steps))]
            training.wait(until_s - time.monotonic(), lambda: bool(steps) and steps[-1] >= struck_step)
        else:
            training.wait(share * self.seconds)
        if self.has_snapshots:
            training.wait(until_s - time.monotonic(), lambda: bool(training.newest_snapshot()))
        training.wait(late_s)
        if trial.fault == "flip" and not training.newest_snapshot():
            raise ConfigError("flip found no snapshot to damage: give the command more time to store one (--deadline)")
        if training.code is not None:
            raise ConfigError(f"the command ended before {trial.fault} could strike: give it more steps")
        if steps:
            trial.at_step = steps[-1]
        trial.done = training.strike(trial.fault, dice, min(_LONGEST_STOP_S, self.seconds / 10))

    @property
    def _deadline_s(self) -> float:
        """Seconds for a disturbed run, with all its restarts."""
        return self._args.deadline or 60.0 + 5 * self.seconds

    def _finish(self, training: Training, trial: Trial, until_s: float) -> None:
        """Start the command again until it ends well, and judge."""
        while training.wait(until_s - time.monotonic()):
            changed = self._difference(training)
            # A preempted program may end well in the middle of its training.
            is_preempted = trial.fault == "term" and not trial.restarts
            if training.code == 0 and not (is_preempted and changed):
                trial.steps_again = self._steps_again(training)
                self._judge(training, trial, changed)
                return
            if trial.restarts == _MAX_RESTARTS:
                trial.verdict = "HARD_FAIL"
                trial.reason = f"code {training.code} also after {_MAX_RESTARTS} restarts: {training.last_lines(1)}"
                return
            trial.restarts += 1
            training.start()
        trial.verdict = "HARD_FAIL"
        trial.reason = f"it did not end within {self._deadline_s:.0f} s, restarts included (--deadline)"

    def _difference(self, training: Training) -> str:
        """Return the first difference from the undisturbed runs; empty if there is none."""
        lines = []
        for start in training.starts:
            lines += start.lines
        printed = self.printed.of(lines)
        # A step whose snapshot was whole just before the end of a start is not trained again, and may not be printed.
        maybe_not_printed = set()
        for start in training.starts[:-1]:
            last_step = max(start.steps, default=0)
            maybe_not_printed.add(last_step)
            later_steps = [step for step in self.steps if step > last_step]
            maybe_not_printed.update(later_steps[:1])
        for numbers, line in self.printed.lines.items():
            step = step_of(line)
            if numbers in printed or step in maybe_not_printed:
                continue
            text = f"it never printed `{line}`"
            for other_line in reversed(printed.values()):
                if step is not None and step_of(other_line) == step:
                    return f"{text}, but `{other_line}`"
            return text
        return difference(self.files, digests(training.files, self._args.result))

    def _steps_again(self, training: Training) -> int | None:
        if not self.steps:
            return None
        stride = 1
        if len(self.steps) > 1:
            stride = self.steps[1] - self.steps[0]
        again = 0
        reached = -1
        for start in training.starts:
            repeated_steps = {step for step in start.steps if step <= reached}
            again += stride * len(repeated_steps)
            reached = max([reached, *start.steps])
        return again

    def _judge(self, training: Training, trial: Trial, changed: str) -> None:
        again = trial.steps_again or 0
        limit = self._args.may_lose
        from_beginning = 0
        """Starts that trained the first step."""
        for start in training.starts:
            if start.steps and start.steps[:1] == self.steps[:1]:
                from_beginning += 1
        if changed:
            trial.verdict = "SILENT_DIVERGENCE"
            trial.reason = changed
        elif limit is not None and again > limit:
            trial.verdict = "LOST_WORK"
            trial.reason = f"{count_of(again, 'step')} had to be repeated, {limit} are allowed (--may-lose)"
        # After a flip, the only snapshot may have been the one that was damaged.
        elif limit is None and again and trial.fault != "flip" and from_beginning > 1:
            trial.verdict = "LOST_WORK"
            trial.reason = f"it started over: {count_of(again, 'step')} had to be repeated"


# ---------------------------------------------------------------- the command


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the command twice without a fault, then once with each fault. Blocks. Returns 1 if a verdict is not PASS.

    Raises: ConfigError.
    """
    root = pathlib.Path(LOGS).resolve()
    root.mkdir(exist_ok=True)
    place = pathlib.Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=root))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as with Ctrl-C, no process is left
    chaos = Chaos(args, place)
    _say_undisturbed(chaos, output)
    trials = []
    left_out = {}
    for fault in args.faults:
        reason = chaos.impossible(fault)
        if reason:
            left_out[fault] = reason
            output.say(f"{fault} left out: {reason}", "yellow")
            continue
        trial = chaos.disturb(fault)
        trials.append(trial)
        output.say(_line(trial), _STYLES.get(trial.verdict, "bold red"))
    if not trials:
        raise ConfigError("none of these faults is possible here: --faults names others")
    all_pass = True
    most_again = 0
    for trial in trials:
        most_again = max(most_again, trial.steps_again or 0)
        if trial.verdict != "PASS":
            all_pass = False
            output.line(f"{trial.verdict}: {trial.reason}", "bold")
            output.line(f"  {_ADVICE[trial.verdict]}")
            output.line(f"  log: {trial.log}")
            output.line(f"  again: --faults {trial.fault} --seed {args.seed}")
    if all_pass:
        output.line(
            f"PASS: {count_of(len(trials), 'fault')}, each ended with the same result; "
            f"at most {count_of(most_again, 'step')} trained again",
            "bold green",
        )
    return output.result(
        ok=all_pass,
        seconds=chaos.seconds,
        steps=max(chaos.steps, default=None),
        compared={"lines": len(chaos.printed.lines), "files": list(chaos.files)},
        runs=[asdict(trial) for trial in trials],
        left_out=left_out,
        directory=str(place),
    )


def run_demo(args: argparse.Namespace, output: Output) -> int:
    """Run chaos with a small transformer, in a directory that is deleted on success. Blocks for a minute or two.

    It is killed with and without its keeper. Returns 1 if a result differs. Raises: ConfigError.
    """
    args.words = [sys.executable, "-m", "lazysnap.cli.demo_training"]
    args.faults = ["kill", "both"]
    args.seed = 1603
    args.result = None
    args.may_lose = None
    args.deadline = None
    output.say(
        "a small transformer is trained, with each step in memory and each 20th on disk, and killed with SIGKILL"
    )
    directory_before = os.getcwd()
    place = tempfile.mkdtemp(prefix="lazysnap-demo-")
    os.chdir(place)
    try:
        code = run(args, output)
    finally:
        os.chdir(directory_before)
    if code == OK:
        shutil.rmtree(place)
    return code


def parse_faults(text: str) -> list[str]:
    """Return the faults in a list such as ``kill,flip``. Raises: argparse.ArgumentTypeError."""
    names = text.split(",")
    for name in names:
        if name not in FAULTS:
            raise argparse.ArgumentTypeError(f"{name}: no such fault; there are {', '.join(FAULTS)}")
    return names


def _say_undisturbed(chaos: Chaos, output: Output) -> None:
    steps = "no lines such as `step 12` whose number only grows"
    if chaos.steps:
        steps = f"{max(chaos.steps)} steps"
    output.say(f"undisturbed, twice: {chaos.seconds:.1f} s, {steps}", "bold")
    if chaos.linked:
        output.say(f"linked, not copied, since they are large: {', '.join(chaos.linked)}", "yellow")
    for name in chaos.files:
        output.say(f"compared: {name}")
    if chaos.printed.lines:
        *_, last = chaos.printed.lines.values()
        shown = without_end(last, 44)
        output.say(f"compared: {count_of(len(chaos.printed.lines), 'line')} that it prints, the last is `{shown}`")


def _line(trial: Trial) -> str:
    text = f"{trial.verdict:<5} "
    if trial.at_step is not None:
        text += f"at step {trial.at_step}: "
    text += f"{trial.done}; "
    if trial.steps_again is not None:
        text += f"{count_of(trial.steps_again, 'step')} again, "
    text += f"{count_of(trial.restarts, 'restart')}, {trial.seconds:.1f} s"
    if trial.reason:
        text += f": {trial.reason}"
    return text
