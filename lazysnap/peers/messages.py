"""Messages between the keepers of a start, besides ``Report`` and ``Order``, and their limits.

::

    keeper of node n                keeper of node 0
    Hello                  ->
                           <-       Hello
    Report, Report, ...    ->       the newest state of the sender, whenever it changed
                           <-       Order, Order, ...

    reader                          any keeper
    Read(subject, offset, length) ->
                           <-       Block(length, checksum, ...), then the bytes themselves; or a Refusal

Each ``Read`` is independent. After the first one a connection carries only reads. A reader retries after a ``Refusal``
with ``is_not_yet``.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lazysnap.core.messages import Order, Report
from lazysnap.errors import KeeperError, LazySnapError

MAX_NODES = 1 << 16
MAX_READ_BYTES = 16 << 20
"""Bytes that one ``Read`` may request."""
MAX_TEXT = 4096
"""Characters of a refusal, and of the name of a job."""

NodeNumber = Annotated[int, Meta(ge=0, lt=MAX_NODES)]
Size = Annotated[int, Meta(ge=0, le=1 << 62)]
StartId = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class PeerRefused(KeeperError):
    """The keeper of another node answered that it cannot give what was requested; the message is that keeper's."""


class NotYet(LazySnapError):
    """The bytes are not available yet. The reader must retry."""


class Hello(Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The first message in both directions of a link: who is at the other end. Later on a sign of life."""

    job: Text
    node: NodeNumber


class PartOf(Struct, frozen=True, tag="part", forbid_unknown_fields=True):
    """The part of a node: what only this node holds of one snapshot. See ``keeper.node_part``."""

    start: StartId
    step: Size
    most_lost: Annotated[int, Meta(ge=1, lt=MAX_NODES)]
    """Number of nodes that may be lost. Tensors that more nodes hold are omitted."""


class SlotOf(Struct, frozen=True, tag="slot", forbid_unknown_fields=True):
    """One capture in the memory of one rank."""

    local_rank: NodeNumber
    sequence: Size
    part: Literal["meta", "image"]


class ParityOf(Struct, frozen=True, tag="parity", forbid_unknown_fields=True):
    """The parity that a node holds of one stripe of its group."""

    start: StartId
    step: Size
    stripe: NodeNumber


Subject = PartOf | SlotOf | ParityOf
"""Kinds of bytes that can be read of a node."""


class Read(Struct, frozen=True, tag="read", forbid_unknown_fields=True):
    """Request bytes. The answer is a ``Block`` or a ``Refusal``."""

    subject: Subject
    offset: Size
    length: Annotated[int, Meta(ge=0, le=MAX_READ_BYTES)]
    """0: only the facts are wanted."""


class Block(Struct, frozen=True, tag="block", forbid_unknown_fields=True):
    """``length`` bytes follow after this frame.

    A block that reaches the end is answered only when all captures of which the bytes are were found whole.
    """

    length: Annotated[int, Meta(ge=0, le=MAX_READ_BYTES)]
    checksum: int
    """xxh3_64 of the bytes at their source."""
    size_bytes: Size
    """Bytes of all that can be read of this."""
    identity: int
    """Number of the captures that were read: another one means other captures of the same step."""


class Refusal(Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """A read failed; the connection lives on."""

    text: Text
    is_not_yet: bool = False
    """True if the bytes are not there yet: ask again."""


StateMessage = Report | Order
LinkMessage = Hello | Report | Order
"""Messages on a link, in both directions."""
Request = LinkMessage | Read
"""Messages that a keeper receives on a connection that it accepted."""
Answer = Block | Refusal
