"""The memory that a keeper holds, and the state of its node: structures inside the messages of ``keeper.protocol``."""

import msgspec

from lazysnap.events import LevelFailed, Stored
from lazysnap.shard.checksum import Checksums


class Captured(msgspec.Struct, frozen=True):
    """The facts about a whole capture in one slot."""

    step: int
    run_id: str
    start: str
    sequence: int
    frozen: str | None
    """Digest of the frozen tensors that belong with it."""
    rank: int
    world_size: int
    checksums: Checksums | None
    """Known once the keeper stored the capture, or rested without a trainer."""


class HeldCapture(Captured, frozen=True, kw_only=True):
    """A whole capture in the slot of that number."""

    slot: int


class HeldMember(msgspec.Struct, frozen=True):
    """One node of a group, when a step was protected."""

    ranks: list[int]
    size_bytes: int
    """The bytes of its part (``keeper.node_part``)."""
    frozen: list[str | None]
    """The digest of each rank's frozen tensors that its capture needs."""


class HeldParity(msgspec.Struct, frozen=True):
    """Parity of one step of one group (``parity.pieces``)."""

    run_id: str
    start: str
    step: int
    world_size: int
    members: list[HeldMember]
    parity: int
    most_lost: int
    """Like that of ``Parity``."""
    block_bytes: int
    """The most bytes that are read and compared at a time."""
    position: int
    """Which member the holder is."""


class TrainerEnd(msgspec.Struct, frozen=True):
    """The end of the last trainer that captured anything, as its keeper saw it."""

    ended_ns: int
    """Nanoseconds since the epoch."""
    run_id: str
    step: int
    """The step of the last boundary that it passed."""


MAX_COMPLETE = 64
"""Complete steps of one level in a status: so many may become complete while a trainer takes no message."""


class LevelStatus(msgspec.Struct, frozen=True):
    """One level, for one start."""

    complete: list[int] = []
    """The steps that became complete last, in that order, at most ``MAX_COMPLETE``."""
    complete_at: float = 0.0
    """Unix time in seconds when the last of them did."""
    stored: Stored | None = None
    """The last file that this node stored there."""
    failed: LevelFailed | None = None
    """The last failure of this node there."""


class CaptureTimes(msgspec.Struct, frozen=True):
    """A whole capture, as its slot's words describe it."""

    step: int
    taken_ns: int
    """Unix time when it began, in nanoseconds."""
    copied_ns: int
    waited_ns: int
    """Nanoseconds that the training had waited in all when the capture began."""


class RankState(msgspec.Struct, frozen=True):
    """One rank of the node."""

    rank: int
    phase: str
    """See ``keeper.lifecycle``."""
    pid: int
    """The process that trains it, or did last."""
    since_s: float
    """Unix time in seconds when that process came."""
    lingers_s: float | None
    """Seconds for which the memory of a dead process stays; ``None``: none is dead, or the keeper is ending."""
    end: TrainerEnd | None
    reached: int | None
    """The step of the newest boundary that it passed."""
    captures: list[CaptureTimes]
    """The oldest first."""
    slots: int
    memory_bytes: int
    file_bytes: int
    """Bytes of slots that are files."""


class LevelState(msgspec.Struct, frozen=True):
    """One level, as this node knows it. Texts hold no secrets."""

    url: str
    is_shared: bool
    """True if all of several nodes see the same place there."""
    newest: int | None
    """The newest complete step."""
    complete_ns: int | None
    """Unix time when that became complete, if this keeper saw it."""
    bytes_per_s: float | None
    """The rate of the last write."""
    storing: int | None
    """The step that is being stored."""
    moved_bytes: int
    total_bytes: int
    waiting: int
    """The number of steps that must be stored, due or not, and are not complete yet."""
    is_failing: bool
    failure: str
    """The text of the last failed write; empty, if none failed."""
    failed_ns: int | None


class NodeState(msgspec.Struct, frozen=True):
    """The state of a job on one node, for people. Nothing is decided by it."""

    run_id: str
    node: int
    nodes: int
    every_n_steps: int
    common_step: int | None
    """The newest step that all ranks of the node hold whole."""
    protected: int | None
    """The newest step that survives the loss of ``may_lose`` nodes."""
    may_lose: int
    parity_bytes: int
    """Memory of this node that protects other nodes."""
    ranks: list[RankState]
    levels: list[LevelState]
    problems: list[str]
    """Reminders and errors that were sent to trainers and are not over."""
