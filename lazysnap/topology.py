"""Which rank captures which part, and which ranks share a node. Pure functions of what all ranks know.

State that is the same on all ranks of a group is cut into contiguous shares of equal size, in the order of the state:
every rank captures one share, and together they hold exactly one copy (REFT, section 4: sharded snapshots).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The place where one rank runs."""

    rank: int
    world_size: int
    node: str
    """Equal for ranks that share memory."""
    local_rank: int
    """Number among the ranks of the node, from 0."""
    local_world_size: int


def places(nodes: Sequence[str]) -> list[Place]:
    """The place of every rank, from the node of every rank (``nodes[rank]``)."""
    local: dict[str, int] = {}
    numbers = []
    for node in nodes:
        numbers.append(local.get(node, 0))
        local[node] = numbers[-1] + 1
    return [Place(rank, len(nodes), node, numbers[rank], local[node]) for rank, node in enumerate(nodes)]


@dataclass(frozen=True)
class Team:
    """One rank's place among all ranks and nodes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: int = 0
    """Nodes are numbered in the order of their first ranks, so rank 0 is on node 0."""
    nodes: int = 1
    node_ranks: tuple[int, ...] = (0,)
    """The ranks of the node, in order."""

    @classmethod
    def of(cls, places: Sequence[Place], rank: int) -> "Team":
        """Return the team from the places of all ranks."""
        place = places[rank]
        nodes = list(dict.fromkeys(other.node for other in places))
        node_ranks = tuple(other.rank for other in places if other.node == place.node)
        return cls(rank, len(places), place.local_rank, nodes.index(place.node), len(nodes), node_ranks)


@dataclass(frozen=True)
class Rows:
    """Rows ``[start, stop)`` of one tensor along its first dimension; a tensor without dimensions is one row."""

    index: int
    start: int
    stop: int


def share(sizes: Sequence[tuple[int, int]], part: int, parts: int) -> list[Rows]:
    """The rows in share ``part`` of ``parts``, of tensors with ``(rows, bytes per row)``.

    The shares of all parts cover every row exactly once; their bytes differ by less than one row of the tensors at
    their ends. Tensors without bytes belong to part 0, so that their shape is kept.
    """
    total = sum(rows * width for rows, width in sizes)
    low, high = total * part // parts, total * (part + 1) // parts
    found = []
    at = 0
    for index, (rows, width) in enumerate(sizes):
        if rows * width == 0:
            if part == 0:
                found.append(Rows(index, 0, rows))
            continue
        # The first byte of a row decides its share.
        start = min(rows, max(0, -(-(low - at) // width)))
        stop = min(rows, max(0, -(-(high - at) // width)))
        if start < stop:
            found.append(Rows(index, start, stop))
        at += rows * width
    return found
