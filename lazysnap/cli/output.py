"""The output of a command: its result on stdout, as tables or as one JSON object; messages on stderr.

Names in a snapshot are untrusted. They are shown as text, never as markup or control characters of a terminal.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from lazysnap.console import duration
from lazysnap.errors import ConfigError
from lazysnap.levels.redaction import Redaction

OK = 0
BAD = 1
"""Exit code: something bad was found."""
FAILED = 2
"""Exit code: the command failed, or was used wrongly."""
INTERRUPTED = 130

_PIPE_WIDTH = 160
_GAP = 2
"""Spaces between columns."""
_SHORTEST = 8
"""Minimum characters of a cell."""
_UNLIMITED = 1 << 16
"""Characters of a line on a screen of unlimited width."""


def safe(value: object) -> str:
    """Return ``value`` as text on one line, with control characters of terminals escaped."""
    text = str(value)
    if text.isprintable():
        return text
    escaped = ""
    for char in text:
        if not char.isprintable():
            char = char.encode("unicode_escape").decode()
        escaped += char
    return escaped


def count_of(number: int, noun: str) -> str:
    """Return text such as ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def percent(share: float, digits: int = 0) -> str:
    """Return a share as text such as ``78 %``."""
    return f"{100 * share:.{digits}f} %"


def seconds_text(seconds: float | None) -> str:
    """Return a time as text; empty if unknown."""
    if seconds is None:
        return ""
    return duration(seconds)


def command_words(args: argparse.Namespace) -> list[str]:
    """Return the command of the user after ``--``. Raises: ConfigError, if there is none."""
    words: list[str] = args.words
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ConfigError(f"{args.command}: name a command, as in `lazysnap {args.command} -- python train.py`")
    return words


def when(time_ns: int) -> str:
    """Return a Unix time in nanoseconds as text."""
    try:
        return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns"


def without_beginning(text: str, max_length: int) -> str:
    """Return at most the last ``max_length`` characters of a path or URL."""
    if len(text) <= max_length:
        return text
    return f"…{text[len(text) - max_length + 1 :]}"


def without_end(text: str, max_length: int) -> str:
    """Return at most ``max_length`` characters of a text."""
    if len(text) <= max_length:
        return text
    return f"{text[: max_length - 1]}…"


class Output:
    """The output of one command."""

    def __init__(self, command: str, *, as_json: bool, redaction: Redaction) -> None:
        """``redaction``: hides secrets in all output."""
        self._command = command
        self.as_json = as_json
        self.hide = redaction.clean
        self._results = _console(stderr=False)
        self._messages = _console(stderr=True)

    @property
    def width(self) -> int:
        """Characters of a line of the result."""
        return self._results.width

    def cell(self, value: object, style: str = "") -> Text:
        """Return ``value`` as a cell of a table."""
        if isinstance(value, Text):
            return value
        return Text(safe(self.hide(value)), style)

    def table(self, title: str, *columns: str, rows: Iterable[Iterable[object]]) -> Table:
        """Return a table. Its cells are one line each.

        Args:
            title: the line above; empty for none.
            columns: their heads. ``>`` at the end marks numbers. ``<`` at the end marks paths, which are truncated
                at the beginning if the screen is too narrow.
            rows: the cells of each row.
        """
        table = Table(title_justify="left", title_style="", box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0))
        if title:
            table.title = self.cell(title, "bold")
        table.show_edge = False
        table.pad_edge = False
        table.collapse_padding = True
        heads = [column.rstrip("<>") for column in columns]
        widths = [len(head) for head in heads]
        lines = []
        for row in rows:
            cells = [self.cell(value) for value in row]
            lines.append(cells)
            for index, cell in enumerate(cells):
                widths[index] = max(widths[index], cell.cell_len)
        for index, column in enumerate(columns):
            if column.endswith("<"):
                room = self.width - (sum(widths) - widths[index]) - _GAP * (len(columns) - 1)
                for cells in lines:
                    cells[index] = _shortened(cells[index], max(_SHORTEST, room))
        for column, head in zip(columns, heads, strict=True):
            justify: Any = "left"
            if column.endswith(">"):
                justify = "right"
            table.add_column(head, justify=justify, overflow="ellipsis", no_wrap=True)
        for cells in lines:
            table.add_row(*cells)
        return table

    def fits(self, table: Table) -> bool:
        """True if no cell of the table is truncated on this screen."""
        unlimited = self._results.options.update(max_width=_UNLIMITED)
        return self._results.measure(table, options=unlimited).maximum <= self.width

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
        """Print the result as one JSON object, if requested. Return the exit code."""
        if self.as_json:
            sys.stdout.write(json.dumps(self._hidden({"command": self._command, "ok": ok, **fields})) + "\n")
        if ok:
            return OK
        return BAD

    def error(self, text: str) -> None:
        """Print the error that replaces the result of the command."""
        first, *more = text.split("\n")
        self._messages.print(Text.assemble(("error:", "red"), " ", self.cell(first)), soft_wrap=True)
        for line in more:
            self.say(line)
        self.result(ok=False, error=text)

    @contextlib.contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar on a terminal. Yield a function that receives the number of further done bytes."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        hidden = not self._messages.is_terminal
        with Progress(*columns, console=self._messages, transient=True, disable=hidden) as progress:
            task = progress.add_task(safe(self.hide(title)), total=total)

            def advance(num_bytes: int) -> None:
                progress.advance(task, num_bytes)

            yield advance

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {key: self._hidden(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._hidden(item) for item in value]
        return value


def _shortened(cell: Text, max_length: int) -> Text:
    return Text(without_beginning(cell.plain, max_length), cell.style)


class _ExitingConsole(Console):
    """A console that leaves the exit code to the program."""

    def on_broken_pipe(self) -> None:
        """Raise: the reader of the result closed the pipe."""
        raise BrokenPipeError


def _console(*, stderr: bool) -> Console:
    stream = sys.stdout
    if stderr:
        stream = sys.stderr
    width = None
    if not stream.isatty() and "COLUMNS" not in os.environ:
        width = _PIPE_WIDTH  # in a pipe or file, lines need not fit a screen
    return _ExitingConsole(stderr=stderr, width=width, highlight=False)
