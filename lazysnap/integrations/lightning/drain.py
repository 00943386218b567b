"""A progress bar while the last snapshot becomes durable, if that takes longer than a second."""

import time
from types import TracebackType

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_PATIENCE_S = 1.0


class DrainBar:
    """Call it with bytes done and bytes to do; shows nothing in the first second, nor on other ranks than 0."""

    def __init__(self, *, is_rank_zero: bool) -> None:
        self._is_rank_zero = is_rank_zero
        self._started = time.monotonic()
        self._progress: Progress | None = None

    def __enter__(self) -> "DrainBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far it is."""
        if not self._is_rank_zero or time.monotonic() - self._started < _PATIENCE_S:
            return
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._progress = Progress(*columns)
            self._progress.start()
            self._progress.add_task("saving the last snapshot", total=total_bytes)
        self._progress.update(self._progress.task_ids[0], completed=done_bytes, total=total_bytes)
