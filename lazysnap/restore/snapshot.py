"""The result of a restart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lazysnap.keeper.questions import TrainerEnd
from lazysnap.resolver import SnapshotKey


@dataclass(frozen=True)
class NewRun:
    """The run that begins at a snapshot that was chosen although it is not the newest. The same on all ranks."""

    run_id: str
    name: str
    """The part of its id that people see."""
    newest: SnapshotKey
    """The newest snapshot, which ``"latest"`` means until the new run has a complete one."""
    newest_run_name: str
    """The part of the id of that snapshot's run that people see."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot read back. Its tensors are its own: nothing else writes to their memory. Tied ones are one tensor.

    Each is on the device of its live tensor. Scalars, and tensors that no device has room for, are on the CPU.
    """

    state: dict[str, Any] = field(repr=False)
    """The value that ``StateSource.collect`` returned at that boundary."""
    step: int
    run_id: str
    start: str
    """The id of the start that took it."""
    level: str
    """``memory``, ``parity`` (in the memory of other nodes) or the URL of the level it was read from; of several the
    farthest."""
    seconds: float = 0.0
    """Time from the question to the answer."""
    skipped: tuple[str, ...] = ()
    """The reasons why newer snapshots, or faster levels, were not used."""
    world_size: int = 1
    """Ranks of the training that captured it. With another number now, random numbers cannot be continued, and the
    position in the data counts other batches (``lazysnap.data.layout``)."""
    newest_start: str | None = None
    """The newest start of all snapshots that were found."""
    durable_at: str | None = None
    """The URL of the first level that has it complete, or ``repeats`` if that is given."""
    parameters: Mapping[str, Sequence[str]] | None = field(default=None, repr=False)
    """The parameter names of each optimizer in its order, by its path in the state, if they were known."""
    run: str = ""
    """The first digits of ``run_id``, as many as distinguish it from the other runs there."""
    protected: SnapshotKey | None = None
    """The one in memory that other nodes protect best, and that stays until a newer one is protected."""
    new_run: NewRun | None = None
    """``None``: it is the newest snapshot, and training continues its run."""
    captured_ns: int | None = None
    """When it was captured, in nanoseconds since the epoch."""
    end: TrainerEnd | None = None
    """The end of the trainer before this one, for ``"latest"``, if its keeper still knows it."""
    repeats: SnapshotKey | None = None
    """The newest snapshot, in memory, if this one is that before it: its step is trained again and compared."""
    is_settled: bool = False
    """True if memory has it, and says that no restart is to train its step again: the run was proved already, or the
    training ended there."""


@dataclass(frozen=True)
class Absence:
    """Why there is no snapshot to restore."""

    urls: tuple[str, ...] = ()
    """The levels that were searched, besides memory."""
    incomplete: tuple[int, ...] = ()
    """Steps of which a part was found, in ascending order."""
    unreadable: tuple[int, ...] = ()
    """Steps that were complete and could not be read, in ascending order."""
    uncommitted: Mapping[str, int] = field(default_factory=dict)
    """The number of snapshot directories without any manifest, by level, where there are some."""
    is_partial: bool = False
    """True if not every place could be looked at; messages before said which."""
    newest_run: str | None = None
    """The newest run of which a part was found, in memory or at a level."""
