"""``lazysnap chaos``: run the user's own training under seeded faults, and compare it with an undisturbed one."""

import argparse
import contextlib
import itertools
import pathlib
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from lazysnap.cli.chaos_training import Training
from lazysnap.cli.output import Output, command_words, count_of
from lazysnap.errors import ConfigError, FormatError, LazySnapError
from lazysnap.shard.checksum import digest
from lazysnap.shard.layout import Layout
from lazysnap.shard.limits import MAX_HEADER_BYTES
from lazysnap.shard.names import SnapshotName, is_directory_of_ours, parse_file_name

STEP_LINE = r"(?i)^(?!.*(?:lazysnap|resum|restor|start|load|sav)).*?\bstep\W{0,3}(\d+)"
"""Lines that speak of a restart are none of a step that was trained."""
_LOOK_S = 0.5
_GRACE_S = 30.0
_LONGEST_WINDOW_S = 30.0
_TRIES = 3
_TORCH_FILE = b"PK\x03\x04"


class ChaosFailed(LazySnapError):
    """The program cannot be judged: undisturbed it fails, or gives one result today and another tomorrow."""


Verdict = Literal["PASS", "LOST_WORK", "SILENT_DIVERGENCE", "HARD_FAIL"]
"""The effect of a fault on a training, from good to bad."""
_STYLES = {"PASS": "green", "LOST_WORK": "yellow"}
_NEXT = {
    "LOST_WORK": "it resumed further back than allowed: see in its log why, or allow more steps with --may-lose",
    "SILENT_DIVERGENCE": "something that decides the result was not restored (optimizer, schedule, random "
    "generators, position in the data), or a damaged file was believed",
    "HARD_FAIL": "the same command, started again, must resume by itself, also where its newest checkpoint is "
    "torn or damaged: its log shows where it failed",
}


@dataclass(frozen=True)
class Undisturbed:
    """The training to compare with."""

    seconds: float
    steps: list[int]
    """The steps that it printed."""
    spacing_s: float
    """Time from one printed step to the next."""
    stride: int
    """Steps from one printed step to the next."""
    result: dict[str, str]
    names: list[str]
    has_keeper: bool
    has_snapshots: bool


@dataclass
class Outcome:
    """One training under one fault."""

    fault: str
    seed: int
    what: str = ""
    at_step: int | None = None
    verdict: Verdict = "PASS"
    reason: str = ""
    steps_again: int | None = None
    """Steps that were trained before the fault, and again after it; ``None``: no steps are printed."""
    restarts: int = 0
    restart_s: float | None = None
    """Time from the first restart to the first step that it printed."""
    seconds: float = 0.0
    log: str = ""


