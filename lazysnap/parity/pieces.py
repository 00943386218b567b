"""The layout of a group's parts in its stripes, block by block. Pure.

Each parity holder of a stripe has a file in memory: the parity, then checksums (xxh3-64, little-endian). First come the
checksums of the blocks of each data piece, by column, then those of the parity's own blocks. So a rebuilt block can be
compared with the original, and damaged parity is detected.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lazysnap.parity.groups import Group

CHECKSUM_BYTES = 8
_ALIGN = 64


@dataclass(frozen=True)
class Pieces:
    """The layout for one snapshot of one group."""

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
