"""Events, which go into the core, and actions, which come out. Both are values.

The loop turns what happens into events, and carries actions out. A simulation does the same without any process.
A *connection* is a number that the loop gives. A *task* of a level is slow work on its thread, one at a time: ``Task``.
Redundancy is one more level, after those of storage: its task computes parity, its files are the parity in memory.
"""

import enum
from dataclasses import dataclass

from lazysnap.core.messages import (
    JobSettings,
    KeeperState,
    MemoryWish,
    NamedStep,
    NameRefusal,
    Order,
    PeerSettings,
    Report,
    StepKey,
    TrainerState,
)
from lazysnap.memory.slot_choice import SlotView

# Events


@dataclass(frozen=True)
class TrainerReported:
    """A trainer sent its state."""

    connection: int
    pid: int
    state: TrainerState


@dataclass(frozen=True)
class ConnectionLost:
    """A connection ended. Its process may live on, and connect again."""

    connection: int


@dataclass(frozen=True)
class ProcessDied:
    """A process that was a trainer ended: it writes nothing any more."""

    pid: int


@dataclass(frozen=True)
class SlotsSeen:
    """The words of all slots of the node, read just now."""

    slots: dict[int, tuple[SlotView, ...]]
    """The slots by rank."""


@dataclass(frozen=True)
class SlotMade:
    """Memory for a slot was allocated; ``SlotsSeen`` shows the slot."""

    rank: int


@dataclass(frozen=True)
class MemoryRefused:
    """There is no memory for a slot now."""

    rank: int
    text: str


@dataclass(frozen=True)
class TaskMoved:
    """The task of a level moved some bytes, so it does not hang."""

    level: int
    number: int
    """That of the task."""


@dataclass(frozen=True)
class TaskEnded:
    """The task of a level ended: well, unless this is a ``Missed`` or a ``Failed``."""

    number: int
    """That of the task."""


@dataclass(frozen=True)
class Listed(TaskEnded):
    """The level was listed."""

    stored: tuple[StepKey, ...]
    """Snapshots of which this node's part is committed, and has its size."""
    leftovers: tuple[StepKey, ...] = ()
    """Snapshots of which this node has files, and no commit."""
    names: tuple[NamedStep, ...] = ()
    """Names that the run gave there. Node 0 alone gives names, so on other nodes this is empty."""
    unusable: tuple[StepKey, ...] = ()
    """Snapshots with committed files that are this node's to delete, and that do not count: they are of another team
    and not whole, or damaged. Retention deletes them like complete ones.
    """


@dataclass(frozen=True)
class StepStored(TaskEnded):
    """The step was written, committed and read back."""

    written_bytes: int = 0
    """Bytes of the file, without a base that was there already; 0 for a file that was committed already."""
    seconds: float = 0.0
    """Seconds until it was committed."""
    checksum_s: float = 0.0
    read_back_s: float = 0.0


@dataclass(frozen=True)
class NamesSet(TaskEnded):
    """Names were given and taken away, but for those that the level does not take."""

    refused: tuple[NameRefusal, ...] = ()


@dataclass(frozen=True)
class Missed(TaskEnded):
    """The source did not hold the step any more, or the write was cancelled. The level is well."""

    text: str


@dataclass(frozen=True)
class Failed(TaskEnded):
    """The level refused, or gave other bytes back. Nothing was committed."""

    text: str


@dataclass(frozen=True)
class KeeperTrouble:
    """An error was logged that the user should know of."""

    text: str


class PlainEvent(enum.Enum):
    """Events of which there is nothing more to say."""

    TIME_PASSED = "time passed"
    """The time that the core asked to be woken at has come."""
    TERMINATED = "terminated"
    """SIGTERM: store the newest capture and end, as soon as no trainer is left."""
    PEER_UP = "peer up"
    """A link to another node began; what was sent before may be lost."""
    PEERS_LISTENING = "peers listening"
    """The keeper listens for other nodes, as ``SetPeers`` said."""


Event = (
    TrainerReported
    | ConnectionLost
    | ProcessDied
    | SlotsSeen
    | SlotMade
    | MemoryRefused
    | TaskMoved
    | TaskEnded
    | Report
    | Order
    | KeeperTrouble
    | PlainEvent
)
"""``Report`` and ``Order`` are the states that other nodes sent."""

