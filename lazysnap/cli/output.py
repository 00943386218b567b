"""The output of a command: its result on stdout, as tables or as one JSON object; messages on stderr.

Names in a snapshot are written by whoever wrote the snapshot. They are shown as text, never as markup or as control
characters of a terminal.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from lazysnap.errors import ConfigError
from lazysnap.levels.redaction import Redaction
from lazysnap.snapshots.catalogue import Contents, Found

OK, BAD, FAILED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: good; something bad was found; the command failed, or was used wrongly; Ctrl-C."""

_PIPE_WIDTH = 160


def safe(value: object) -> str:
    """Return ``value`` as text on one line, with control characters of terminals escaped."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def count_of(number: int, noun: str) -> str:
    """Return text such as ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def percent(share: float, digits: int = 0) -> str:
    """Return a share as text such as ``78 %``."""
    return f"{100 * share:.{digits}f} %"


def command_words(args: argparse.Namespace, example: str) -> list[str]:
    """Return the command of the user behind ``--``. Raises: ConfigError, if there is none."""
    words: list[str] = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise ConfigError(f"{args.command}: name a command, as in `lazysnap {args.command} -- {example}`")
    return words


def fields_of(found: Found) -> dict[str, Any]:
    """Return the fields of a snapshot in a JSON result."""
    return {
        "step": found.step,
        "run_id": found.run_id,
        "location": found.location,
        "size_bytes": found.size_bytes,
        "names": found.names,
    }


def when(time_ns: int) -> str:
    """Return a Unix time in nanoseconds as text for people."""
    try:
        return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns"


class Output:
    """The output of one command."""

    def __init__(self, command: str, *, as_json: bool, redaction: Redaction) -> None:
        """``redaction`` hides secrets in all that is shown."""
        self._command = command
        self.as_json = as_json
        self.hide = redaction.clean
        self._results = _console(stderr=False)
        self._messages = _console(stderr=True)

    @property
    def is_terminal(self) -> bool:
        """True if the result is shown on a terminal."""
        return self._results.is_terminal

    def cell(self, value: object, style: str = "") -> Text:
        """Return ``value`` as a cell of a table."""
        return value if isinstance(value, Text) else Text(safe(self.hide(value)), style)

    def table(self, title: str, *columns: str, rows: Iterable[Iterable[object]], is_plain: bool = False) -> Table:
        """Return a table. Columns whose name ends in ``>`` are numbers. ``is_plain``: without lines between columns, so
        that several of them fit one screen.
        """
        table = Table(title=self.cell(title, "bold") if title else None, title_justify="left", title_style="")
        if is_plain:
            table.box, table.show_edge, table.pad_edge = SIMPLE_HEAD, False, False
        for column in columns:
            name = column.removesuffix(">")
            is_number = name != column
            table.add_column(name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
        for row in rows:
            table.add_row(*map(self.cell, row))
        return table

    def show(self, item: RenderableType) -> None:
        """Print a part of the result, unless it is JSON. A text stays on one line."""
        if not self.as_json:
            self._results.print(item, soft_wrap=isinstance(item, Text))

    def line(self, text: str, style: str = "") -> None:
        """Print a line of the result, unless it is JSON."""
        self.show(self.cell(text, style))

    def say(self, text: str, style: str = "") -> None:
        """Print a message on stderr."""
        self._messages.print(self.cell(text, style), soft_wrap=True)

    def result(self, *, ok: bool = True, **fields: Any) -> int:
        """Print the result as one JSON object, if that was asked for. Return the exit code."""
        if self.as_json:
            sys.stdout.write(json.dumps(self._hidden({"command": self._command, "ok": ok, **fields})) + "\n")
        return OK if ok else BAD

    def error(self, error: BaseException) -> None:
        """Print the error because of which the command has no result."""
        self._messages.print(Text.assemble(("error:", "red"), " ", self.cell(error)), soft_wrap=True)
        self.result(ok=False, error=str(error))

    @contextlib.contextmanager
    def screen(self) -> Iterator[Callable[[Sequence[RenderableType]], None]]:
        """Yield a function that shows parts in place of those it showed before. The last ones stay visible."""
        last: list[RenderableType] = []
        try:
            with Live(console=self._results, screen=True, auto_refresh=False) as live:

                def update(parts: Sequence[RenderableType]) -> None:
                    last[:] = parts
                    live.update(Group(*parts), refresh=True)

                yield update
        finally:
            for part in last:
                self.show(part)

    @contextlib.contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar on a terminal. Yield a function that takes the number of further bytes that are done."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        hidden = not self._messages.is_terminal
        with Progress(*columns, console=self._messages, transient=True, disable=hidden) as progress:
            task = progress.add_task(safe(self.hide(what)), total=total)
            yield lambda done: progress.advance(task, done)

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {key: self._hidden(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._hidden(item) for item in value]
        return value


def show_snapshots(
    output: Output, seen: Contents, states: Iterable[tuple[Found, str, str]], bare: Iterable[tuple[str, int]] = ()
) -> None:
    """Print a table of snapshots, the smallest step first, unless there are none.

    ``states``: snapshots of ``seen``, each with its state in words, and a style for that. ``bare``: directories without
    a valid manifest, each with its step.
    """
    rows = [(step, name, ("no valid manifest", "yellow"), ("", "", "", "")) for name, step in bare]
    for found, state, style in states:
        run = seen.runs[found.run_id] + (" (newest)" if found.run_id == seen.newest_run else "")
        facts = (decimal(found.size_bytes), when(found.captured_ns), ", ".join(found.names), run)
        rows.append((found.step, found.location, (state, style), facts))
    if rows:
        lines = [(step, output.cell(*state), *facts, location) for step, location, state, facts in sorted(rows)]
        columns = ("step>", "state", "size>", "captured", "names", "run", "directory")
        output.show(output.table(seen.url, *columns, rows=lines))


class _Console(Console):
    """A console that leaves the exit code to the program."""

    def on_broken_pipe(self) -> None:
        """Raise: the reader of the result closed the pipe."""
        raise BrokenPipeError


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    # In a pipe or file, lines need not fit a screen.
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return _Console(stderr=stderr, width=width, highlight=False)