class _Chaos:
    """All trainings of this command."""

    def __init__(self, args: argparse.Namespace, training: Callable[[str], Training]) -> None:
        """``training``: makes one, in a directory of that name. Blocks. Raises: as ``_run_undisturbed``."""
        self._args = args
        self._training = training
        self.undisturbed = self._run_undisturbed("undisturbed")

    def _run_undisturbed(self, name: str) -> Undisturbed:
        """Run the command once. Blocks. Raises: ChaosFailed; ConfigError, if it leaves nothing in its directory."""
        has_keeper, began_s = False, time.monotonic()
        until_s = began_s + (self._args.deadline or float("inf"))
        with self._training(name) as training:
            training.start()
            while not training.wait_ended(min(until_s, time.monotonic() + _LOOK_S)):
                has_keeper = has_keeper or bool(training.keepers())
                if time.monotonic() > until_s:
                    raise ChaosFailed(f"without a fault the command takes more than --deadline {self._args.deadline} s")
            seconds = time.monotonic() - began_s
            if training.code:
                raise ChaosFailed(
                    f"without a fault the command ended with code {training.code}; its last lines, of {training.log}:\n"
                    + training.last_lines(15)
                )
        files = result_files(training.files, self._args.result)
        if not files:
            raise ConfigError(_nothing_left(training, self._args.result))
        has_snapshots = bool(newest_snapshot(training.files))
        result, names = digests(files), [str(path.relative_to(training.files)) for path in files]
        shutil.rmtree(training.files)
        times_s, steps = training.starts[0].times_s, training.starts[0].steps
        gaps = [after - before for before, after in itertools.pairwise(times_s)]
        stride = min((after - before for before, after in itertools.pairwise(sorted(set(steps)))), default=1)
        if any(after < before - 2 * stride for before, after in itertools.pairwise(steps)):
            steps = []  # they begin anew with each epoch; lines of two ranks change places by one at most
        spacing_s = statistics.median(gaps or [0.0])
        return Undisturbed(seconds, steps, spacing_s, stride, result, names, has_keeper, has_snapshots)

    def disturbed(self, number: int, fault: str) -> Outcome:
        """Run the command under a fault, start it again until it ends well, and judge. Blocks."""
        outcome = Outcome(fault, self._args.seed + number)
        for tries in range(1, _TRIES + 1):
            name = f"{number + 1}-{fault}" + f"-again{tries}" * (tries > 1)
            with self._training(name) as training:
                began_s = time.monotonic()
                if self._strike(training, outcome, 1 / tries):
                    self._go_on(training, outcome)
                    outcome.seconds, outcome.log = time.monotonic() - began_s, str(training.log)
                    break
            shutil.rmtree(training.place)
        else:
            raise ChaosFailed(f"the command ended {_TRIES} times before {fault} could strike: give it more steps")
        if outcome.verdict == "PASS":
            self._compare(training, outcome)
        if outcome.verdict == "PASS":
            shutil.rmtree(training.files)
        return outcome

    def _strike(self, training: Training, outcome: Outcome, share: float) -> bool:
        """Start the training, and strike at a moment in that share of it. False if it ended before."""
        dice, base = random.Random(f"{outcome.fault} {outcome.seed}"), self.undisturbed
        where, late, length = dice.random() * share, dice.random(), dice.uniform(0.05, 0.15)
        training.start()
        steps = training.starts[0].steps
        if printed := base.steps[:-1]:
            wanted = printed[int(where * len(printed))]
            training.wait(lambda: bool(steps) and steps[-1] >= wanted, self._until_s())
            training.wait_ended(time.monotonic() + late * base.spacing_s)
        else:
            training.wait_ended(time.monotonic() + (0.1 + 0.85 * where) * base.seconds)
        if training.code is not None:
            return False
        outcome.at_step = steps[-1] if steps else None
        window_s = min(_LONGEST_WINDOW_S, max(0.1, length * base.seconds))
        patience_s = _LONGEST_WINDOW_S + 2 * base.seconds  # it ends by itself before, unless it is much slower now
        outcome.what = FAULTS[outcome.fault](Strike(training, dice, window_s, patience_s))
        return True

    def _until_s(self) -> float:
        return time.monotonic() + (self._args.deadline or 60.0 + 5 * self.undisturbed.seconds)

    def _go_on(self, training: Training, outcome: Outcome) -> None:
        """Start the command again until it ends well; count the steps that it trains again."""
        until_s, is_cut = self._until_s(), outcome.fault == "term"
        while training.wait_ended(until_s):
            # A preempted program may end well, in the middle of its training.
            if training.code == 0 and not (is_cut and self._difference(training)):
                break
            if outcome.restarts == self._args.max_restarts:
                outcome.verdict = "HARD_FAIL"
                outcome.reason = f"code {training.code} also after {count_of(outcome.restarts, 'restart')}: "
                outcome.reason += training.last_lines(1)
                return
            is_cut = False
            outcome.restarts += 1
            training.start()
        if training.code is None:
            outcome.verdict, outcome.reason = "HARD_FAIL", "it did not come to its end in time (--deadline)"
        if self.undisturbed.steps:
            outcome.steps_again = _steps_again(training, outcome, self.undisturbed.stride)
            outcome.restart_s = next((one.times_s[0] - one.began_s for one in training.starts[1:] if one.steps), None)

    def _compare(self, training: Training, outcome: Outcome) -> None:
        outcome.reason = self._difference(training)
        if outcome.reason:
            if self._instability:
                raise ChaosFailed(
                    f"two undisturbed runs of the command differ ({self._instability}): nothing can be said of faults. "
                    "Seed all its random generators, or choose with --result a file that is always the same"
                )
            outcome.verdict = "SILENT_DIVERGENCE"
            return
        limit = self._may_lose(outcome.fault)
        if limit is not None and (outcome.steps_again or 0) > limit:
            outcome.verdict = "LOST_WORK"
            outcome.reason = f"{outcome.steps_again} steps had to be trained again, at most {limit} are allowed"

    def _may_lose(self, fault: str) -> int | None:
        """Return the number of steps that may be trained again; ``None``: any, it depends on the level's interval."""
        given: int | None = self._args.may_lose
        if given is not None:
            return given
        if fault in MEMORY_IS_LOST:
            return None
        tenth = max(self.undisturbed.steps, default=0) // 10
        return max(tenth, self.undisturbed.stride)

    def _difference(self, training: Training) -> str:
        return difference(self.undisturbed.result, digests(result_files(training.files, self._args.result)))

    @cached_property
    def _instability(self) -> str:
        """The difference of a second undisturbed training from the first; empty if there is none."""
        return difference(self.undisturbed.result, self._run_undisturbed("undisturbed-again").result)


