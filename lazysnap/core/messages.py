"""Messages of trainers and keepers: four, and each is the whole state of its sender.

::

    trainer  ── TrainerState ──>  keeper of its node      one connection per rank
    trainer  <── KeeperState ───  keeper

    keeper   ──── Report ──────>  coordinator             the keeper of node 0
    keeper   <──── Order ───────  coordinator

A sender sends its state when it changed and when a connection begins. So losing, repeating or delaying a message does
no harm, and no answers or retries are needed. Messages of one connection keep their order, and no message of an earlier
connection comes after those of a later one.

Terms of ``core``:

* A *start* is one launch of the training, on all ranks. Its id grows from start to start.
* A *snapshot* is one step of one start on a level. A *capture* is the same step in the memory of one rank.
* A *grant* is the coordinator's order to store one step at one level.
* A step is *required* if a trainer wants it at every level, and *answered* once every level has it or gave it up.
* A *job* is the training that a keeper serves. A *task* is one piece of work at a level, on a thread of its own.
"""

import enum
from collections.abc import Collection
from typing import Any

from msgspec import Struct

PROTOCOL = 5
"""Incremented with every change of a message between trainer and keeper: ``wire`` refuses another number. ``Report``
and ``Order`` go from keeper to keeper; their number is ``peers.wire.PROTOCOL``.
"""

COORDINATOR_NODE = 0
"""The node whose keeper is the coordinator. All others connect to it."""

MAX_IN_MESSAGE = 32
"""Maximum complete snapshots of a level in one message: the newest, or more if ``keep_last`` needs them. Required ones
are added. The limit also holds for cancelled steps, and for lost steps that are not required.
"""

MAX_STORED_REPORTED = 64
"""Stored snapshots per level in one report."""


class StepKey(Struct, frozen=True, order=True, array_like=True):
    """Identifies a snapshot. A step that is repeated after a restart is another snapshot, of another start.

    Keys sort by age: the later start is newer, then the greater step.
    """

    start: int
    """Id of the start; grows from start to start."""
    step: int


class NamedStep(Struct, frozen=True, order=True, array_like=True):
    """A name that a user gave to a snapshot."""

    name: str
    key: StepKey


def is_removed(named: NamedStep, released: Collection[NamedStep]) -> bool:
    """Return True if a snapshot is to lose its name. ``released``: see ``TrainerState``."""
    return any(removal.name == named.name and named.key < removal.key for removal in released)


class LevelSettings(Struct, frozen=True):
    """A storage level in the user's configuration. See ``config.PersistentLevel``."""

    url: str
    every_s: float = 60.0
    """Seconds between due snapshots. The first one is due at once."""
    every_n_steps: int | None = None
    """If set, multiples of it are due, and ``every_s`` is ignored."""
    keep_last: int = 2
    keep_every_n_steps: int | None = None
    """Complete snapshots of these steps are never deleted."""
    timeout_s: float = 120.0
    """Seconds without progress after which a task is abandoned, and the level counts as failed."""
    is_shared: bool = True
    """True if all nodes share this level."""
    max_bytes_per_s: int | None = None
    storage_options: dict[str, Any] | None = None


class RedundancySettings(Struct, frozen=True):
    """Parity of the captures of this node in the memory of the other nodes of its group."""

    every_n_steps: int = 10
    timeout_s: float = 30.0
    """See ``LevelSettings.timeout_s``. While a task hangs two slots are held, so captures find none. The last boundary
    of a training waits for one, ``io_timeout_s`` at most: the hang ends sooner.
    """
    members: tuple[int, ...] = ()
    """Numbers of the nodes of the group, this one included."""
    parity: int = 1
    """Nodes of the group that may be lost."""
    most_lost: int = 1
    """Number of nodes of all groups that may be lost. What more nodes hold needs no parity."""
    block_bytes: int = 1 << 20
    max_bytes_per_s: int | None = None

    @property
    def level(self) -> LevelSettings:
        """Redundancy as a level, whose files are parity in memory."""
        return LevelSettings("redundancy", every_n_steps=self.every_n_steps, keep_last=1, timeout_s=self.timeout_s)


