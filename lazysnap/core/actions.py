"""The events that the core receives, and the actions that it returns. Both are values.

The loop creates events and carries out actions. A simulation does the same without processes. A *connection* is a
number from the loop. A *task* of a level is slow work on its thread, one at a time: ``Task``. Redundancy is one more
level, after those of storage: its task computes parity, and its files are the parity in memory.
"""

import enum
from dataclasses import dataclass

from lazysnap.core.messages import (
    JobSettings,
    KeeperState,
    MemoryWish,
    NamedStep,
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
    """A connection ended. Its process may still be alive, and connect again."""

    connection: int


@dataclass(frozen=True)
class ProcessDied:
    """The process of a trainer ended: it writes nothing more."""

    pid: int


@dataclass(frozen=True)
class SlotsSeen:
    """The current words of all slots of the node."""

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
    """The task of a level makes progress, so it does not hang."""

    number: int
    """The number of the task."""
    moved_bytes: int = 0
    """Bytes that the task has moved so far."""


@dataclass(frozen=True)
class TaskEnded:
    """The task of a level ended, successfully unless this is a ``Missed`` or a ``Failed``."""

    number: int
    """The number of the task."""


@dataclass(frozen=True)
class Listed(TaskEnded):
    """The level was listed."""

    stored: tuple[StepKey, ...]
    """Snapshots whose part of this node is committed and has the right size."""
    leftovers: tuple[StepKey, ...] = ()
    """Snapshots with files of this node, but without a commit."""
    names: tuple[NamedStep, ...] = ()
    """Names of the run at this level. Only node 0 gives names, so other nodes have none."""
    unusable: tuple[StepKey, ...] = ()
    """Snapshots with committed files that this node must delete and that do not count: damaged ones, and incomplete
    ones of another number of nodes. Retention deletes them like complete ones.
    """


@dataclass(frozen=True)
class StepStored(TaskEnded):
    """The step was written, committed and read back."""

    written_bytes: int = 0
    """Bytes of the file, without an existing base; 0 if it was committed already."""
    seconds: float = 0.0
    """Seconds from the beginning of the write to the end of the reading back."""


@dataclass(frozen=True)
class Missed(TaskEnded):
    """The source did not hold the step, or the write was cancelled. The level itself works."""

    text: str


@dataclass(frozen=True)
class Failed(TaskEnded):
    """The level failed, or returned other bytes. Nothing was committed."""

    text: str


@dataclass(frozen=True)
class KeeperTrouble:
    """An error was logged that must be reported to the user."""

    text: str


class PlainEvent(enum.Enum):
    """Events without further data."""

    TIME_PASSED = "time passed"
    """The wake-up time of the core has come."""
    TERMINATED = "terminated"
    """SIGTERM: store the newest capture and end, as soon as no trainer is left."""
    PEER_UP = "peer up"
    """A link to another node began. Messages sent before may be lost."""
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
    """Close a connection after sending its pending messages."""

    connection: int


@dataclass(frozen=True)
class MakeSlot:
    """Allocate a slot in the background. ``SlotMade`` or ``MemoryRefused`` follows."""

    rank: int
    wish: MemoryWish


@dataclass(frozen=True)
class FreeSlot:
    """Close a slot that its trainer returned. A task that reads it keeps reading."""

    rank: int
    slot_id: int


@dataclass(frozen=True)
class FreeParity:
    """Free all parity that the node holds: an earlier start made it, and the current one has no redundancy."""


@dataclass(frozen=True)
class VoidSlot:
    """Write VOID of a slot, then read the slots again: its trainer died during the capture."""

    rank: int
    slot_id: int
    sequence: int


@dataclass(frozen=True)
class BeginJob:
    """Serve a training with these settings from now on. Its levels replace the earlier ones, whose tasks were
    cancelled.
    """

    settings: JobSettings


@dataclass(frozen=True)
class SetPeers:
    """Serve and connect to the keepers of this start. Links of an earlier start are closed."""

    peers: PeerSettings


@dataclass(frozen=True)
class SetAwaitedStep:
    """Set the captures for which trainers wake the keeper: write the word AWAITED, then read the slots again."""

    step: int | None
    """The first awaited step, if any."""


@dataclass(frozen=True)
class Hold:
    """Write HELD of a slot, then read the slots again."""

    rank: int
    slot_id: int
    sequence: int
    """The held capture. A later capture in the same slot is not held."""
    num_kept: int
    """Newest whole captures that the trainer does not overwrite: all of them, once it captures nothing more."""


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
    """The number of the task, used only once."""


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
    """Rank and slot id of each part; empty for a copy."""
    source: int | None = None
    """The level that the step is copied from."""


@dataclass(frozen=True)
class DeleteFiles(Task):
    """Delete files of this node. ``TaskEnded`` or ``Failed`` follows."""

    keys: tuple[StepKey, ...]


@dataclass(frozen=True)
class SetNames(Task):
    """Give and remove names. ``TaskEnded`` or ``Failed`` follows."""

    added: tuple[NamedStep, ...]
    released: tuple[NamedStep, ...]


@dataclass(frozen=True)
class CancelTask:
    """Forbid the task to commit.

    A running task soon ends as ``Missed``. A hanging task may end late or never, and the next task begins meanwhile.
    After ``TaskEnded`` its thread has returned. A step that it stored anyway counts.
    """

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
    | FreeParity
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