def _nothing_left(training: Training, pattern: str | None) -> str:
    if pattern is not None:
        return f"--result {pattern} matches no file that the command left in {training.files}"
    return (
        "the command left no snapshot of lazysnap in its directory, so there is nothing to compare: name the files of "
        "its result, as in `lazysnap chaos --result model.pt -- python train.py`"
    )


def _steps_again(training: Training, outcome: Outcome, stride: int) -> int:
    """Return how many steps were trained again, by the steps that each start printed. Pure."""
    first, *later = (start.steps for start in training.starts)
    again = 0
    reached = max(first, default=0)
    for steps in later:
        again += stride * len({step for step in steps if step <= reached})
        reached = max(reached, *steps, 0)
    return again


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the command undisturbed, then once under each fault. Blocks. Returns 1 if a verdict is not PASS.

    Raises: ConfigError; ChaosFailed.
    """
    if args.runs is not None and args.runs < 1:
        raise ConfigError(f"--runs must be 1 or more, got {args.runs}")
    words, step_line = command_words(args, "python train.py"), _step_line(args.step_regex)
    place = _new_directory(args.dir)

    def training(name: str) -> Training:
        made = Training(words, step_line, place / name)
        if not any("{dir}" in word for word in words):
            _link_working_directory(made.files, args.result)
            made.directory = made.files
        return made

    with _ended_by_signals():
        chaos = _Chaos(args, training)
        base = chaos.undisturbed
        left_out = {}
        for name in args.faults:
            if name in NEED_KEEPER and not base.has_keeper:
                left_out[name] = "the command has no keeper of lazysnap"
            if name == "flip" and not base.has_snapshots:
                left_out[name] = "the command stores no snapshot of lazysnap in its directory"
        none = "no steps printed whose number only grows (--step-regex)"
        steps = f"{max(base.steps)} steps" if base.steps else none
        output.say(f"undisturbed: {base.seconds:.1f} s, {steps}, result {', '.join(base.names)}", "bold")
        for name, reason in left_out.items():
            output.say(f"{name} left out: {reason}", "yellow")
        faults = [name for name in args.faults if name not in left_out]
        if not faults:
            raise ConfigError("none of these faults is possible here: --faults names others")
        outcomes = []
        for number, fault in enumerate(itertools.islice(itertools.cycle(faults), args.runs or len(faults))):
            outcomes.append(chaos.disturbed(number, fault))
            output.say(_line(outcomes[-1]), _STYLES.get(outcomes[-1].verdict, "bold red"))
    _show(outcomes, output)
    return output.result(
        ok=all(outcome.verdict == "PASS" for outcome in outcomes),
        undisturbed={"seconds": base.seconds, "steps": max(base.steps, default=None), "result": base.names},
        runs=list(map(asdict, outcomes)),
        left_out=left_out,
        directory=str(place),
    )


def _step_line(regex: str) -> "re.Pattern[str]":
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise ConfigError(f"--step-regex {regex}: {error}") from error
    if not pattern.groups:
        raise ConfigError(f"--step-regex {regex}: the step must be a group, as in 'step (\\d+)'")
    return pattern


def _new_directory(name: str | None) -> pathlib.Path:
    if name is None:  # two may begin in the same second
        root = pathlib.Path("lazysnap-chaos").resolve()
        root.mkdir(exist_ok=True)
        return pathlib.Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=root))
    place = pathlib.Path(name).resolve()
    if place.exists() and any(place.iterdir()):
        raise ConfigError(f"--dir {place} is not empty: name a new directory")
    place.mkdir(parents=True, exist_ok=True)
    return place


def _link_working_directory(files: pathlib.Path, pattern: str | None) -> None:
    """Make links in the directory of a run to all that the command may read in the current directory.

    Directories with snapshots are left out, so that the run begins anew, and so are files that match ``pattern``.
    """
    for path in pathlib.Path.cwd().iterdir():
        below = [*path.glob("step-*"), *path.glob("*/step-*")]
        has_snapshots = any(is_directory_of_ours(directory.name) for directory in below)
        if not has_snapshots and path not in files.parents:
            (files / path.name).symlink_to(path)
    if pattern is not None:
        for path in list(files.glob(pattern)):
            if path.is_symlink():
                path.unlink()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this command as Ctrl-C does: no process stays."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _line(outcome: Outcome) -> str:
    where = "" if outcome.at_step is None else f"at step {outcome.at_step}: "
    again = "" if outcome.steps_again is None else f"{count_of(outcome.steps_again, 'step')} again, "
    ended = f"{again}{count_of(outcome.restarts, 'restart')}, {outcome.seconds:.1f} s"
    reason = f": {outcome.reason}" if outcome.reason else ""
    return f"{outcome.verdict:<5} {where}{outcome.what}; {ended}{reason}"


def _show(outcomes: list[Outcome], output: Output) -> None:
    rows: list[list[object]] = []
    for one in outcomes:
        verdict = output.cell(one.verdict, _STYLES.get(one.verdict, "bold red"))
        cells = [one.fault, one.seed, one.at_step, verdict, one.steps_again, one.restarts, f"{one.seconds:.1f}"]
        rows.append(["-" if cell is None else cell for cell in cells])
    columns = ("fault", "seed>", "at step>", "verdict", "steps again>", "restarts>", "seconds>")
    output.show(output.table("", *columns, rows=rows))
    bad = sorted((one for one in outcomes if one.verdict != "PASS"), key=lambda one: list(_NEXT).index(one.verdict))
    for kind, ones in itertools.groupby(bad, key=lambda one: one.verdict):
        output.line(f"{kind}: {_NEXT[kind]}", "bold")
        for one in ones:
            output.line(f"  {one.fault}: {one.reason}")
            output.line(f"    log: {one.log}")
            output.line(f"    again: --faults {one.fault} --seed {one.seed} --runs 1")
    if not bad:
        again = [one.steps_again for one in outcomes if one.steps_again is not None]
        text = f"; at most {count_of(max(again), 'step')} trained again" if again else ""
        output.line(f"PASS: {count_of(len(outcomes), 'fault')}, each ended with the same result{text}", "bold green")


# ---------------------------------------------------------------- faults


@dataclass(frozen=True)
class Strike:
    """The needs of a fault."""

    training: Training
    dice: random.Random
    window_s: float
    """Duration of a fault that passes."""
    patience_s: float
    """Longest time until there is a snapshot to damage."""

    def pause(self, longest_s: float) -> float:
        """Block until the window is over or the command ended. Return the seconds."""
        began_s = time.monotonic()
        self.training.wait_ended(began_s + longest_s)
        return time.monotonic() - began_s


def _kill(strike: Strike) -> str:
    strike.training.end(strike.training.trainers)
    return "training killed"


def _keeper(strike: Strike) -> str:
    pids = strike.training.keepers()
    strike.training.signal(signal.SIGKILL, pids)
    return "keeper killed" if pids else "no keeper ran at that moment"


def _both(strike: Strike) -> str:
    strike.training.end(strike.training.all)
    return "training and keeper killed"


def _stop(strike: Strike, who: str, pids: list[int]) -> str:
    strike.training.signal(signal.SIGSTOP, pids)
    try:
        return f"{who} stopped for {strike.pause(strike.window_s):.1f} s"
    finally:
        strike.training.signal(signal.SIGCONT, pids)


def _term(strike: Strike) -> str:
    strike.training.signal(signal.SIGTERM, strike.training.trainers())
    took_s = strike.pause(_GRACE_S)
    code = strike.training.code
    strike.training.end(strike.training.trainers)
    ended = f"it ended with code {code} after {took_s:.1f} s" if code is not None else f"killed after {took_s:.0f} s"
    return f"SIGTERM; {ended}"


def _flip(strike: Strike) -> str:
    """Damage a file of the newest snapshot. Damage is found by reading, so nothing may be left in memory."""
    files = strike.training.files
    strike.training.wait(lambda: bool(newest_snapshot(files)), time.monotonic() + strike.patience_s)
    has_ended = strike.training.code is not None
    strike.training.end(strike.training.all)
    snapshot = newest_snapshot(files)
    if has_ended or not snapshot:  # after the end it would be the result
        return f"{'it ended' if has_ended else 'all killed'}; there was no snapshot to damage"
    path = strike.dice.choice(snapshot)
    at = strike.dice.randrange(path.stat().st_size)
    bit = strike.dice.randrange(8)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ 1 << bit
        file.seek(at)
        file.write(bytes([byte]))
    return f"all killed; bit {bit} of byte {at} of {path.relative_to(files)} flipped"


FAULTS: dict[str, Callable[[Strike], str]] = {
    "kill": _kill,
    "keeper": _keeper,
    "both": _both,
    "stop": lambda strike: _stop(strike, "training", strike.training.trainers()),
    "stop-keeper": lambda strike: _stop(strike, "keeper", strike.training.keepers()),
    "term": _term,
    "flip": _flip,
}
NEED_KEEPER = ("keeper", "both", "stop-keeper")
MEMORY_IS_LOST = ("both", "flip")


def parse_faults(text: str) -> list[str]:
    """Return the faults in a list such as ``kill,flip``. Raises: argparse.ArgumentTypeError."""
    names = text.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such fault; there are {', '.join(FAULTS)}")
    return names


# ---------------------------------------------------------------- results


def newest_snapshot(directory: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of the newest snapshot of lazysnap below a directory; empty if there is none."""
    snapshots: dict[SnapshotName, list[pathlib.Path]] = {}
    paths: list[pathlib.Path] = []
    with contextlib.suppress(FileNotFoundError):  # the training deletes snapshots, too
        paths += directory.rglob("node-*")
    for path in sorted(paths):
        name = SnapshotName.parse(path.parent.name)
        if name is not None and parse_file_name(path.name) is not None:
            snapshots.setdefault(name, []).append(path)
    return snapshots[max(snapshots)] if snapshots else []


