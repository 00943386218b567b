"""The places that shards are read from, behind one protocol."""

from typing import Protocol

from lazysnap.levels.watchdog import Beat
from lazysnap.resolver import Entry, FrozenEntry
from lazysnap.snapshots.reader import OpenShard

Item = Entry | FrozenEntry
"""A shard, or frozen tensors, that a source listed."""


class Source(Protocol):
    """Memory of one rank of this node, memory of other nodes, parity, or a level. All but levels have deadlines."""

    def open(self, item: Item, where: str, beat: Beat) -> OpenShard:
        """Return the bytes of a shard in blocks that are verified when they are read, its header read and verified.

        ``where``: the shard, for messages; ``beat`` reports progress, and may raise.
        Blocks. Raises: LazySnapError; FileNotFoundError; whatever the storage's package raises.
        """
        ...
