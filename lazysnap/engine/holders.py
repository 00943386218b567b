"""Which shards of a snapshot a rank opens, the likeliest to hold what it wants first. Pure.

Nothing says who holds what before a shard is opened, and if each rank opened all of them, the restart would be
quadratic. The guesses below are right for shards cut evenly along one dimension, for a mesh that is the same again, and
for ranks of one node; where they are wrong all shards are tried, so they decide the time it takes and nothing else.
"""

from collections.abc import Callable, Collection, Mapping

from lazysnap.engine.assembly import Assembly
from lazysnap.errors import ShardCorrupt
from lazysnap.resolver import Entry

Replicas = Callable[[str], Collection[int]]
"""The ranks that hold now what this one wants of a tensor, as far as that can be said: one of them captured it, or
those of a node together.
"""


class Holders:
    """The shards of one snapshot that were not opened yet."""

    def __init__(self, chosen: Mapping[int, Entry], near: int, neighbours: Collection[int], replicas: Replicas) -> None:
        """``chosen``: where each rank's shard is; ``near``: whose part is most like this rank's; ``neighbours``: ranks
        that share a node with it.
        """
        order = sorted(chosen, key=lambda rank: (rank not in neighbours, chosen[rank].speed, abs(rank - near), rank))
        self._left = {rank: number for number, rank in enumerate(order)}
        self._first = min(chosen, default=0)
        self._replicas = replicas

    def take(self, rank: int) -> None:
        """It is opened."""
        self._left.pop(rank, None)

    def likeliest(self, assembly: Assembly) -> int | None:
        """Whose shard to open next, ``None`` if all are."""
        name = next(iter(assembly.missing))
        holding = [rank for rank in self._replicas(name) if rank in self._left]
        if holding:
            return min(holding, key=self._left.__getitem__)
        by_rows = self._by_rows(assembly, name)
        return by_rows if by_rows in self._left else next(iter(self._left), None)

    def _by_rows(self, assembly: Assembly, name: str) -> int:
        """Where the first hole lies, if all ranks hold equal parts in their order."""
        pieces = assembly.pieces(name)
        if not pieces:
            return self._first  # of a tensor with fewer rows than ranks the first ones hold a row each
        cut = [axis for axis in range(len(pieces[0].shape)) if len({piece.offsets[axis] for piece in pieces}) > 1]
        axis = next(iter(cut), 0)
        # The last part may be smaller.
        largest = max(pieces, key=lambda piece: piece.shape[axis] if piece.shape else 0)
        if not largest.shape or not largest.shape[axis]:
            return self._first
        return largest.rank + (assembly.gap(name, axis) - largest.offsets[axis]) // largest.shape[axis]


def complete(assembly: Assembly, holders: Holders, add: Callable[[int], object], where: str) -> None:
    """Open shards (``add`` takes them, too) until nothing is missing. Raises: ShardCorrupt, if something is in none."""
    while assembly.missing:
        rank = holders.likeliest(assembly)
        if rank is None:
            raise ShardCorrupt(f"{where}: {next(iter(assembly.missing))}: a part of it is in no shard within reach")
        add(rank)
