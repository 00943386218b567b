"""A progress bar while the last snapshot becomes durable, if that takes longer than a second."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

logger = logging.getLogger(__name__)

Show = Callable[[int, int], None]
"""A function that shows bytes done and bytes to do."""
Bar = Callable[[], AbstractContextManager[Show]]
"""A bar that is on the screen within the context that it returns."""

_DESCRIPTION = "saving the last snapshot"
_PATIENCE_S = 1.0


@contextlib.contextmanager
def rich_bar(console: Console | None = None, column: BarColumn | None = None) -> Iterator[Show]:
    """Show a bar of rich. ``column``: draws the bar itself; default: as rich does."""
    columns = (TextColumn("{task.description}"), column or BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(_DESCRIPTION, total=None)

        def show(done_bytes: int, total_bytes: int) -> None:
            progress.update(task, completed=done_bytes, total=total_bytes)

        yield show


@contextlib.contextmanager
def tqdm_bar(bar: Any) -> Iterator[Show]:
    """Show ``bar``, of tqdm, with bytes."""
    bar.unit = "B"
    bar.unit_scale = True
    bar.set_description(_DESCRIPTION)

    def show(done_bytes: int, total_bytes: int) -> None:
        bar.total = total_bytes
        bar.n = done_bytes
        bar.refresh()

    with contextlib.closing(bar):
        yield show


@contextlib.contextmanager
def shown_later(bar: Bar | None) -> Iterator[Show]:
    """Yield a function that shows ``bar`` from the first call after a second on; ``None``: shows nothing."""
    started_s = time.monotonic()
    shows: list[Show] = []
    with contextlib.ExitStack() as stack:

        def show(done_bytes: int, total_bytes: int) -> None:
            if bar is None or time.monotonic() - started_s < _PATIENCE_S:
                return
            if not shows:
                try:
                    shows.append(stack.enter_context(bar()))
                except Exception as error:  # noqa: BLE001  a bar of the program's own may be anything
                    logger.info("the trainer's progress bar cannot show the end: %s", error)
                    shows.append(stack.enter_context(rich_bar()))
            shows[0](done_bytes, total_bytes)

        yield show
