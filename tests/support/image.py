"""A small shard that tells its step by every byte; without torch."""

from collections.abc import Sequence

from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import BlockSource, MemorySource, map_anonymous, shard_of
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import write_node_file
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest, Shard
from lazysnap.shard.names import NodeName


class Image(MemorySource):
    """One tensor of ``size`` bytes; room to the next page, as in a slot."""

    def __init__(self, step: int, size: int = 5000) -> None:
        layout = Layout.plan([TensorSpec("weight", "U8", (size,))])
        room = map_anonymous(-(-layout.size_bytes // 4096) * 4096)
        room[: len(layout.header)] = layout.header
        room[len(layout.header) : layout.size_bytes] = bytes([step % 256]) * size
        super().__init__(room, layout.size_bytes)


def write_node(
    storage: Storage, name: NodeName, shards: Sequence[Shard], source: BlockSource, former: str | None = None
) -> Manifest:
    """Write and commit the file of a node. ``former``: see ``write_node_file``."""
    place = FilePlace(storage, shards[0].meta.name.directory, name)
    return write_node_file(place, shards, source, former=former)


def write_shard(storage: Storage, meta: CaptureMeta, source: BlockSource) -> Manifest:
    """Write and commit the file of a node with one rank."""
    return write_node(storage, NodeName(meta.rank, meta.world_size), [shard_of(meta, source)], source)
