"""``lazysnap chaos``: run the user's own training under faults, and compare it with two undisturbed runs."""

import argparse
import itertools
import pathlib
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Literal

from lazysnap.cli.chaos_training import LOGS, CommandStart, Training, copy_directory, step_of
from lazysnap.cli.output import Output, command_words, count_of, without_end
from lazysnap.errors import ConfigError, LazySnapError
from lazysnap.shard.checksum import digest

FAULTS = ("kill", "keeper", "both", "stop", "stop-keeper", "term", "flip")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_CLOCK = re.compile(r"\d{4}-\d\d-\d\d|\d\d?:\d\d(?::\d\d)?(?:[.,]\d+)?")
_MAX_RESTARTS = 5
_LONGEST_STOP_S = 30.0

Verdict = Literal["PASS", "LOST_WORK", "SILENT_DIVERGENCE", "HARD_FAIL"]
_STYLES = {"PASS": "green", "LOST_WORK": "yellow"}
_ADVICE = {
    "LOST_WORK": "the restart found no checkpoint, or an old one: its log says which",
    "SILENT_DIVERGENCE": "something that decides the next step is not restored (a batch drawn ahead, an average of the "
    "weights, a random generator, a position in the data), or a damaged file was believed",
    "HARD_FAIL": "the same command, started again, must resume by itself, also if its newest checkpoint is damaged: "
    "its log shows where it failed",
}


class ChaosFailed(LazySnapError):
    """The program cannot be judged: it fails without a fault, or no two of its runs are alike."""


# ---------------------------------------------------------------- the result


class Printed:
    """The numbers that two undisturbed runs printed alike: no times, rates or process ids."""

    def __init__(self, first: list[str], second: list[str]) -> None:
        """``first``, ``second``: all lines of the runs."""
        others = _columns(second)
        self._alike = {column for column, numbers in _columns(first).items() if others.get(column) == numbers}
        self.lines = self.of(first)

    def of(self, lines: list[str]) -> dict[tuple[str, ...], str]:
        """Return the lines by what is compared of them."""
        compared = {}
        for line in lines:
            form, numbers = _split(line)
            alike = [number for place, number in enumerate(numbers) if (form, place) in self._alike]
            if alike:
                key = (form, *alike)
                compared[key] = line.strip()
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
    for path in sorted(files.glob(pattern)) if pattern is not None else ():
        name = path.relative_to(files)
        data = path.read_bytes()
        tensors = _tensors(path) if data.startswith(b"PK\x03\x04") else {}
        values |= {f"{tensor} of {name}": value for tensor, value in tensors.items()} or {str(name): digest(data)}
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
            data = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            values[_pytree.keystr(key)] = f"{leaf.dtype} {tuple(leaf.shape)} {digest(data)}"
    return values


def difference(wanted: dict[str, str], got: dict[str, str]) -> str:
    """Say what differs; empty if both are equal in every bit."""
    changed = [name for name in sorted(wanted | got) if wanted.get(name) != got.get(name)]
    return f"{len(changed)} of {len(wanted)} differ, the first is {changed[0]}" if changed else ""


# ---------------------------------------------------------------- verdicts


@dataclass
class Trial:
    """One training under one fault."""

    fault: str
    done: str = ""
    at_step: int | None = None
    verdict: Verdict = "PASS"
    reason: str = ""
    steps_again: int | None = None
    """Steps that were trained before the fault, and again after it; ``None``: no steps are printed."""
    restarts: int = 0
    seconds: float = 0.0
    log: str = ""


