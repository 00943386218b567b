"""What a restart gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MEMORY = "memory"


@dataclass(frozen=True)
class Snapshot:
    """A snapshot read back. Its tensors are its own: nothing else writes to their memory. Tied ones are one tensor.

    They lie on the devices of the live tensors that they are for; scalars, and what no device has room for, on the CPU.
    """

    state: dict[str, Any] = field(repr=False)
    """What ``StateSource.collect`` returned at that boundary."""
    step: int
    run_id: str
    run_started_ns: int
    level: str
    """``memory`` or the URL of the level it was read from."""
    seconds: float
    """Time from the question to the answer."""
    skipped: tuple[str, ...] = ()
    """Why newer snapshots, or faster levels, were passed over."""
    world_size: int = 1
    """Ranks of the training that it was taken from; with another number of ranks now, what is of each rank alone
    (generators, position in the data) could not be continued exactly."""
    generation: str | None = None
    """With several ranks: which start of theirs took it."""
    newest_generation: str | None = None
    """Of all snapshots that were found."""
    stored: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict, repr=False)
    """By level: generation and step of complete snapshots there that are not newer, of this run, oldest first."""
    parameters: Mapping[str, Sequence[str]] | None = field(default=None, repr=False)
    """By path of an optimizer in the state: the names of its parameters in its order, if they were known."""
