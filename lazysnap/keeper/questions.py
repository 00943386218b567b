"""The questions that any process of this user may ask a keeper, and the answers.

A question has one answer, and only "stop" changes anything. All other messages between trainer and keeper are states:
see ``core.messages``.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from lazysnap.shard.checksum import Checksums


class Question(Struct, frozen=True, tag="question", kw_only=True):
    """A question to a keeper, from a trainer or any other process of this user."""

    number: int = 0
    """The number of the question on its connection, also of the answer."""
    about: Literal["memory", "status", "stop"]
    local_rank: int = 0
    """Rank on its node. Only for "memory"."""
    is_forced: bool = False
    """True if the keeper must end at once, even if a level lacks the newest capture. Only for "stop"."""


class SlotFacts(Struct, frozen=True):
    """One slot of a rank."""

    slot_id: int
    sequence: int
    """Sequence number of the capture in the slot when the keeper read its words."""
    checksums: Checksums | None
    """Checksums of the image of that capture; None if they are not computed."""


class TrainerEnd(Struct, frozen=True):
    """The end of the last trainer that captured anything, as its keeper saw it."""

    ended_ns: int
    """Nanoseconds since the epoch."""
    run_id: str
    step: int
    """The step of its last boundary."""


class HeldMember(Struct, frozen=True):
    """One node of a group at the time of the protection."""

    ranks: list[int]
    size_bytes: int
    """Bytes of its part (``keeper.node_part``)."""


class HeldParity(Struct, frozen=True):
    """Parity of one step of one group (``parity.groups``)."""

    run_id: str
    start: str
    step: int
    world_size: int
    members: list[HeldMember]
    parity: int
    most_lost: int
    """See ``core.messages.RedundancySettings``."""
    block_bytes: int
    """Maximum bytes that are read and compared at a time."""
    position: int
    """Position of the holder in the group."""


class KeptMemory(Struct, frozen=True):
    """The memory that a keeper holds for one rank.

    Processes other than the trainer of the rank get the descriptors of all ``slots``, in this order, opened read-only.
    """

    slots: tuple[SlotFacts, ...] = ()
    end: TrainerEnd | None = None
    local_ranks: tuple[int, ...] = ()
    """All ranks for which the keeper has slots."""
    parity: tuple[HeldParity, ...] = ()
    """Parity that the node holds. Only for local rank 0."""


class CaptureTimes(Struct, frozen=True):
    """A whole capture, with its times."""

    step: int
    taken_ns: int
    """Unix time when it began, in nanoseconds."""
    copied_ns: int


class RankState(Struct, frozen=True):
    """One rank of the node."""

    rank: int
    is_training: bool
    """True if its trainer lives, as far as is known."""
    pid: int
    """The process that trains it, or the last one."""
    since_s: float
    """Unix time in seconds when that process connected."""
    lingers_s: float | None
    """Seconds for which the memory of a dead process stays; None if none is dead, or the keeper is ending."""
    end: TrainerEnd | None
    reached: int | None
    """The step of the newest boundary that it passed."""
    captures: list[CaptureTimes]
    """The captures, oldest first."""
    slots: int
    memory_bytes: int
    file_bytes: int
    """Bytes of slots that are files."""
    waited_s: float = 0.0
    """Seconds that training has waited for lazysnap, as its process reported."""


class LevelFacts(Struct, frozen=True):
    """The state of one level on this node. Texts contain no secrets."""

    url: str
    is_shared: bool
    """True if all of several nodes share the level."""
    newest: int | None
    """The newest complete step."""
    complete_ns: int | None
    """Unix time when that became complete, if this keeper observed it."""
    bytes_per_s: float | None
    """The rate of the last write, with its reading back."""
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
    """The state of a job on one node, for users only."""

    run_id: str
    node: int
    nodes: int
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
    """Alerts that were sent to trainers and are not over."""


class Answer(Struct, frozen=True, tag="answer"):
    """Answer to one question."""

    number: int = 0
    memory: KeptMemory | None = None
    status: NodeState | None = None
    """None if the keeper has no training yet."""
    text: str = ""
    """The reason if there is no answer, or if the keeper does not end; empty otherwise."""
    durable: Mapping[str, int | None] = {}
    """Newest complete step of each level, by URL. Only for "stop", if the keeper ends."""