class JobSettings(Struct, frozen=True):
    """Settings that all ranks of a node share, for one or more starts."""

    run: str
    """Id of the run: 16 hexadecimal digits."""
    levels: tuple[LevelSettings, ...]
    """Fast to slow."""
    redundancy: RedundancySettings | None = None
    capture_every_n_steps: int = 1
    num_kept: int = 1
    """K: newest whole captures that are never overwritten. See ``memory.slot_choice``."""
    ranks: tuple[int, ...] = (0,)
    """Numbers of the ranks of the node among all ranks, by local rank."""
    world_size: int = 1
    node: int = 0
    num_nodes: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the node."""
        return len(self.ranks)


class PeerAddress(Struct, frozen=True, array_like=True):
    """The address at which the keeper of a node serves the others."""

    host: str
    port: int
    """The port, or 0 if it does not serve."""


class PeerSettings(Struct, frozen=True):
    """Settings with which the keepers of one start connect to each other."""

    job: str
    node: int
    """The number of the receiving node."""
    secret: str
    """See ``peers.secret``. Drawn for each start."""
    addresses: tuple[PeerAddress, ...]
    """One address for each node."""


class MemoryWish(Struct, frozen=True):
    """The memory that a trainer wants for its captures."""

    num_slots: int
    meta_bytes: int
    image_bytes: int
    growth_bytes: int = 0
    """Host memory that training will still take. Slots leave it free."""
    max_bytes: int | None = None
    """Limit for the memory of all slots of the rank; None: no limit."""
    spill_directory: str | None = None
    """Directory for slots as files, if memory does not suffice; None: no files."""


class Farewell(enum.Enum):
    """Ways in which a training ends its connection to the keeper."""

    NONE = ""
    LEFT = "left"
    """Treated as if it died: memory waits for a restart."""
    OVER = "over"
    """The training is over: memory is stored, then freed."""


class TrainerState(Struct, frozen=True, tag="trainer"):
    """The complete state of one trainer for its keeper."""

    local_rank: int
    """Number of the rank on its node."""
    start: int = 0
    """Id of the start; 0 while the trainer still restores."""
    step: int = -1
    """The step from which this start continues; -1 before the first."""
    job: JobSettings | None = None
    """None while the trainer still restores."""
    source: str = ""
    """The source from which that step was restored; only for the event log."""
    peers: PeerSettings | None = None
    """None with one node."""
    linger_s: float = 1800.0
    """Seconds that memory waits for a restart after the last trainer of the node died."""
    memory: MemoryWish | None = None
    """None without captures, or if the size of the state is not known yet."""
    slots: tuple[int, ...] = ()
    """Ids of the slots of the trainer. After the death of a keeper their descriptors are sent, too."""
    returned: tuple[int, ...] = ()
    """Ids of unused slots, whose contents are not needed."""
    required: tuple[int, ...] = ()
    """Steps of this start that every level must store, due or not."""
    protect: tuple[int, ...] = ()
    """Steps of this start that other nodes must protect, due or not."""
    names: tuple[NamedStep, ...] = ()
    """Names to give. Their steps are required at the first level."""
    released: tuple[NamedStep, ...] = ()
    """Names to remove at every level, each from all snapshots that are older than its key."""
    is_preempted: bool = False
    """True after a preemption signal: the newest capture is stored at once, and all ranks are informed."""
    is_sealed: bool = False
    """True once captures have stopped: its captures count like those of a dead trainer."""
    farewell: Farewell = Farewell.NONE
    waited_s: float = 0.0
    """Seconds that training has waited for lazysnap so far, for reports."""


class LevelState(Struct, frozen=True):
    """State of one level for trainers."""

    complete: tuple[StepKey, ...] = ()
    """The newest snapshots that all nodes stored, and required ones."""
    given_up: tuple[StepKey, ...] = ()
    """Required steps that this level will not have."""
    is_listed: bool = False
    """True once this node has listed files and names."""
    is_failing: bool = False
    """True while the level fails on some node."""
    failure: str = ""
    """The error of the last task of this node; empty while the level works on this node."""
    failed_step: int | None = None
    """The step that the task did not store; None: another task."""
    num_failures: int = 0
    """Steps that were not stored since the keeper began the job."""


class KeeperAlert(Struct, frozen=True, array_like=True):
    """A problem that is reported to the user while it lasts."""

    about: str
    """``links``, ``protection`` or ``keeper``."""
    text: str


class KeeperState(Struct, frozen=True, tag="keeper"):
    """The complete state of the keeper for a trainer."""

    pid: int = 0
    slots: tuple[int, ...] = ()
    """Ids of the slots of this rank."""
    newest_sequence: int = 0
    """The greatest sequence number in them when the trainer connected."""
    memory_refusal: str = ""
    """The reason if there is no memory for the next slot; empty while it is made or exists."""
    levels: tuple[LevelState, ...] = ()
    """Fast to slow; empty before the start is known."""
    protected: StepKey | None = None
    """Newest capture that survives the loss of a node."""
    names: tuple[NamedStep, ...] = ()
    """Names that were given at some level: the first one, or the fastest that could store the step."""
    lost: tuple[StepKey, ...] = ()
    """Required steps that no level can store any more."""
    alerts: tuple[KeeperAlert, ...] = ()
    is_preempted: bool = False
    """True if some rank is preempted."""
    serves_at: PeerAddress | None = None
    """The address at which the keeper serves other nodes; None until it listens there. After a restart it may be the
    address of the start before.
    """
    refusal: str = ""
    """The reason if this trainer is not served. The keeper then closes the connection."""


class GrantProgress(enum.Enum):
    """Progress of one node with the grant of one level.

    ::

        LISTING ──files are known──> IDLE

        IDLE ──grant──> WAITING ──source available──> WRITING ──read back──> STORED
                           │                             ├──> FAILED
                           └──> MISSED                   └──> MISSED

    If redundancy loses its spare slot, any grant becomes MISSED, also a stored one. A level that fails while it waits
    becomes FAILED, too. If a hanging thread stored the file after all, the state becomes STORED. The next order with
    another grant leads from any state but LISTING to WAITING, to STORED if the node has the file, or to IDLE.
    """

    LISTING = "listing"
    """The node has not listed its files yet. It follows no grant, and nothing is counted or deleted."""
    IDLE = "idle"
    WAITING = "waiting"
    """The write has not begun: not all ranks of the node hold the capture, another task of the level is running, or the
    level fails.
    """
    WRITING = "writing"
    STORED = "stored"
    """The file was written, committed and read back. When all nodes are in this state, the snapshot is complete."""
    MISSED = "missed"
    """The source will never have the step. The level itself works."""
    FAILED = "failed"


class Wants(Struct, frozen=True):
    """The wants of trainers at one time: of one, of all of a node, or of all nodes."""

    required: frozenset[StepKey] = frozenset()
    """Steps that every level must store."""
    protect: frozenset[StepKey] = frozenset()
    """Steps that other nodes must protect."""
    names: frozenset[NamedStep] = frozenset()
    """Names to give, or given already: a name that is sent only until it is answered would be requested again. Their
    steps are required at the first level.
    """
    released: frozenset[NamedStep] = frozenset()
    """Names to remove: see ``TrainerState``."""
    is_preempted: bool = False
    """True if some rank is preempted."""
    is_restoring: bool = False
    """True while a trainer restores, which may choose any snapshot: nothing is deleted."""

    @property
    def named_keys(self) -> set[StepKey]:
        """Return the steps that have or will get a name."""
        return {named.key for named in self.names}

    def union(self, other: "Wants") -> "Wants":
        """Return these wants and the other ones."""
        return Wants(
            required=self.required | other.required,
            protect=self.protect | other.protect,
            names=self.names | other.names,
            released=self.released | other.released,
            is_preempted=self.is_preempted or other.is_preempted,
            is_restoring=self.is_restoring or other.is_restoring,
        )


class LevelReport(Struct, frozen=True, array_like=True):
    """A node's state of one level."""

    version: int
    """The version of the order that the node obeyed. Only reports on the current version count."""
    grant: StepKey | None
    progress: GrantProgress
    is_ready: bool
    """False from a failed task until a small write succeeds. Meanwhile nothing is granted."""
    stored: tuple[StepKey, ...]
    """Snapshots whose part of this node is stored, the newest first."""
    names: tuple[NamedStep, ...] = ()
    """Names that are given there."""
    is_failing: bool = False
    """True from a failed task until a real task succeeds: a small write is not enough."""


