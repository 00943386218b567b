"""Question that any process of this user may ask a keeper, its answer, and what the answer contains.

A question has one answer, and changes nothing except "stop". All else that a trainer and its keeper tell each other is
state: see ``core.messages``.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from lazysnap.shard.checksum import Checksums


class Question(Struct, frozen=True, tag="question", kw_only=True):
    """Question to a keeper. A trainer may ask, and so may any other process of this user."""

    number: int = 0
    """Number of the question on its connection. The answer has the same one."""
    about: Literal["memory", "status", "stop"]
    local_rank: int = 0
    """Rank on its node. For "memory" alone."""
    is_forced: bool = False
    """True if the keeper is to end at once, also if not every level has the newest capture. For "stop" alone."""


class SlotFacts(Struct, frozen=True):
    """One slot of a rank."""

    slot_id: int
    sequence: int
    """Number of the capture in the slot when the keeper read its words."""
    checksums: Checksums | None
    """Checksums of the image of that capture; None while they are not computed."""


class TrainerEnd(Struct, frozen=True):
    """The end of the last trainer that captured anything, as its keeper saw it."""

    ended_ns: int
    """Nanoseconds since the epoch."""
    run_id: str
    step: int
    """The step of the last boundary that it passed."""


class HeldMember(Struct, frozen=True):
    """One node of a group, when a step was protected."""

    ranks: list[int]
    size_bytes: int
    """Bytes of its part (``keeper.node_part``)."""


class HeldParity(Struct, frozen=True):
    """Parity of one step of one group (``parity.pieces``)."""

    run_id: str
    start: str
    step: int
    world_size: int
    members: list[HeldMember]
    parity: int
    most_lost: int
    """See ``core.messages.RedundancySettings``."""
    block_bytes: int
    """The most bytes that are read and compared at a time."""
    position: int
    """Position of the holder among the members."""


class KeptMemory(Struct, frozen=True):
    """The memory that a keeper holds for one rank.

    Whoever is not the trainer of the rank gets the descriptors of all ``slots`` along, in this order, opened for
    reading alone.
    """

    slots: tuple[SlotFacts, ...] = ()
    end: TrainerEnd | None = None
    local_ranks: tuple[int, ...] = ()
    """All ranks for which the keeper has slots."""
    parity: tuple[HeldParity, ...] = ()
    """Parity that the node holds. For local rank 0 alone."""


class CaptureTimes(Struct, frozen=True):
    """A whole capture, with its times."""

    step: int
    taken_ns: int
    """Unix time when it began, in nanoseconds."""
    copied_ns: int


class RankState(Struct, frozen=True):
    """One rank of the node."""

    rank: int
    phase: str
    """Presence of its trainer: see ``core.ranks``."""
    pid: int
    """The process that trains it, or did last."""
    since_s: float
    """Unix time in seconds when that process came."""
    lingers_s: float | None
    """Seconds for which the memory of a dead process stays; None: none is dead, or the keeper is ending."""
    end: TrainerEnd | None
    reached: int | None
    """The step of the newest boundary that it passed."""
    captures: list[CaptureTimes]
    """The oldest first."""
    slots: int
    memory_bytes: int
    file_bytes: int
    """Bytes of slots that are files."""
    waited_s: float = 0.0
    """Seconds that training has waited for lazysnap, as its process reported."""


class LevelFacts(Struct, frozen=True):
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
    """Text of the last failure of the level; empty if there was none."""
    failed_ns: int | None


class NodeState(Struct, frozen=True):
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
    levels: list[LevelFacts]
    problems: list[str]
    """Reminders and errors that were sent to trainers and are not over."""


class Answer(Struct, frozen=True, tag="answer"):
    """Answer to one question."""

    number: int = 0
    memory: KeptMemory | None = None
    status: NodeState | None = None
    """None if the keeper knows no training yet."""
    text: str = ""
    """Why there is no answer, or why the keeper does not end, for people; empty otherwise."""
    durable: Mapping[str, int | None] = {}
    """Newest complete step of each level, by URL. For "stop" alone, if the keeper ends."""
