"""Messages of trainers and keepers: four, and each is the whole state of its sender.

::

    trainer  ── TrainerState ──>  keeper of its node      one connection per rank
    trainer  <── KeeperState ───  keeper

    keeper   ──── Report ──────>  coordinator             the keeper of node 0
    keeper   <──── Order ───────  coordinator

A sender sends its state when it changed and when a connection begins. So losing, repeating or delaying a message does
no harm, nothing has to be answered, and nobody keeps a list of what the other side may have missed. Messages of one
connection keep their order, and nothing of an earlier connection comes after a later one.

Words of ``core``:

* A *start* is one launch of the training, on all ranks. Its id grows from start to start.
* A *snapshot* is one step of one start on a level. A *capture* is the same step in the memory of one rank.
* A *grant* is the coordinator's order to store one step at one level.
* A step is *required* if a trainer wants it at every level, and *answered* once every level has it or gave it up.
* A *job* is the training that a keeper serves. A *task* is one piece of work at a level, on a thread of its own.
"""

import enum
from typing import Any

from msgspec import Struct, field

PROTOCOL = 2
"""Raised with every change of a message between trainer and keeper: ``wire`` refuses another number. ``Report`` and
``Order`` go from keeper to keeper; their number is ``peers.wire.PROTOCOL``.
"""

COORDINATOR_NODE = 0
"""The node whose keeper is the coordinator. All others connect to it."""

MAX_IN_MESSAGE = 32
"""Complete snapshots of a level in one message: so many of the newest, or more where ``keep_last`` wants that. Those
that somebody requires come on top. It also bounds the cancelled steps, and the lost ones that nobody requires.
"""

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
    """A storage level, as the user configures it. See ``config.PersistentLevel``."""

    url: str
    every_s: float = 60.0
    """Seconds from one snapshot that is due to the next. The first one is due at once."""
    every_n_steps: int | None = None
    """If given, the multiples of it are due, and ``every_s`` does not count."""
    keep_last: int = 2
    keep_every_n_steps: int | None = None
    """Complete snapshots of these steps are never deleted."""
    timeout_s: float = 120.0
    """A task that moves no byte for so long is given up, and the level counts as failed."""
    is_shared: bool = True
    """True if all nodes see the same place there."""
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
    """Nodes of all groups that may be lost. What more nodes hold needs no parity."""
    block_bytes: int = 1 << 20
    max_bytes_per_s: int | None = None

    @property
    def level(self) -> LevelSettings:
        """Redundancy as one more level, whose files are parity in memory."""
        return LevelSettings("redundancy", every_n_steps=self.every_n_steps, keep_last=1, timeout_s=self.timeout_s)


class JobSettings(Struct, frozen=True):
    """Settings that all ranks of a node agree on, for one start and for earlier ones that had the same."""

    run: str
    """Id of the run: 16 hexadecimal digits."""
    levels: tuple[LevelSettings, ...]
    """Fast to slow."""
    redundancy: RedundancySettings | None = None
    capture_every_n_steps: int = 1
    num_kept: int = 1
    """K: newest whole captures that are never written over. See ``memory.slot_choice``."""
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
    """Address at which the keeper of a node serves the others."""

    host: str
    port: int
    """0: it does not."""


class PeerSettings(Struct, frozen=True):
    """Settings by which the keepers of one start reach each other."""

    job: str
    node: int
    """Number of the node that gets this."""
    secret: str
    """See ``peers.secret``. It is drawn anew for each start."""
    addresses: tuple[PeerAddress, ...]
    """One address for each node."""


class MemoryWish(Struct, frozen=True):
    """The memory that a trainer wants for its captures."""

    num_slots: int
    meta_bytes: int
    image_bytes: int
    growth_bytes: int = 0
    """Host memory that training itself is still going to take. Slots leave it free."""
    max_bytes: int | None = None
    """Bound for the memory of all slots of the rank; None: what the machine has."""
    spill_directory: str | None = None
    """Directory in which slots are files where memory does not suffice; None: nowhere."""


class Farewell(enum.Enum):
    """Ways in which a training parts from its keeper."""

    NONE = ""
    LEFT = "left"
    """Treated as if it died: memory waits for a restart."""
    OVER = "over"
    """The training is over: memory is stored, then freed."""


class TrainerState(Struct, frozen=True, tag="trainer"):
    """All that a keeper must know of one trainer."""

    local_rank: int
    """Number of the rank on its node."""
    start: int = 0
    """Id of the start; 0 while the trainer still restores."""
    step: int = -1
    """Step from which this start goes on; -1 before the first."""
    job: JobSettings | None = None
    """None while the trainer still restores."""
    source: str = ""
    """The place from which that step was restored; for the events of the run alone."""
    peers: PeerSettings | None = None
    """None where the job has one node."""
    linger_s: float = 1800.0
    """Seconds for which memory waits for a restart after the last trainer of the node died."""
    memory: MemoryWish | None = None
    """None: no captures are made, or the size of the state is not known yet."""
    slots: tuple[int, ...] = ()
    """Ids of the slots that it has. After the death of a keeper their descriptors come along."""
    returned: tuple[int, ...] = ()
    """Ids of the slots that it does not use any more, and of which nothing is needed."""
    required: tuple[int, ...] = ()
    """Steps of this start that every level must store, whatever its interval."""
    protect: tuple[int, ...] = ()
    """Steps of this start that other nodes must protect, whatever the interval."""
    names: tuple[NamedStep, ...] = ()
    """Names that are to be given. Their steps are required at the first level."""
    released: tuple[str, ...] = ()
    """Names that are to be taken away at every level. Invariant: none of them is in ``names``."""
    is_preempted: bool = False
    """True once this process is about to be killed: the newest capture is stored now, and all ranks get to know."""
    is_sealed: bool = False
    """True once it captures nothing more: what it holds counts like that of a dead trainer."""
    farewell: Farewell = Farewell.NONE
    waited_s: float = 0.0
    """Seconds that training has waited for lazysnap so far; for people."""


