"""A small shard that tells its step by every byte; without torch."""

from lazysnap.levels.source import BlockSource, MemorySource, map_anonymous, shard_of
from lazysnap.levels.store import SnapshotStore
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.names import NodeName


class Image(MemorySource):
    """One tensor of ``size`` bytes; room to the next page, as in a slot."""

    def __init__(self, step: int, size: int = 5000) -> None:
        layout = Layout.plan([TensorSpec("weight", "U8", (size,))])
        room = map_anonymous(-(-layout.size_bytes // 4096) * 4096)
        room[: len(layout.header)] = layout.header
        room[len(layout.header) : layout.size_bytes] = bytes([step % 256]) * size
        super().__init__(room, layout.size_bytes)


def write_shard(store: SnapshotStore, meta: CaptureMeta, source: BlockSource) -> Manifest:
    """Write and commit the file of a node with one rank."""
    return store.write_file(NodeName(meta.rank, meta.world_size), [shard_of(meta, source)], source)
