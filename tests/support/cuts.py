"""Starts of a training that writes a trace, and the trace of a run that was cut into several starts."""

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.zygote import Child, Zygote


@dataclass(frozen=True)
class Start:
    """How one start of one process went."""

    status: int
    head: dict
    """Where it resumed: the first line that it wrote."""
    lines: list[dict]
    text: str
    """What it said."""


@dataclass(frozen=True)
class Running:
    """A process that was started, and its files ``trace`` and ``output``."""

    child: Child
    trace: Path
    output: Path

    def wait(self) -> Start:
        """Its end."""
        status, text = self.child.get(), self.output.read_text()
        lines = [json.loads(line) for line in self.trace.read_text().splitlines()] if self.trace.exists() else []
        assert lines, text
        return Start(status, lines[0], lines[1:], text)


def launch(
    zygote: Zygote, arguments: Sequence[str], directory: Path, env: Mapping[str, str], suffix: str = ""
) -> Running:
    """Start the script ``arguments[0]``, which writes ``directory/trace``: one line of JSON for each thing it does."""
    directory.mkdir(exist_ok=True)
    trace, output = directory / f"trace{suffix}", directory / f"output{suffix}"
    trace.unlink(missing_ok=True)
    return Running(zygote.start(arguments, env, output), trace, output)


def start(zygote: Zygote, arguments: Sequence[str], directory: Path) -> Start:
    """The same, to its end."""
    return launch(zygote, arguments, directory, {}).wait()


def check_one_line_says_how_it_began(begun: Start) -> None:
    """Also where no logging is configured."""
    resumed = begun.head["resumed"]
    said = re.findall(r"^lazysnap: (starting fresh|resumed step \d+ of run [0-9a-f]+)", begun.text, re.MULTILINE)
    assert len(said) == 1, begun.text
    assert said[0].startswith("starting fresh" if resumed is None else f"resumed step {resumed} of run "), begun.text


def merged(before: list[dict], resumed: int | None, after: list[dict]) -> list[dict]:
    """The trace as one run would have written it, which went on behind ``resumed`` steps."""
    kept = list(before)
    while resumed is not None and kept and kept[-1].get("step", resumed + 1) > resumed:
        kept.pop()
    return kept + after


def check_every_cut(zygote: Zygote, script: str, case: str, root: Path, *, stride: int = 1) -> None:
    """Run ``script DIRECTORY CASE DIES_AT SEED`` to its end, and again with a death in each step but the first.

    Both write the same; each start has other seeds. ``stride``: steps from one death to the next.
    """

    def run(name: str, dies_at: int, seed: int) -> Start:
        begun = start(zygote, [script, str(root / name), case, str(dies_at), str(seed)], root / name)
        assert begun.status == (-signal.SIGKILL if dies_at else 0), begun.text
        return begun

    whole = run("whole", 0, 1).lines
    steps = max(line["step"] for line in whole if "rate" in line)
    trace: list[dict] = []
    captured = 0
    for number, dies_at in enumerate((*range(1 + stride, steps + 1, stride), 0), 1):
        begun = run("cut", dies_at, number)
        # The step before the one that it died in had passed the gate.
        resumed = {"resumed": captured, "level": "memory"} if captured else {"resumed": None, "level": None}
        assert begun.head == resumed, begun.text
        check_one_line_says_how_it_began(begun)
        trace = merged(trace, begun.head["resumed"], begun.lines)
        assert trace == whole[: len(trace)], begun.text
        captured = dies_at - 1
    assert trace == whole
