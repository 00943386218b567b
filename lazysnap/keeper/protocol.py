"""Messages between trainer and keeper: one class each, checked when it arrives."""

import functools
import json
import operator
from typing import Any, Literal

import msgspec

from lazysnap.config import MemoryLevel, PersistentLevel
from lazysnap.errors import KeeperError
from lazysnap.events import Alert, NameFailed
from lazysnap.keeper.held import HeldCapture, HeldParity, LevelStatus, NodeState, TrainerEnd
from lazysnap.links.secret import Secret
from lazysnap.topology import Team

PROTOCOL = 18
"""Version of the messages: trainer and keeper must have the same. Raised with every change that the other end sees."""


SlotName = int | str
"""The keeper's number of a slot for captures, or the digest of the frozen tensors in a slot."""


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Any of them."""


class Question(Message, frozen=True):
    """A message that has an answer."""

    id: int = 0
    """Tells its answer from others (see ``keeper.questions``)."""


class Answer(Message, frozen=True):
    """The answer to the question of the same number."""

    id: int = 0


# ---------------------------------------------------------------- what a trainer says


class Hello(Message, frozen=True):
    """The first word: who it is, and how the keeper is to serve it. Answered by ``Welcome``; by ``Done``, whose text
    says why, if another trainer of that local rank is attached."""

    levels: tuple[PersistentLevel, ...]
    memory: MemoryLevel
    team: Team


class Peers(msgspec.Struct, frozen=True):
    """Addresses by which the keepers of several nodes reach each other."""

    job: str
    host: str
    port: int
    """The address at which the keeper of node 0 listens."""
    secret: Secret
    own: tuple[str, int] = ("", 0)
    """The address at which the keeper of this node listens; port 0, if it does not."""


class Parity(msgspec.Struct, frozen=True):
    """The group in which nodes protect each other."""

    members: list[tuple[int, str, int]]
    """Number and read address of each node of the group."""
    parity: int
    """The number of nodes that may be lost."""
    most_lost: int
    """And of all nodes, where there are several groups: what more nodes hold needs no parity."""
    slots: int
    """The least slots of each rank: with fewer there are too few for captures beside those that are held."""
    every_n_steps: int
    max_bytes_per_s: int | None
    block_bytes: int


class Run(Message, frozen=True):
    """The run and the start of all captures from now on."""

    run_id: str
    start: str
    step: int
    """The step of training: captures are of later steps."""
    floor: int
    """The greatest sequence number of a capture before it."""
    every_n_steps: int
    """Steps from one capture to the next."""
    num_kept: int
    """The number of newest whole captures that a rank never writes over."""
    stored: dict[str, list[tuple[str, int]]]
    """Start and step of the complete snapshots that it continues, by level."""
    shared: list[str]
    """The levels at which all nodes see the same place, by their URL on this node. With several nodes."""
    peers: Peers | None
    """The other nodes, with several nodes."""
    is_new: bool
    """True if no keeper got this before."""
    parity: Parity | None = None
    """The group, with several nodes that protect each other."""
    source: str | None = None
    """The place from which the step was restored. For the events of the run alone (``lazysnap.events``)."""


class Reserve(Question, frozen=True, kw_only=True):
    """Ask for this many slots of these capacities, in bytes. ``HandOver`` comes for each, or ``MemoryRefused``."""

    meta: int
    image: int
    count: int = 1
    least: int = 1
    """The smallest count that the training may be configured to."""
    growth: int = 0
    """Bytes of host memory that training itself is still going to take: slots leave them free."""
    spills: bool = True
    """True if slots may be files where memory does not suffice."""
    frozen: str | None = None
    """The digest of the frozen tensors for which the slot is; ``None``: for captures."""


class Return(Message, frozen=True):
    """The sender does not use this slot from now on.

    A trainer gives a slot for captures back: nothing in it is needed. Into one of frozen tensors it writes nothing
    more: their words show if they are whole. A keeper does not hold these frozen tensors any more.
    """

    slot: SlotName


class SlotsChanged(Message, frozen=True):
    """Something changed in the slots. A hint: their words are the truth."""


class Store(Message, frozen=True):
    """A step must be stored at every level, due or not."""

    step: int
    name: str | None = None
    """The name that its snapshot gets, if any."""


class Release(Message, frozen=True):
    """A name is taken from the snapshots of the run."""

    name: str


class Protect(Message, frozen=True):
    """A step is to be protected by other nodes, due or not."""

    step: int


class AskInventory(Question, frozen=True, kw_only=True):
    """Answered by ``Inventory``. If another process than the rank's trainer asks, its slots come before the answer."""

    local_rank: int
    in_words: bool = False
    """True to get the state of the whole node (``Inventory.state``), and neither slots nor entries."""


