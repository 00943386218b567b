"""Which rank, of which node, a trainer is."""

from collections.abc import Sequence
from dataclasses import dataclass

from lazysnap.levels.retention import Share
from lazysnap.topology import Place


@dataclass(frozen=True)
class Team:
    """One rank's place among all ranks and nodes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: int = 0
    nodes: int = 1

    @classmethod
    def of(cls, places: Sequence[Place], rank: int) -> "Team":
        """From where every rank of the training runs."""
        place = places[rank]
        nodes = list(dict.fromkeys(other.node for other in places))
        return cls(rank, len(places), place.local_rank, nodes.index(place.node), len(nodes))

    @property
    def share(self) -> Share:
        """The files that this rank looks after; the first of a node, files of frozen tensors as well."""
        return Share(frozenset({self.rank}), self.world_size, has_images=self.local_rank == 0)