def result_files(directory: pathlib.Path, pattern: str | None) -> list[pathlib.Path]:
    """Return the files of the result: those that match ``pattern``, else the tensors of the newest snapshot."""
    if pattern is None:
        return [path for path in newest_snapshot(directory) if path.suffix == ".safetensors"]
    return [path for path in sorted(directory.glob(pattern)) if path.is_file()]


def digests(paths: list[pathlib.Path]) -> dict[str, str]:
    """Return the digest of each tensor by its name; of a file in which no tensors are found, of its bytes."""
    found: dict[str, str] = {}
    for number, path in enumerate(paths, start=1):
        name = path.name if len(paths) == 1 else f"{path.name} ({number} of {len(paths)})"
        tensors = dict(_tensors(path)) or {"": digest(path.read_bytes())}
        found |= {f"{tensor} in {name}" if tensor else name: value for tensor, value in tensors.items()}
    return found


def difference(wanted: dict[str, str], got: dict[str, str]) -> str:
    """Say what differs; empty if both are equal in every bit."""
    if not got:
        return "no file of the result is there"
    missing = [name for name in wanted if name not in got] + [name for name in got if name not in wanted]
    if missing:
        return f"{missing[0]} is only in one of both results"
    others = [name for name in wanted if wanted[name] != got[name]]
    return f"{len(others)} of {len(wanted)} differ, the first is {others[0]}" if others else ""


def _tensors(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        start = file.read(8)
    if path.suffix == ".safetensors" and len(start) == 8:
        yield from _of_safetensors(path, int.from_bytes(start, "little"))
    elif start.startswith(_TORCH_FILE) and path.suffix != ".npz":
        yield from _of_torch(path)


def _of_safetensors(path: pathlib.Path, length: int) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        try:
            layout = Layout.parse(file.read(8 + min(length, MAX_HEADER_BYTES)), path.stat().st_size, str(path))
        except FormatError:
            return
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            file.seek(offset)
            yield spec.name, f"{spec.dtype} {spec.shape} {digest(file.read(spec.nbytes))}"


def _of_torch(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    import pickle

    import torch

    def leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, torch.Tensor):
            data = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
            yield name, f"{value.dtype} {tuple(value.shape)} {digest(data.data)}"
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from leaves(item, f"{name}.{key}" if name else str(key))

    try:
        yield from leaves(torch.load(path, map_location="cpu", weights_only=True), "")
    except (RuntimeError, pickle.UnpicklingError):  # of types that weights_only refuses
        return
