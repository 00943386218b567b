"""Messages between coordinator and nodes about grants: reports and orders, with their bounds.

Each carries the whole state of its sender. Losing, repeating or delaying one does no harm.
"""

import enum
import heapq
from collections.abc import Collection
from typing import Annotated

from msgspec import Meta, Struct

from lazysnap.shard.manifest import Digest

MAX_NODES = 1 << 16
MAX_LEVELS = 16
MAX_TOLD = 256
"""Steps in one list of a message. Messages are bounded, however long a run is."""

Step = Annotated[int, Meta(ge=0, le=1 << 62)]
Owner = Annotated[int, Meta(ge=0, le=1 << 62)]
"""A random number of one coordinator."""
Version = Annotated[int, Meta(ge=0, le=1 << 62)]
Steps = Annotated[tuple[Step, ...], Meta(max_length=2 * MAX_TOLD)]
StartId = Annotated[str, Meta(min_length=1, max_length=64)]


class StepKey(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """A snapshot of one run. Keys sort by age: the greater step is newer, then the later start."""

    step: Step
    start: StartId


class Progress(enum.Enum):
    """The progress of one node with the grant of one level.

    ::

        LISTING ──files are known──> IDLE, WAITING or STORED

        IDLE ──grant──> WAITING ──> WRITING ──> VERIFYING ──> STORED
                           │           └───────────┴──> FAILED, MISSED
                           └──> MISSED, YIELDED

    The next order leads from any state to WAITING, or to IDLE if it grants nothing. A node that lists the file of the
    granted step already goes to STORED at once.
    """

    LISTING = "listing"
    """The node does not know yet which files of this start it has there. Nothing is granted or cancelled meanwhile."""
    IDLE = "idle"
    WAITING = "waiting"
    """The slots do not hold the step on all ranks of the node yet."""
    WRITING = "writing"
    VERIFYING = "verifying"
    """The file is committed, the slots are free again, the file is being read back."""
    STORED = "stored"
    """The file was read back. When all nodes are here, the snapshot is complete."""
    MISSED = "missed"
    """The slots, or the file to copy, do not hold the step any more. The level itself is well."""
    YIELDED = "yielded"
    """No rank of the node began the step, and another one must be stored first."""
    FAILED = "failed"


UNDER_WAY = frozenset({Progress.WAITING, Progress.WRITING, Progress.VERIFYING, Progress.STORED})

GIVEN_UP = frozenset({Progress.MISSED, Progress.YIELDED, Progress.FAILED})


class LevelReport(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The report of a node about one level."""

    grant: Step | None
    source: Annotated[int, Meta(ge=0, lt=MAX_LEVELS)] | None
    progress: Progress
    is_ready: bool
    """False from a failed write until a small write to the level works."""
    stored: Steps
    """The newest steps of this start of which the node has a verified file, and all that are required."""
    grant_version: Version = 0
    """The version of the order that was obeyed."""
    frozen: Digest | None = None
    """The frozen tensors that the node asks to write there, or writes."""
    required: Steps = ()
    """Steps that must be stored there: a name, a flush, the last step of a training."""


class Report(Struct, frozen=True, tag="report", forbid_unknown_fields=True):
    """A message from a keeper to the coordinator."""

    node: Annotated[int, Meta(ge=0, lt=MAX_NODES)]
    owner: Owner
    """The coordinator whose order this node obeyed last."""
    levels: Annotated[tuple[LevelReport, ...], Meta(max_length=MAX_LEVELS)]
    left: Steps | None = None
    """When all trainers of the node are gone: the steps that all of its ranks hold whole. Else ``None``."""
    is_ending: bool = False
    """True if all processes are about to be killed, by a notice to a process of the node."""


class LevelOrder(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The order of the coordinator for one level."""

    grant: Step | None
    source: Annotated[int, Meta(ge=0, lt=MAX_LEVELS)] | None
    """The faster level whose file is copied; ``None``: the slots are read."""
    complete: Annotated[tuple[StepKey, ...], Meta(max_length=2 * MAX_TOLD)]
    """The newest complete snapshots, and all that are required."""
    cancelled: Steps
    """Steps whose grant was cancelled: files of them are incomplete, unless the step is granted again."""
    lost: Steps
    """Steps that had to be stored, and that no node can store any more."""
    is_ready: bool = True
    """True if the level works on all nodes."""
    grant_version: Version = 0
    """Grows with each change of the grant: a step may be granted again while reports on its first grant are on the way.
    """
    frozen: Digest | None = None
    """The frozen tensors that the receiver writes, of those that it asked for."""
    is_open: bool = True
    """False: a new coordinator does not know yet what all nodes have there. It grants and cancels nothing."""


class Order(Struct, frozen=True, tag="order", forbid_unknown_fields=True):
    """A message from the coordinator to every keeper."""

    owner: Owner
    levels: Annotated[tuple[LevelOrder, ...], Meta(max_length=MAX_LEVELS)]
    is_parted: bool = False
    """True if the coordinator has no link to some node. Nodes without trainers then store what they hold."""
    is_ending: bool = False
    """See ``Report``; of any node."""


def newest(steps: Collection[int]) -> tuple[int, ...]:
    """Return the newest items that fit into a message, in order."""
    return tuple(sorted(heapq.nlargest(MAX_TOLD, steps)))
