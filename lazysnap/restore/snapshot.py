"""The result of a restart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lazysnap.keeper.questions import TrainerEnd
from lazysnap.resolver import SnapshotKey


@dataclass(frozen=True)
class NewRun:
    """The new run that begins at a chosen older snapshot. The same on all ranks."""

    run_id: str
    name: str
    """The displayed part of its id."""
    newest: SnapshotKey
    """The newest snapshot, which is ``"latest"`` until the new run has a complete one."""
    newest_run_name: str
    """The displayed part of the id of that snapshot's run."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was read. Nothing else uses the memory of its tensors. Tied tensors are one tensor.

    Each tensor is on the device of its live tensor. Scalars, and tensors that do not fit on the device, are on the CPU.
    """

    state: dict[str, Any] = field(repr=False)
    """The value that ``StateSource.collect`` returned at that boundary."""
    step: int
    run_id: str
    start: str
    """The id of the start that took it."""
    level: str
    """``memory``, ``parity`` (in the memory of other nodes) or the URL of the level from which it was read; of several
    sources the slowest.
    """
    seconds: float = 0.0
    """Duration of the restore."""
    skipped: tuple[str, ...] = ()
    """The reasons why newer snapshots, or faster levels, were not used."""
    world_size: int = 1
    """Number of ranks of the training that captured it. Another number cannot continue random numbers, and converts the
    position in the data (``data.layout``).
    """
    newest_start: str | None = None
    """The newest start of all existing snapshots."""
    durable_at: str | None = None
    """The URL of the first level where it, or ``repeats`` if given, is complete."""
    parameters: Mapping[str, Sequence[str]] | None = field(default=None, repr=False)
    """The parameter names of each optimizer, by its path in the state, if known."""
    run: str = ""
    """The first digits of ``run_id`` that distinguish it from the other runs."""
    protected: frozenset[SnapshotKey] = frozenset()
    """The snapshots in memory of which any node holds parity. The newest that all nodes protect is one of them."""
    new_run: NewRun | None = None
    """The new run; ``None`` for the newest snapshot, whose run continues."""
    captured_ns: int | None = None
    """When it was captured, in nanoseconds since the epoch."""
    end: TrainerEnd | None = None
    """The end of the last trainer, for ``"latest"``, if its keeper still has it."""
    repeats: SnapshotKey | None = None
    """The newest snapshot, in memory, if this is the one before it: its step is repeated and compared."""
    forbids_repeats: bool = False
    """True if memory has it and forbids repeating its step: the run was checked already, or the training ended
    there.
    """


@dataclass(frozen=True)
class Absence:
    """The reason why there is no snapshot to restore."""

    urls: tuple[str, ...] = ()
    """The levels that were searched, besides memory."""
    incomplete: tuple[int, ...] = ()
    """Steps of which a part exists, in ascending order."""
    unreadable: tuple[int, ...] = ()
    """Complete steps that could not be read, in ascending order."""
    uncommitted: Mapping[str, int] = field(default_factory=dict)
    """The number of snapshot directories without any manifest, by level, if any."""
    is_partial: bool = False
    """True if some place could not be searched, as earlier messages reported."""
    newest_run: str | None = None
    """The newest run of which a part exists, in memory or at a level."""
