"""All tensors of a snapshot, whole: put together from the parts that are in the shards of all ranks. Needs no torch."""

from lazysnap.errors import StateError
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.assembly import Assembly, JoinedTensor
from lazysnap.snapshots.reader import OpenSnapshot


class WholeSnapshot:
    """The tensors of an open snapshot by their names in the state of one rank."""

    def __init__(self, snapshot: OpenSnapshot, rank: int = 0) -> None:
        """``rank``: whose small state and own tensors are used.

        Raises: StateError, if the ranks number their parameters in different ways; ShardCorrupt.
        """
        self.snapshot = snapshot
        self.meta: CaptureMeta = snapshot.meta(rank)
        """The metadata of this rank."""
        first = snapshot.meta(0).parameters
        for other, held in enumerate(snapshot.ranks):
            if held[0].meta.parameters != first:
                raise StateError(
                    f"{held[0].where}: the optimizers of rank {other} hold other parameters than those of rank 0 "
                    "(pipeline parallelism?): their states have no distinct names; restore with as many ranks "
                    "as saved it, through the engine"
                )
        self._assembly = Assembly(rank)
        # This rank first: of equal parts the first one is read.
        for held in (snapshot.ranks[rank], *snapshot.ranks[:rank], *snapshot.ranks[rank + 1 :]):
            self._assembly.add(held)

    def tensor(self, name: str) -> JoinedTensor:
        """Return a tensor. Raises: ShardCorrupt, if shards lack a part of it, or do not fit each other."""
        with self.snapshot.naming():
            self._assembly.want([name])
            return self._assembly.tensor(name)
