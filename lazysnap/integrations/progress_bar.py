"""A progress bar while the last snapshot becomes durable, if that takes longer than a second."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator

_random_state = random.getstate()

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: E402

# rich draws a number when it is imported; the program may have seeded the generator before.
random.setstate(_random_state)

_PATIENCE_S = 1.0


@contextlib.contextmanager
def shown_later() -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes bytes done and bytes to do, and shows them from the first call after a second on."""
    started_s = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # A console of its own: a display that the program has on the common one would refuse a second one.
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task("saving the last snapshot", total=None)

    def show(done_bytes: int, total_bytes: int) -> None:
        progress.update(task, completed=done_bytes, total=total_bytes)
        if time.monotonic() - started_s >= _PATIENCE_S:
            progress.start()

    try:
        yield show
    finally:
        if progress.live.is_started:
            progress.stop()
