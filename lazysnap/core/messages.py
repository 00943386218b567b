"""What do trainers and keepers tell each other? Four messages; each is the whole state of its sender.

::

    trainer  ── TrainerState ──>  keeper of its node      one connection per rank
    trainer  <── KeeperState ───  keeper

    keeper   ──── Report ──────>  coordinator             the keeper of node 0
    keeper   <──── Order ───────  coordinator

A sender sends its state when it changed and when a connection begins. So losing, repeating or delaying a message does
no harm, nothing has to be answered, and nobody keeps a list of what the other side may have missed. Messages of one
connection keep their order, and nothing of an earlier connection comes behind a later one.
"""

import enum

from msgspec import Struct

PROTOCOL = 1
"""Raised with every change of a message. A keeper refuses trainers of another number."""

MAX_TOLD = 32
"""Complete snapshots per level in one message: the newest, and those that somebody requires."""

MAX_STORED_REPORTED = 64
"""Stored snapshots per level in one report."""


class StepKey(Struct, frozen=True, order=True, array_like=True):
    """Names a snapshot. A step that is passed again after a restart is another snapshot, of another start.

    Keys sort by age: the later start is newer, then the greater step.
    """

    start: int
    """Id of the start; grows from start to start."""
    step: int


class NamedStep(Struct, frozen=True, order=True, array_like=True):
    """A name that a user gave to a snapshot."""

    name: str
    key: StepKey


class LevelSettings(Struct, frozen=True):
    """A storage level, as the user configures it."""

    path: str
    every_s: float = 60.0
    """Seconds from one snapshot that is due to the next. The first one is due at once."""
    every_n_steps: int | None = None
    """If given, the multiples of it are due, and ``every_s`` does not count."""
    keep_last: int = 2
    keep_every_n_steps: int | None = None
    """Complete snapshots of these steps are never deleted."""
    io_timeout_s: float = 30.0
    """A job that moves no byte for so long is given up, and the level counts as failed."""


class RedundancySettings(Struct, frozen=True):
    """Parity of the captures in the memory of other nodes."""

    every_n_steps: int = 10
    timeout_s: float = 30.0


class JobSettings(Struct, frozen=True):
    """What all ranks of a job agree on, and the rank that says it."""

    run: str
    levels: tuple[LevelSettings, ...]
    """Fast to slow."""
    slot_bytes: int
    redundancy: RedundancySettings | None = None
    capture_every_n_steps: int = 1
    num_kept: int = 1
    """K: newest whole captures that are never written over. See ``memory.slot_choice``."""
    rank: int = 0
    """Number of the rank on its node."""
    num_ranks: int = 1
    node: int = 0
    num_nodes: int = 1
    linger_s: float = 600.0
    """Seconds for which memory waits for a restart after the last trainer of the node died."""


class TrainerState(Struct, frozen=True, tag="trainer"):
    """All that a keeper must know of one trainer."""

    settings: JobSettings
    start: int
    """Id of the start; 0 while the trainer still restores."""
    step: int
    """Step from which this start goes on; -1 before the first."""
    num_slots: int
    """Slots that the trainer wants."""
    slots: tuple[int, ...] = ()
    """Ids of the slots that it has. After the death of a keeper their descriptors come along."""
    required: tuple[int, ...] = ()
    """Steps of this start that every level must store, whatever its interval."""
    names: tuple[NamedStep, ...] = ()
    """Names that are to be given. Their steps are required at the first level."""
    released: tuple[str, ...] = ()
    """Names that are to be taken away at every level. Invariant: none of them is in ``names``."""
    is_ending: bool = False
    """True once it captures nothing more, and waits until the newest capture is stored."""
    protocol: int = PROTOCOL


class KeeperState(Struct, frozen=True, tag="keeper"):
    """All that a trainer must know of its keeper."""

    slots: tuple[int, ...] = ()
    """Ids of the slots of this rank."""
    complete: tuple[tuple[StepKey, ...], ...] = ()
    """For each level the newest snapshots that all nodes stored."""
    protected: StepKey | None = None
    """Newest capture that survives the loss of a node."""
    names: tuple[NamedStep, ...] = ()
    """Names that are given at the first level."""
    lost: tuple[StepKey, ...] = ()
    """Required steps that no level can store any more."""
    failures: tuple[str, ...] = ()
    """For each level, and then for redundancy, why its last job failed; empty while it works."""
    alerts: tuple[str, ...] = ()
    """What the user should read now, such as memory that was refused."""
    refusal: str = ""
    """Why this trainer is not served. The keeper closes the connection behind it."""


class Progress(enum.Enum):
    """Progress of one node with the grant of one level.

    ::

        LISTING ──files are known──> IDLE

        IDLE ──grant──> WAITING ──its source is there──> WRITING ──read back──> STORED
                           │                                ├──> FAILED
                           └──> MISSED                      └──> MISSED

    The next order leads from any state but LISTING to WAITING, to STORED if the node has the file, or to IDLE.
    """

    LISTING = "listing"
    """The node does not know yet which files it has. Nothing is granted, counted or deleted there meanwhile."""
    IDLE = "idle"
    WAITING = "waiting"
    """Not all ranks of the node have begun the step."""
    WRITING = "writing"
    STORED = "stored"
    """The file was written, committed and read back. When all nodes are here, the snapshot is complete."""
    MISSED = "missed"
    """The source does not hold the step, and never will. The level itself is well."""
    FAILED = "failed"


class LevelReport(Struct, frozen=True, array_like=True):
    """A node's state of one level."""

    version: int
    """Version of the order that the node obeyed. Only reports on the present version are counted."""
    grant: StepKey | None
    progress: Progress
    is_ready: bool
    """False from a failed job until a small write works."""
    stored: tuple[StepKey, ...]
    """Snapshots of which this node stored its part, the newest first."""
    names: tuple[NamedStep, ...] = ()
    """Names that are given there."""


class Report(Struct, frozen=True, tag="report"):
    """A node's state, for the coordinator."""

    node: int
    coordinator: int
    """The coordinator whose order this answers; for any other one the report does not count."""
    levels: tuple[LevelReport, ...]
    required: tuple[StepKey, ...] = ()
    names: tuple[NamedStep, ...] = ()
    """Names that trainers want, given or not: what is told only until it is answered would be asked for again."""
    left: tuple[StepKey, ...] | None = None
    """Captures that all ranks of the node hold whole, once none of them captures any more; else None."""
    knows_drained: bool = False
    """True once it read an order that says ``is_drained``."""


class LevelOrder(Struct, frozen=True, array_like=True):
    """The coordinator's state of one level."""

    version: int
    """Grows with each change of the grant. A step may be granted twice, and reports of the first time may be late."""
    grant: StepKey | None
    source: int | None
    """The level that the granted step is copied from; None: the slots."""
    complete: tuple[StepKey, ...]
    cancelled: tuple[StepKey, ...]
    given_up: tuple[StepKey, ...]
    """Required steps that this level will not have: nobody waits for them."""
    named: tuple[StepKey, ...]
    """Snapshots that have a name there, or are to get one: they are not deleted."""
    is_open: bool
    """False while a new coordinator does not know yet what all nodes have. Then a node goes on as it is."""


class Order(Struct, frozen=True, tag="order"):
    """The coordinator's state, for every node."""

    coordinator: int
    levels: tuple[LevelOrder, ...]
    lost: tuple[StepKey, ...] = ()
    is_drained: bool = False
    """True if nobody trains, and what must be stored of the captures that all nodes hold is complete everywhere."""
    may_delete: bool = True
    """False where a node stores alone: it does not know what others rely on."""
