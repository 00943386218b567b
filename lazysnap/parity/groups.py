"""Groups of nodes that protect each other, and the pieces that their members hold. Pure: all nodes compute the same.

A group of n nodes with m parities has n stripes. In stripe s the members at positions s, s+1, .. s+m-1 (modulo n) hold
parity 0 to m-1; the others hold data. So each member holds m parity pieces and has data in n-m stripes: its part of a
snapshot is cut into as many pieces of one size. Any m members may be lost.
"""

from dataclasses import dataclass

from lazysnap.errors import ConfigError
from lazysnap.parity.codes import MAX_PIECES


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
