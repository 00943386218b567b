"""Requests to a ``PeerServer`` and its answers, with their bounds.

::

    client                        server
    Open(what)             ->     Opened(size_bytes)
    Read(offset, length)   ->     Block(length, checksum), then the bytes themselves
    Finish()               ->     Finished()

Any answer may be a ``Refusal`` instead. While the server waits for bytes it sends ``Alive`` before the answer.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lazysnap.errors import KeeperError
from lazysnap.grants.messages import MAX_NODES, StartId, Step

MAX_READ_BYTES = 16 << 20
"""Bytes that one ``Read`` may ask for."""
MAX_TEXT = 4096
"""Characters of a refusal."""

Size = Annotated[int, Meta(ge=0, le=1 << 62)]


class PeerRefused(KeeperError):
    """The keeper of another node answered that it cannot give what was asked for; the message is that keeper's."""


class PartOf(Struct, frozen=True, tag="part", forbid_unknown_fields=True):
    """The part of a node: what only this node holds of one snapshot."""

    start: StartId
    step: Step
    most_lost: Annotated[int, Meta(ge=1, lt=MAX_NODES)]
    """Nodes that may be lost: what more of them hold is left out."""


class SlotOf(Struct, frozen=True, tag="slot", forbid_unknown_fields=True):
    """One capture in the memory of one rank."""

    local_rank: Annotated[int, Meta(ge=0, lt=MAX_NODES)]
    sequence: Size
    part: Literal["meta", "image"]


class ParityOf(Struct, frozen=True, tag="parity", forbid_unknown_fields=True):
    """The parity piece that a node holds of one stripe of its group."""

    start: StartId
    step: Step
    stripe: Annotated[int, Meta(ge=0, lt=MAX_NODES)]


class FrozenOf(Struct, frozen=True, tag="frozen", forbid_unknown_fields=True):
    """Frozen tensors in the memory of a node, compared with their digest."""

    digest: Annotated[str, Meta(max_length=64)]
    part: Literal["meta", "image"]


What = PartOf | SlotOf | ParityOf | FrozenOf


class Open(Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Read this from now on. It replaces what was opened before."""

    what: What


class Read(Struct, frozen=True, tag="read", forbid_unknown_fields=True):
    """A range of what is open."""

    offset: Size
    length: Annotated[int, Meta(ge=1, le=MAX_READ_BYTES)]


class Finish(Struct, frozen=True, tag="finish", forbid_unknown_fields=True):
    """All was read: was it whole? Nothing is open any more."""


class Opened(Struct, frozen=True, tag="opened", forbid_unknown_fields=True):
    """It can be read."""

    size_bytes: Size


class Block(Struct, frozen=True, tag="block", forbid_unknown_fields=True):
    """``length`` bytes follow behind this frame."""

    length: Annotated[int, Meta(ge=1, le=MAX_READ_BYTES)]
    checksum: int
    """xxh3_64 of the bytes at their source."""


class Finished(Struct, frozen=True, tag="finished", forbid_unknown_fields=True):
    """The answer to ``Finish``: the bytes that were read were whole."""


class Refusal(Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """The request failed; the connection lives on."""

    text: Annotated[str, Meta(max_length=MAX_TEXT)]


class Alive(Struct, frozen=True, tag="alive", forbid_unknown_fields=True):
    """The answer takes time."""


Request = Open | Read | Finish
Answer = Opened | Block | Finished | Refusal | Alive
