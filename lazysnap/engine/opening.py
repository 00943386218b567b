"""What a training is told once, when the size of its state is known: what it takes, and whether there is room."""

import math
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from rich.filesize import decimal

from lazysnap.config import SnapshotConfig
from lazysnap.levels.redaction import shown


@dataclass(frozen=True)
class Sizes:
    """Of one rank, in bytes."""

    state_bytes: int
    """One snapshot, without frozen tensors."""
    frozen_bytes: int
    """Frozen tensors, held and stored once."""
    slots: int
    slot_bytes: int
    available_bytes: int
    """Memory that slots may take, with what they take already: of this machine, or ``max_bytes`` if that is less."""
    group: tuple[int, int] = (1, 0)
    """Nodes that protect each other, and how many of them may be lost."""


def opening_line(config: SnapshotConfig, sizes: Sizes, ranks: int, *, is_protected: bool = True) -> str:
    """What the training takes: state, memory (which it has, if ``is_protected``), and how often it is stored where."""
    per_rank = " per rank" if ranks > 1 else ""
    once = f" and {decimal(sizes.frozen_bytes)} that are not trained, once" if sizes.frozen_bytes else ""
    memory = sizes.slots * sizes.slot_bytes + sizes.frozen_bytes
    places = [
        f"snapshots at {shown(level.url)} every {_steps(math.lcm(level.every_n_steps, config.every_n_steps))}"
        for level in config.levels
    ]
    size, parity = sizes.group
    if parity:
        places.append(
            f"any {parity} of {size} nodes may be lost" if parity > 1 else f"any one of {size} nodes may be lost"
        )
    lack = "" if is_protected else "no memory: it would take "
    return (
        f"state {decimal(sizes.state_bytes)}{per_rank}{once}, {lack}{sizes.slots} slots = {decimal(memory)} of memory"
        f"{per_rank} (of {decimal(sizes.available_bytes)} available), "
        + (", ".join(places) or "no storage level: nothing outlives this machine")
    )


def _steps(every_n: int) -> str:
    return "step" if every_n == 1 else f"{every_n} steps"


def shortages(config: SnapshotConfig, snapshot_bytes: int, ranks_here: int) -> list[str]:
    """Local levels where not even one snapshot of the ranks of this machine fits, and why. Blocks: asks each disk."""
    found = []
    for level in config.levels:
        free, needed = _free_bytes(level.url), snapshot_bytes * ranks_here
        if free is not None and free < needed:
            found.append(
                f"{level.url}: not even one snapshot fits: it takes {needed} bytes ({decimal(needed)}), "
                f"{free} ({decimal(free)}) are free; free space, or choose another place"
            )
    return found


def _free_bytes(url: str) -> int | None:
    """What a local level may still take; ``None`` if that is not known."""
    if urlsplit(url).scheme:
        return None
    path = url
    while path and not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
