"""What a restart gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lazysnap.keeper.protocol import TrainerEnd
from lazysnap.resolver import SnapshotKey

MEMORY = "memory"


@dataclass(frozen=True)
class NewRun:
    """The run that begins at a snapshot that was chosen although it is not the newest. The same on all ranks."""

    run_id: str
    name: str
    """What people see of its id."""
    left: SnapshotKey
    """The newest snapshot, which ``"latest"`` means until the new run has a complete one."""
    left_name: str
    """What people see of the id of its run."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot read back. Its tensors are its own: nothing else writes to their memory. Tied ones are one tensor.

    They lie on the devices of the live tensors that they are for; scalars, and what no device has room for, on the CPU.
    """

    state: dict[str, Any] = field(repr=False)
    """What ``StateSource.collect`` returned at that boundary."""
    step: int
    run_id: str
    start: str
    """Which start of the run took it."""
    level: str
    """``memory`` or the URL of the level it was read from."""
    seconds: float
    """Time from the question to the answer."""
    skipped: tuple[str, ...] = ()
    """Why newer snapshots, or faster levels, were passed over."""
    world_size: int = 1
    """Ranks of the training that it was taken from; with another number of ranks now, random numbers could
    not be continued, and the position in the data counts other batches (``lazysnap.data.share``)."""
    newest_start: str | None = None
    """Of all snapshots that were found."""
    stored: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict, repr=False)
    """By level: start and step of complete snapshots there that are not newer, of this run, oldest first."""
    parameters: Mapping[str, Sequence[str]] | None = field(default=None, repr=False)
    """By path of an optimizer in the state: the names of its parameters in its order, if they were known."""
    run: str = ""
    """What people see of ``run_id``: its first digits, as many as tell it apart from the other runs there."""
    protected: SnapshotKey | None = None
    """The one in memory that other nodes protect best, and that stays until a newer one is protected."""
    new_run: NewRun | None = None
    """``None``: it is the newest snapshot, and training goes on in its run."""
    captured_ns: int | None = None
    """When it was captured, in nanoseconds since the epoch."""
    end: TrainerEnd | None = None
    """Of ``"latest"``: when the trainer before this one ended, and how far it came, if its keeper still knows."""


@dataclass(frozen=True)
class Absence:
    """Why there is no snapshot to restore."""

    urls: tuple[str, ...] = ()
    """Where it was looked for, besides memory."""
    incomplete: tuple[int, ...] = ()
    """Steps of which a part was found, in ascending order."""
    unreadable: tuple[int, ...] = ()
    """Steps that were complete and could not be read, in ascending order."""
    uncommitted: Mapping[str, int] = field(default_factory=dict)
    """By level: directories of snapshots without any manifest, where there are some."""
    is_partial: bool = False
    """Whether not every place could be looked at, as the messages before said."""
