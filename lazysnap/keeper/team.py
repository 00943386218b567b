"""The ranks of one node, as a keeper knows them: whom it belongs to, and where the keepers of the others are."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lazysnap.config import PersistentLevel
from lazysnap.keeper.identity import JobIdentity
from lazysnap.levels.retention import Share
from lazysnap.topology import Place


@dataclass(frozen=True)
class Team:
    """One rank's place among those of its node. The first one, the lead, writes the files that hold them all."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    ranks: tuple[int, ...] = (0,)
    """Of the node, by local rank."""
    node: int = 0
    nodes: int = 1
    addresses: tuple[str, ...] = ("",)
    """Of their keepers, by local rank."""

    @classmethod
    def of(cls, places: Sequence[Place], rank: int, identity: JobIdentity) -> "Team":
        """From where every rank of the training runs."""
        place = places[rank]
        nodes = list(dict.fromkeys(other.node for other in places))
        here = [other for other in places if other.node == place.node]
        return cls(
            rank,
            len(places),
            place.local_rank,
            tuple(other.rank for other in here),
            nodes.index(place.node),
            len(nodes),
            tuple(dataclasses.replace(identity, local_rank=other.local_rank).address for other in here),
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Team":
        """From a message. Raises: TypeError."""
        return cls(**{**fields, "ranks": tuple(fields["ranks"]), "addresses": tuple(fields["addresses"])})

    @property
    def is_lead(self) -> bool:
        """Whether this is the rank that writes for its node."""
        return self.local_rank == 0

    def gathers(self, level: PersistentLevel) -> bool:
        """Whether a file at ``level`` holds several ranks."""
        return level.aggregate == "node" and len(self.ranks) > 1

    def share(self, level: PersistentLevel) -> Share:
        """The files at ``level`` that this rank looks after."""
        ranks = self.ranks if self.gathers(level) else (self.rank,)
        return Share(frozenset(ranks), self.world_size, self.node if self.is_lead else None, self.nodes)