# Actions


@dataclass(frozen=True)
class AdoptSlots:
    """Take over the slots whose descriptors came with the message of its trainer that is handled now."""

    rank: int


@dataclass(frozen=True)
class SendToTrainer:
    """Send the state to a trainer. A newer one replaces one that is not sent yet."""

    connection: int
    rank: int
    state: KeeperState


@dataclass(frozen=True)
class CloseConnection:
    """Close a connection after what was sent there."""

    connection: int


@dataclass(frozen=True)
class MakeSlot:
    """Allocate a slot, beside the loop. ``SlotMade`` or ``MemoryRefused`` follows."""

    rank: int
    wish: MemoryWish


@dataclass(frozen=True)
class FreeSlot:
    """Close a slot that its trainer returned. A task that reads it goes on reading."""

    rank: int
    slot_id: int


@dataclass(frozen=True)
class VoidSlot:
    """Write VOID of a slot, then read the slots again: its trainer died in the middle of the capture."""

    rank: int
    slot_id: int
    sequence: int


@dataclass(frozen=True)
class BeginJob:
    """Serve a training with these settings from now on. Its levels take the place of the earlier ones, whose tasks were
    cancelled.
    """

    settings: JobSettings


@dataclass(frozen=True)
class SetPeers:
    """Serve, and link to, the keepers of this start. Links of an earlier start are closed."""

    peers: PeerSettings


@dataclass(frozen=True)
class SetAwaitedStep:
    """Tell trainers for which captures the keeper is to be woken: write the word AWAITED, then read the slots again."""

    step: int | None
    """The step from which on captures are awaited; None: none is."""


@dataclass(frozen=True)
class Hold:
    """Write HELD of a slot, then read the slots again."""

    rank: int
    slot_id: int
    sequence: int
    """The capture that is held: a later one in the same slot is not."""
    num_kept: int
    """Newest whole captures that the trainer does not write over: all of them, once it captures nothing more."""


@dataclass(frozen=True)
class Release:
    """Clear HELD of a slot, then read the slots again."""

    rank: int
    slot_id: int


@dataclass(frozen=True)
class Task:
    """Begin a task on a thread of its own. Exactly one ``TaskEnded`` follows, unless the thread hangs."""

    level: int
    number: int
    """No number is used twice."""


@dataclass(frozen=True)
class ListLevel(Task):
    """Find the stored snapshots of this node. ``Listed`` or ``Failed`` follows."""


@dataclass(frozen=True)
class ProbeLevel(Task):
    """Try a small write. ``TaskEnded`` or ``Failed`` follows."""


@dataclass(frozen=True)
class WriteLevel(Task):
    """Store a step. ``StepStored``, ``Missed`` or ``Failed`` follows."""

    key: StepKey
    slots: tuple[tuple[int, int], ...]
    """Rank and slot id of each part; empty where it is copied."""
    source: int | None = None
    """The level that it is copied from."""


@dataclass(frozen=True)
class DeleteFiles(Task):
    """Delete files of this node. ``TaskEnded`` or ``Failed`` follows."""

    keys: tuple[StepKey, ...]


@dataclass(frozen=True)
class SetNames(Task):
    """Give names, and take names away. ``NamesSet`` or ``Failed`` follows."""

    added: tuple[NamedStep, ...]
    released: tuple[NamedStep, ...]


@dataclass(frozen=True)
class CancelTask:
    """The task must begin no commit any more.

    One that works ends soon, as ``Missed``. One that hangs may end late or never, and the next task begins meanwhile.
    If ``TaskEnded`` follows, its thread returned. A step that it stored all the same counts.
    """

    level: int
    number: int


@dataclass(frozen=True)
class Send:
    """Send a message to another node, if there is a link."""

    node: int
    message: Report | Order


@dataclass(frozen=True)
class Finish:
    """The keeper has nothing left to do: end the process."""


Action = (
    AdoptSlots
    | SendToTrainer
    | CloseConnection
    | MakeSlot
    | FreeSlot
    | VoidSlot
    | BeginJob
    | SetPeers
    | SetAwaitedStep
    | Hold
    | Release
    | Task
    | CancelTask
    | Send
    | Finish
)
