"""Groups of nodes that protect each other, and the pieces that their members hold. Pure: all nodes compute the same.

A group of n nodes with m parities has n stripes. In stripe s the members at positions s, s+1, .. s+m-1 (modulo n) hold
parity 0 to m-1; the others hold data. So each member holds m parity pieces and has data in n-m stripes: its part of a
snapshot is cut into as many pieces of one size. Any m members may be lost.

Each parity holder of a stripe has a file in memory: the parity, then checksums (xxh3-64, little-endian). First come the
checksums of the blocks of each data piece, by column, then those of the parity's own blocks. So a rebuilt block can be
compared with the original, and damaged parity is detected.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lazysnap.errors import ConfigError
from lazysnap.parity.codes import MAX_PIECES

CHECKSUM_BYTES = 8
_ALIGN = 64


@dataclass(frozen=True)
class Group:
    """Nodes that protect each other. Positions are indices into ``members``."""

    members: tuple[int, ...]
    """Node numbers, ascending."""
    parity: int
    """Parity pieces of each stripe, and members that may be lost."""

    def __post_init__(self) -> None:
        if not 1 <= self.parity < len(self.members) <= MAX_PIECES or [*self.members] != sorted({*self.members}):
            raise ConfigError(
                f"a group has more members than parities, at most {MAX_PIECES}, in ascending order; got {self}"
            )

    @property
    def pieces(self) -> int:
        """Data pieces of each stripe, and pieces of each member's part."""
        return len(self.members) - self.parity

    def holders(self, stripe: int) -> tuple[int, ...]:
        """Return the positions of the members that hold parity 0, 1, .. of the stripe."""
        return tuple((stripe + row) % len(self.members) for row in range(self.parity))

    def data(self, stripe: int) -> tuple[int, ...]:
        """Return the positions of the members that hold its data pieces, by column."""
        positions = set(range(len(self.members)))
        positions.difference_update(self.holders(stripe))
        return tuple(sorted(positions))

    def parities(self, position: int) -> tuple[tuple[int, int], ...]:
        """Return the ``(stripe, row)`` of the parity pieces of a member, by row."""
        return tuple(((position - row) % len(self.members), row) for row in range(self.parity))

    def stripes(self, position: int) -> tuple[int, ...]:
        """Return the stripes in which a member has data: piece p of its part belongs to the p-th of them."""
        stripes = set(range(len(self.members)))
        for stripe, _ in self.parities(position):
            stripes.remove(stripe)
        return tuple(sorted(stripes))


def groups_of(nodes: int, size: int, parity: int) -> tuple[Group, ...]:
    """Return the groups of so many nodes.

    Groups have at most ``size`` members, and differ by at most one. They are larger than ``size`` only where there are
    too few nodes for more groups of more than ``parity`` members. Nodes with adjacent numbers are in different groups,
    because they often share a rack.

    Raises: ConfigError, if there are not more nodes than ``parity``.
    """
    if not 1 <= parity < size:
        raise ConfigError(f"groups of {size} nodes cannot have {parity} parities: one at least, and fewer than nodes")
    if nodes <= parity:
        raise ConfigError(f"{parity} parities need {parity + 1} nodes at least, got {nodes}")
    num_groups = min(-(-nodes // size), nodes // (parity + 1))
    return tuple(Group(tuple(range(first, nodes, num_groups)), parity) for first in range(num_groups))


@dataclass(frozen=True)
class Pieces:
    """The layout of the parts of a group in its stripes, block by block, for one snapshot."""

    group: Group
    sizes: tuple[int, ...]
    """Bytes of each member's part."""
    most_block_bytes: int

    @cached_property
    def _share(self) -> int:
        return max(_ALIGN, -(-max(self.sizes) // self.group.pieces))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes read and compared at a time."""
        return min(self.most_block_bytes, -(-self._share // _ALIGN) * _ALIGN)

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks of a piece."""
        return -(-self._share // self.block_bytes)

    @property
    def piece_bytes(self) -> int:
        """Size of each piece. Zeros follow after the end of a part."""
        return self.num_blocks * self.block_bytes

    @property
    def stripe_bytes(self) -> int:
        """Size of a stripe's file."""
        return self.piece_bytes + (self.group.pieces + 1) * self.num_blocks * CHECKSUM_BYTES

    def checksum_at(self, column: int, block: int) -> int:
        """Return the offset, in a stripe's file, of the checksum of a block of a data piece.

        The column after the last one is the parity.
        """
        return self.piece_bytes + (column * self.num_blocks + block) * CHECKSUM_BYTES

    def span(self, position: int, stripe: int, block: int) -> tuple[int, int]:
        """Return the offset and length of a block in the part of the member at that position.

        The block is one of the member's piece in that stripe. The length is 0 after the end of the part.
        """
        piece = self.group.stripes(position).index(stripe)
        offset = piece * self.piece_bytes + block * self.block_bytes
        bytes_left = self.sizes[position] - offset
        return offset, max(0, min(self.block_bytes, bytes_left))

    def locate(self, position: int, index: int) -> tuple[int, int]:
        """Return the stripe, and the block in the piece, of block ``index`` of a member's part."""
        piece, block = divmod(index, self.num_blocks)
        return self.group.stripes(position)[piece], block


def can_rebuild(group: Group, parts: Sequence[int], parities: Sequence[int]) -> bool:
    """True if every lost part can be rebuilt.

    ``parts``: positions whose part is present; ``parities``: positions whose parity is present. Neither implies the
    other: a keeper that died lost only its parity.
    """
    for stripe in range(len(group.members)):
        lost_parts = set(group.data(stripe)).difference(parts)
        present_parities = set(group.holders(stripe)).intersection(parities)
        if len(lost_parts) > len(present_parities):
            return False
    return True
