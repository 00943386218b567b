"""The base of a node's file: the blocks that do not change from one snapshot of a fine-tuning to the next.

A file of many gigabytes of frozen parameters is stored as two objects. The *base* has the blocks that contain only
frozen tensors, the file has all others. The manifest lists the ranges of the base and the checksums of all blocks. If a
base has the same checksums as that of the previous snapshot, it becomes a hard link, or a copy that the object store
makes. So each directory is a whole snapshot and can be deleted independently.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lazysnap.levels.source import BlockSource, header_of
from lazysnap.shard.checksum import BLOCK_BYTES
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import Manifest, Shard

_LEAST_SHARE = 0.1
"""Minimum share of a file for a base; a smaller base is not worth a second object."""

Ranges = tuple[tuple[int, int], ...]
"""Ranges of blocks: the first, and the one after the last."""


def base_of(shards: Sequence[Shard], source: BlockSource) -> Ranges:
    """Return the blocks of a file that contain only frozen tensors.

    Blocks: until the headers are written. Raises: CaptureAborted; FormatError, if one is no header.
    """
    ranges = []
    num_blocks = 0
    for start, stop in _frozen_bytes(shards, source):
        first = -(-start // BLOCK_BYTES)
        behind_last = stop // BLOCK_BYTES
        if first < behind_last:
            ranges.append((first, behind_last))
            num_blocks += behind_last - first
    if num_blocks * BLOCK_BYTES < _LEAST_SHARE * source.size_bytes:
        return ()
    return tuple(ranges)


def _frozen_bytes(shards: Sequence[Shard], source: BlockSource) -> list[tuple[int, int]]:
    """Return the bytes of frozen tensors in the order of the file; adjacent ones are one range."""
    ranges: list[tuple[int, int]] = []
    for shard in shards:
        frozen = {name for name, facts in shard.meta.tensors.items() if facts.get("frozen") is True}
        if not frozen:
            continue
        header = header_of(source, shard.offset, shard.size_bytes)
        layout = Layout.parse(header, shard.size_bytes, f"rank {shard.meta.rank}")
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            if spec.name not in frozen:
                continue
            start = shard.offset + offset
            stop = start + spec.nbytes
            if ranges and ranges[-1][1] == start:
                start, _ = ranges.pop()
            ranges.append((start, stop))
    return ranges


@dataclass(frozen=True)
class BlockPlaces:
    """The places of the blocks of a node's file: its base, or the file itself.

    Example::

        places = places_of(manifest)
        is_in_base, offset = places.find(7)
    """

    base: Ranges
    size_bytes: int
    """The size of the file as a whole."""
    block_bytes: int

    @property
    def base_bytes(self) -> int:
        """Bytes of the base."""
        return sum(stop - start for start, stop in self.base) * self.block_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file itself."""
        return self.size_bytes - self.base_bytes

    def of_base(self) -> list[int]:
        """Return the numbers of the blocks of the base, in order."""
        blocks: list[int] = []
        for start, stop in self.base:
            blocks.extend(range(start, stop))
        return blocks

    def of_file(self) -> list[int]:
        """Return the numbers of the blocks of the file itself, in order."""
        in_base = set(self.of_base())
        num_blocks = -(-self.size_bytes // self.block_bytes)
        return [index for index in range(num_blocks) if index not in in_base]

    def find(self, index: int) -> tuple[bool, int]:
        """Return ``True`` for a block of the base, ``False`` for one of the file, and the block's offset in it."""
        base_blocks_before = 0
        for start, stop in self.base:
            if start <= index < stop:
                return True, (base_blocks_before + index - start) * self.block_bytes
            if index < start:
                break
            base_blocks_before += stop - start
        return False, (index - base_blocks_before) * self.block_bytes


def places_of(manifest: Manifest) -> BlockPlaces:
    """Return the places of the blocks of a committed file."""
    return BlockPlaces(manifest.base, manifest.size_bytes, manifest.checksums.block_bytes)
