"""Worker processes that outlive an epoch (``persistent_workers=True``).

A loader that keeps its workers draws their seed at its first iteration only. A restarted process has no workers yet:
they are started before the random generators are put back, so that the next iteration draws what it would have drawn.
"""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader


def running_workers(loaders: Sequence[Any]) -> list[bool]:
    """Which loaders have workers that the next iteration will use again."""
    return [_keeps_workers(loader) and loader._iterator is not None for loader in loaders]


def start_workers(loaders: Sequence[Any], wanted: Sequence[bool]) -> None:
    """Start the workers of the loaders that had them. Draws random numbers."""
    for loader, had_workers in zip(loaders, wanted, strict=False):
        if had_workers and _keeps_workers(loader) and loader._iterator is None:
            iter(loader)


def _keeps_workers(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and bool(loader.persistent_workers)
