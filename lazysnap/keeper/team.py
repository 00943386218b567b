"""Which rank, of which node, a trainer is."""

from collections.abc import Sequence
from dataclasses import dataclass

from lazysnap.topology import Place


@dataclass(frozen=True)
class Team:
    """One rank's place among all ranks and nodes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: int = 0
    """Nodes are numbered in the order of their first ranks, so rank 0 is on node 0."""
    nodes: int = 1
    crew: tuple[int, ...] = (0,)
    """The ranks of the node, in order."""

    @classmethod
    def of(cls, places: Sequence[Place], rank: int) -> "Team":
        """From where every rank of the training runs."""
        place = places[rank]
        nodes = list(dict.fromkeys(other.node for other in places))
        crew = tuple(other.rank for other in places if other.node == place.node)
        return cls(rank, len(places), place.local_rank, nodes.index(place.node), len(nodes), crew)
