"""A progress bar while the last snapshot becomes durable, if that takes longer than a second."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

DESCRIPTION = "saving the last snapshot"
_PATIENCE_S = 1.0


class Bar(Protocol):
    """A bar on the screen."""

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far it is."""

    def close(self) -> None:
        """Do nothing."""


class RichBar:
    """A bar of rich; ``column``: the bar's own look."""

    def __init__(self, console: Console | None = None, column: BarColumn | None = None) -> None:
        columns = (TextColumn("{task.description}"), column or BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = Progress(*columns, console=console)
        self._progress.start()
        self._task = self._progress.add_task(DESCRIPTION, total=None)

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """See ``Bar.show``."""
        self._progress.update(self._task, completed=done_bytes, total=total_bytes)

    def close(self) -> None:
        """See ``Bar.close``."""
        self._progress.stop()


class TqdmBar:
    """``bar``, of tqdm, with bytes."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._bar.unit, self._bar.unit_scale = "B", True
        self._bar.set_description(DESCRIPTION)

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """See ``Bar.show``."""
        self._bar.total, self._bar.n = total_bytes, done_bytes
        self._bar.refresh()

    def close(self) -> None:
        """See ``Bar.close``."""
        self._bar.close()


class DrainBar:
    """Call it with bytes done and bytes to do; shows nothing in the first second, nor on other ranks than 0.

    ``make``: begins the bar that is shown.
    """

    def __init__(self, *, is_rank_zero: bool, make: Callable[[], Bar] = RichBar) -> None:
        self._is_rank_zero = is_rank_zero
        self._make = make
        self._started = time.monotonic()
        self._bar: Bar | None = None

    def __enter__(self) -> "DrainBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far it is."""
        if not self._is_rank_zero or time.monotonic() - self._started < _PATIENCE_S:
            return
        if self._bar is None:
            self._bar = self._make()
        self._bar.show(done_bytes, total_bytes)