class Report(Struct, frozen=True, tag="report"):
    """A node's state, for the coordinator."""

    node: int
    job: int
    """``JobCore.digest``: the settings that all nodes have. A message of other settings does not count."""
    coordinator: int
    """The number of the coordinator whose order this answers; 0 before the first order. Other coordinators ignore the
    report.
    """
    levels: tuple[LevelReport, ...]
    wants: Wants = Wants()
    """The wants of the trainers of the node."""
    captures_left: tuple[StepKey, ...] | None = None
    """Captures that all ranks of the node hold whole, once captures have stopped on the node; else None."""
    knows_drained: bool = False
    """True once the node read an order with ``is_drained``."""


class LevelOrder(Struct, frozen=True, array_like=True):
    """The coordinator's state of one level."""

    version: int
    """Incremented with each change of the grant. A step may be granted twice, and reports on the first grant may be
    late.
    """
    grant: StepKey | None
    source: int | None
    """The level from which the granted step is copied; None: the slots."""
    complete: tuple[StepKey, ...]
    cancelled: tuple[StepKey, ...]
    given_up: tuple[StepKey, ...]
    """Required steps that this level will never store."""
    named: tuple[StepKey, ...]
    """Snapshots that have or will get a name there: they are not deleted."""
    is_overtaken: bool
    """True if a required step must be read from the slots before the granted one. Training may wait for it and never
    begin the granted one (preemption), so a node that has not begun the granted step gives it up.
    """
    is_open: bool
    """False while a new coordinator does not know the files of all nodes. Then a node changes nothing."""
    is_failing: bool = False
    """True while the level fails on some node."""


class Order(Struct, frozen=True, tag="order"):
    """The coordinator's state, for every node."""

    job: int
    """See ``Report``."""
    coordinator: int
    levels: tuple[LevelOrder, ...]
    is_preempted: bool = False
    """True if some rank of some node is preempted."""
    lost: tuple[StepKey, ...] = ()
    is_drained: bool = False
    """True if training has ended everywhere, and all required captures are complete."""
    may_delete: bool = True
    """False if a node stores alone: it does not know what other nodes need."""
