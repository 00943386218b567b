"""Writes the frozen tensors that snapshots refer to, at a level before the first snapshot that needs them."""

import contextlib
from collections.abc import Callable

from lazysnap.arena import Slot
from lazysnap.errors import FormatError, LevelUnavailable
from lazysnap.levels import SnapshotStore
from lazysnap.levels.blocks import FileBlocks, VerifiedSource
from lazysnap.levels.rate_limiter import RateLimiter
from lazysnap.levels.redaction import shown
from lazysnap.levels.source import MemorySource, RateLimitedSource, shard_of
from lazysnap.resolver import FrozenEntry
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.names import frozen_directory_name

Beat = Callable[[], None]


class FrozenWriter:
    """Of one level. What is missing there comes from memory, else from a faster level."""

    def __init__(self, slot_of: Callable[[str], Slot | None], pace: RateLimiter) -> None:
        """``slot_of`` gives the whole slot of the frozen tensors of a digest, if there is one."""
        self._slot_of = slot_of
        self._pace = pace

    def bring(self, store: SnapshotStore, meta: CaptureMeta, beat: Beat, origin: SnapshotStore | None = None) -> None:
        """Write what the snapshot of ``meta`` refers to, unless it is there.

        ``origin``: a faster level that has the snapshot. Raises: LevelError, CaptureAborted.
        """
        frozen = meta.frozen
        if frozen is None or store.has_frozen(frozen.digest, beat):
            return
        slot = self._slot_of(frozen.digest)
        if slot is not None:
            own = CaptureMeta.from_bytes(slot.read_meta(), "a slot of frozen tensors")
            held = MemorySource(slot.image, frozen.size_bytes)
            store.write_frozen(shard_of(own, held), RateLimitedSource(held, self._pace, beat), frozen.digest, beat)
            return
        if origin is None:
            raise LevelUnavailable(f"the frozen tensors {frozen.digest} of step {meta.step} are gone from memory")
        entry = FrozenEntry(origin.url, origin.speed, frozen.digest, frozen_directory_name(frozen.digest))
        try:
            manifest = origin.read_manifest(entry)
            shard, blocks = manifest.shards[0], FileBlocks(origin.place(entry), manifest)
            blocks.header(shard)
        except (FormatError, FileNotFoundError) as error:
            where = shown(origin.url)
            raise LevelUnavailable(f"{where}: the frozen tensors {frozen.digest} are not there any more") from error
        with contextlib.closing(blocks):
            source = VerifiedSource(blocks, lambda count: beat())
            store.write_frozen(shard, RateLimitedSource(source, self._pace, beat), frozen.digest, beat)