class LevelState(Struct, frozen=True):
    """State of one level for trainers."""

    complete: tuple[StepKey, ...] = ()
    """The newest snapshots that all nodes stored, and those that somebody requires."""
    given_up: tuple[StepKey, ...] = ()
    """Required steps that this level will not have."""
    is_listed: bool = False
    """True once this node knows which files and names are there."""
    is_failing: bool = False
    """True while the level does not work on some node, this one or another."""
    failure: str = ""
    """Why the last task of this node failed; empty while the level works here."""
    failed_step: int | None = None
    """The step that it did not store; None: it was another task."""
    num_failures: int = 0
    """Steps that were not stored since the keeper began the job."""
    writing: StepKey | None = None
    """The step that is being stored, if somebody waits for a step."""
    moved_bytes: int = 0


class KeeperAlert(Struct, frozen=True, array_like=True):
    """Trouble that the user should know of, as long as it lasts."""

    about: str
    """``links``, ``protection`` or ``keeper``."""
    text: str


class NameRefusal(Struct, frozen=True, array_like=True):
    """A name that a level does not take as it is."""

    url: str
    name: str
    text: str


class KeeperState(Struct, frozen=True, tag="keeper"):
    """All that a trainer must know of its keeper."""

    pid: int = 0
    slots: tuple[int, ...] = ()
    """Ids of the slots of this rank."""
    newest_sequence: int = 0
    """The greatest sequence number of any capture in them, when the trainer came."""
    memory_refusal: str = ""
    """Why there is no memory for the next slot; empty if there is, or it is being made."""
    levels: tuple[LevelState, ...] = ()
    """Fast to slow; empty before the start is known."""
    protected: StepKey | None = None
    """Newest capture that survives the loss of a node."""
    names: tuple[NamedStep, ...] = ()
    """Names that are given at some level: the first one, or the fastest that could store the step."""
    name_refusals: tuple[NameRefusal, ...] = ()
    lost: tuple[StepKey, ...] = ()
    """Required steps that no level can store any more."""
    alerts: tuple[KeeperAlert, ...] = ()
    is_preempted: bool = False
    """True if the processes of some rank are about to be killed."""
    is_serving_peers: bool = False
    """True once it listens for other nodes."""
    refusal: str = ""
    """Why this trainer is not served. The keeper closes the connection after it."""


class GrantProgress(enum.Enum):
    """Progress of one node with the grant of one level.

    ::

        LISTING ──files are known──> IDLE

        IDLE ──grant──> WAITING ──its source is there──> WRITING ──read back──> STORED
                           │                                ├──> FAILED
                           └──> MISSED                      └──> MISSED

    If redundancy loses its spare slot, any grant becomes MISSED, also a stored one.
    A level that fails while it waits is FAILED, too. A thread that hung may still have stored the file: it is
    STORED then. The next order with another grant leads from any state but LISTING to WAITING, to STORED if the node
    has the file, or to IDLE.
    """

    LISTING = "listing"
    """The node does not know yet which files it has. It follows no grant, and nothing is counted or deleted there."""
    IDLE = "idle"
    WAITING = "waiting"
    """The write has not begun: not all ranks of the node hold the capture, or another task of the level runs, or the
    level does not work now.
    """
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
    progress: GrantProgress
    is_ready: bool
    """False from a failed task until a small write works. Nothing is granted then."""
    stored: tuple[StepKey, ...]
    """Snapshots of which this node stored its part, the newest first."""
    names: tuple[NamedStep, ...] = ()
    """Names that are given there."""
    is_failing: bool = False
    """True from a failed task until a real task works: a small write that works is not enough."""


class Report(Struct, frozen=True, tag="report"):
    """A node's state, for the coordinator."""

    node: int
    job: int
    """``JobCore.digest``: the settings that all nodes have. A message of other settings does not count."""
    coordinator: int
    """Number of the coordinator whose order this answers; 0 before the first order. No other one counts the report."""
    levels: tuple[LevelReport, ...]
    required: tuple[StepKey, ...] = ()
    names: tuple[NamedStep, ...] = ()
    """Names that trainers want, given or not: one that is sent only until it is answered would be asked for again."""
    protect: tuple[StepKey, ...] = ()
    """Steps that trainers want protected by other nodes."""
    is_preempted: bool = False
    """True if the processes of some rank of the node are about to be killed."""
    captures_left: tuple[StepKey, ...] | None = field(default=None, name="left")
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
    is_overtaken: bool
    """True if a required step is to be read from the slots before the granted one. Training may wait for that step, and
    so never begin the granted one (preemption): a node that has not begun it gives it up.
    """
    is_open: bool
    """False while a new coordinator does not know yet what all nodes have. Then a node goes on as it is."""
    is_failing: bool = False
    """True while the level does not work on some node."""


class Order(Struct, frozen=True, tag="order"):
    """The coordinator's state, for every node."""

    job: int
    """See ``Report``."""
    coordinator: int
    levels: tuple[LevelOrder, ...]
    is_preempted: bool = False
    """True if the processes of some rank of some node are about to be killed."""
    lost: tuple[StepKey, ...] = ()
    is_drained: bool = False
    """True if nobody trains, and what must be stored of the captures that all nodes hold is complete everywhere."""
    may_delete: bool = True
    """False where a node stores alone: it does not know what others rely on."""