class Chaos:
    """All runs of a command."""

    def __init__(self, args: argparse.Namespace, place: pathlib.Path) -> None:
        """Run it twice undisturbed. Blocks. Raises: ConfigError; ChaosFailed, if it cannot be judged."""
        self._args = args
        self._words = command_words(args, "python train.py")
        self._place = place
        self.linked: list[str] = []
        self.has_keeper = False
        self.has_snapshots = False
        began_s = time.monotonic()
        first, self.files = self._run_undisturbed("undisturbed")
        self.seconds = time.monotonic() - began_s
        second, files = self._run_undisturbed("undisturbed-again")
        self.steps = first.steps
        if any(after < before for before, after in itertools.pairwise(first.steps)):
            self.steps = []  # they begin anew with each epoch
        gaps_s = [after - before for before, after in itertools.pairwise(first.times_s)]
        self._step_s = statistics.median(gaps_s or [0.0])
        if args.result is not None and not self.files:
            raise ConfigError(f"--result {args.result} matches no file that the command left in its directory")
        if changed := difference(self.files, files):
            raise ChaosFailed(f"two undisturbed runs differ: {changed}; seed all random generators of the command")
        self.printed = Printed(first.lines, second.lines)
        has_values = any(len(key) > 2 or step_of(line) is None for key, line in self.printed.lines.items())
        if not self.files and not has_values:
            raise ChaosFailed(
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
                raise ChaosFailed(
                    f"without a fault the command ended with code {training.code}; its last lines, of {training.log}:\n"
                    + training.last_lines(15)
                )
        self.has_snapshots = bool(training.newest_snapshot())
        files = digests(training.files, self._args.result)
        shutil.rmtree(training.files)
        return training.starts[0], files

    def impossible(self, fault: str) -> str:
        """Say why a fault is not possible; empty if it is."""
        if fault in ("keeper", "both", "stop-keeper") and not self.has_keeper:
            return "the command has no keeper of lazysnap"
        if fault == "flip" and not self.has_snapshots:
            return "the command stores no snapshot of lazysnap in its directory"
        return ""

    def disturb(self, fault: str) -> Trial:
        """Run the command under a fault, start it again until it ends well, and judge. Blocks. Raises: ChaosFailed."""
        trial = Trial(fault)
        with self._training(fault) as training:
            began_s = time.monotonic()
            training.start()
            self._strike(training, trial)
            self._finish(training, trial)
            trial.seconds = time.monotonic() - began_s
            trial.log = str(training.log)
        if trial.verdict == "PASS":
            shutil.rmtree(training.files)
        return trial

    def _strike(self, training: Training, trial: Trial) -> None:
        """Strike at a moment that the seed chooses, not before a snapshot is stored and not in the last fifth."""
        dice = random.Random(f"{trial.fault} {self._args.seed}")
        share = 0.8 * dice.random()
        late_s = dice.random() * self._step_s
        steps = training.starts[0].steps
        if self.steps:
            wanted = self.steps[int(share * len(self.steps))]
            training.wait(self._deadline_s, lambda: bool(steps) and steps[-1] >= wanted)
        else:
            training.wait(share * self.seconds)
        if self.has_snapshots:
            training.wait(self._deadline_s, lambda: bool(training.newest_snapshot()))
        training.wait(late_s)
        if training.code is not None:
            raise ChaosFailed(f"the command ended before {trial.fault} could strike: give it more steps")
        trial.at_step = steps[-1] if steps else None
        trial.done = training.strike(trial.fault, dice, min(_LONGEST_STOP_S, self.seconds / 10))

    @property
    def _deadline_s(self) -> float:
        return self._args.deadline or 60.0 + 5 * self.seconds

    def _finish(self, training: Training, trial: Trial) -> None:
        """Start the command again until it ends well, and judge."""
        while training.wait(self._deadline_s):
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
        trial.reason = "it did not come to its end in time (--deadline)"

    def _difference(self, training: Training) -> str:
        """Say where a training differs from the undisturbed ones; empty if it does not."""
        printed = self.printed.of([line for start in training.starts for line in start.lines])
        # A step whose snapshot was whole just before the end of a start is not trained again, and may not be printed.
        not_printed = set()
        for start in training.starts[:-1]:
            last_step = max(start.steps, default=0)
            not_printed.update([last_step, *[step for step in self.steps if step > last_step][:1]])
        for numbers, line in self.printed.lines.items():
            step = step_of(line)
            if numbers not in printed and (step is None or step not in not_printed):
                others = [other for other in printed.values() if step is not None and step_of(other) == step]
                instead = f", but `{others[-1]}`" if others else ""
                return f"it never printed `{line}`{instead}"
        return difference(self.files, digests(training.files, self._args.result))

    def _steps_again(self, training: Training) -> int | None:
        if not self.steps:
            return None
        stride = self.steps[1] - self.steps[0] if len(self.steps) > 1 else 1
        again = 0
        reached = 0
        for start in training.starts:
            again += stride * len({step for step in start.steps if step <= reached})
            reached = max(reached, *start.steps, 0)
        return again

    def _judge(self, training: Training, trial: Trial, changed: str) -> None:
        again = trial.steps_again or 0
        limit = self._args.may_lose
        first_steps = [start.steps[0] for start in training.starts if start.steps]
        if changed:
            trial.verdict = "SILENT_DIVERGENCE"
            trial.reason = changed
        elif limit is not None and again > limit:
            trial.verdict = "LOST_WORK"
            trial.reason = f"{count_of(again, 'step')} had to be repeated, {limit} are allowed (--may-lose)"
        # After a flip, the only snapshot may have been the one that was damaged.
        elif limit is None and again and trial.fault != "flip" and first_steps.count(self.steps[0]) > 1:
            trial.verdict = "LOST_WORK"
            trial.reason = f"it began anew: {count_of(again, 'step')} had to be repeated"


# ---------------------------------------------------------------- the command


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the command twice undisturbed, then once under each fault. Blocks. Returns 1 if a verdict is not PASS.

    Raises: ConfigError; ChaosFailed.
    """
    root = pathlib.Path(LOGS).resolve()
    root.mkdir(exist_ok=True)
    place = pathlib.Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=root))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C does, they leave no process
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
    bad = [trial for trial in trials if trial.verdict != "PASS"]
    for trial in bad:
        output.line(f"{trial.verdict}: {trial.reason}", "bold")
        output.line(f"  {_ADVICE[trial.verdict]}")
        output.line(f"  log: {trial.log}")
        output.line(f"  again: --faults {trial.fault} --seed {args.seed}")
    if not bad:
        again = max(trial.steps_again or 0 for trial in trials)
        output.line(
            f"PASS: {count_of(len(trials), 'fault')}, each ended with the same result; "
            f"at most {count_of(again, 'step')} trained again",
            "bold green",
        )
    return output.result(
        ok=not bad,
        seconds=chaos.seconds,
        steps=max(chaos.steps, default=None),
        compared={"lines": len(chaos.printed.lines), "files": list(chaos.files)},
        runs=[asdict(trial) for trial in trials],
        left_out=left_out,
        directory=str(place),
    )


def parse_faults(text: str) -> list[str]:
    """Return the faults in a list such as ``kill,flip``. Raises: argparse.ArgumentTypeError."""
    names = text.split(",")
    for name in names:
        if name not in FAULTS:
            raise argparse.ArgumentTypeError(f"{name}: no such fault; there are {', '.join(FAULTS)}")
    return names


def _say_undisturbed(chaos: Chaos, output: Output) -> None:
    steps = f"{max(chaos.steps)} steps" if chaos.steps else "no lines such as `step 12` whose number only grows"
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
    where = "" if trial.at_step is None else f"at step {trial.at_step}: "
    again = "" if trial.steps_again is None else f"{count_of(trial.steps_again, 'step')} again, "
    reason = f": {trial.reason}" if trial.reason else ""
    restarts = count_of(trial.restarts, "restart")
    return f"{trial.verdict:<5} {where}{trial.done}; {again}{restarts}, {trial.seconds:.1f} s{reason}"