class Drain(Question, frozen=True, kw_only=True):
    """Bring a step to all levels. Answered by ``Done``, when it is there, or every other level was tried; meanwhile
    ``Status.drained`` shows how far it is."""

    step: int


class ServePeers(Question, frozen=True, kw_only=True):
    """Serve other nodes at this address and port of the machine from now on. Answered by ``Done``."""

    host: str
    port: int
    secret: Secret


class Leave(Message, frozen=True):
    """The trainer ends, or is about to."""

    how: Literal["soon", "sealed", "left", "over"]
    """``soon``: the processes of this start are about to be killed, so the newest capture is stored now, and all ranks
    get to know. ``sealed``: the same, and this trainer captures nothing more: what it holds counts as that of a dead
    one, so that all ranks store the same step. ``left``: it leaves as if it died. ``over``: the training is over."""


# ---------------------------------------------------------------- what others say to a keeper


class Stop(Question, frozen=True, kw_only=True):
    """A person wants the keeper to leave. Answered by ``Done``, whose text says why it stays."""

    force: bool = False


# ---------------------------------------------------------------- what a keeper says


class Welcome(Message, frozen=True):
    """Whoever said hello is the trainer now. Slots follow."""

    pid: int
    newest: int = 0
    """The greatest sequence number of what is held: captures of earlier starts."""


class HandOver(Answer, frozen=True, kw_only=True):
    """Comes with a slot. An answer, if one for frozen tensors was asked for."""

    slot: SlotName | None
    """Its name. For a slot of an earlier keeper a trainer gives the digest of its frozen tensors, or ``None``."""
    fills: bool = False
    """True if this trainer shall fill it with frozen tensors; else another one does, or it is whole."""


class MemoryRefused(Answer, frozen=True, kw_only=True):
    """There is no room for the slots; as an answer, for the frozen tensors that were asked for."""

    text: str


class Done(Answer, frozen=True, kw_only=True):
    """The answer to a question that has no other one."""

    ok: bool = True
    """``False`` if what was to be done has failed."""
    text: str = ""
    """Why, for people."""


class Inventory(Answer, frozen=True, kw_only=True):
    """The captures of a keeper for one rank."""

    entries: list[HeldCapture]
    frozen: list[str]
    """Digests of frozen tensors."""
    end: TrainerEnd | None
    """The end of the last trainer."""
    local_ranks: list[int]
    """All ranks for which it holds anything."""
    parity: list[HeldParity] = []
    """The memory of the whole node; only for the first rank."""
    state: NodeState | None = None
    """Only where it was asked for (``AskInventory.in_words``), and once a training began."""


class Status(Message, frozen=True):
    """The message of a keeper to its trainers: all that they must know of one start.

    It is sent when something changed, and once a second: it shows that the keeper runs.
    """

    start: str = ""
    """Empty: no trainer began one yet."""
    levels: dict[str, LevelStatus] = {}
    """Every level, by its URL."""
    protected: int | None = None
    """The newest step that survives the loss of a node."""
    names: list[NameFailed] = []
    """The names that could not be given since the start began."""
    alerts: list[Alert] = []
    """The last one about links and about protection, and the last errors of the keeper."""
    is_ending: bool = False
    """True if the processes of the start are about to be killed."""
    drained: tuple[int, int] = (0, 0)
    """Bytes of the step that this trainer waits for: those that levels have, and those that all of them are to have."""


def _leaves(kind: type[Message]) -> list[type[Message]]:
    below = kind.__subclasses__()
    return [leaf for one in below for leaf in _leaves(one)] if below else [kind]


_ANY: Any = functools.reduce(operator.or_, _leaves(Message))
# Built now, while one thread imports this: two at once that use a type first crash the process (msgspec 0.22).
msgspec.json.Decoder(_ANY)


def encode(message: Message) -> bytes:
    """Return JSON. Not by msgspec's own encoder: names of files may hold bytes that are no UTF-8."""
    return json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode()


def decode(body: bytes) -> Message:
    """Raises: KeeperError, if it is none of these messages."""
    try:
        message: Message = msgspec.convert(json.loads(body), _ANY)
    except (ValueError, RecursionError) as error:  # msgspec.ValidationError is one
        raise KeeperError(f"the other end sent no message of this protocol: {error}") from error
    return message
