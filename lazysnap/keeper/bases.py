"""The immutable tensors that snapshots refer to: written at a level before the first snapshot that needs them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lazysnap.arena import Slot
from lazysnap.errors import FormatError, LevelUnavailable
from lazysnap.levels import SnapshotStore
from lazysnap.levels.pace import Pace
from lazysnap.levels.redaction import shown
from lazysnap.levels.source import FileSource, MemorySource, PacedSource
from lazysnap.resolver import FrozenEntry
from lazysnap.shard.manifest import CaptureMeta, FrozenReference, frozen_directory_name

Beat = Callable[[], None]


class Bases:
    """Of one level. What is missing there comes from memory, else from a faster level."""

    def __init__(self, slot_of: Callable[[str], Slot | None], pace: Pace) -> None:
        """``slot_of`` gives the whole slot that holds the immutable tensors of a digest, if there is one."""
        self._slot_of = slot_of
        self._pace = pace

    @contextlib.contextmanager
    def there(
        self, store: SnapshotStore, metas: Sequence[CaptureMeta], beat: Beat, origin: SnapshotStore | None = None
    ) -> Iterator[None]:
        """See to it that they are there, and stay, while snapshots that refer to them are written.

        ``origin``: a faster level that has the snapshots. Raises: LevelError, CaptureAborted.
        """
        with contextlib.ExitStack() as stack:
            for meta in {meta.frozen: meta for meta in metas}.values():
                if meta.frozen is None:
                    continue
                self._write(store, meta, meta.frozen, beat, origin)
                stack.enter_context(store.frozen_lease(meta.run_id, meta.frozen.digest))
                # Somebody's retention may just have taken them for unreferenced; from here on it cannot.
                self._write(store, meta, meta.frozen, beat, origin)
            yield

    def _write(
        self, store: SnapshotStore, meta: CaptureMeta, frozen: FrozenReference, beat: Beat, origin: SnapshotStore | None
    ) -> None:
        if store.has_frozen(meta.run_id, frozen.digest, beat):
            return
        slot = self._slot_of(frozen.digest)
        if slot is not None:
            own = CaptureMeta.from_bytes(slot.read_meta(), "a slot of immutable tensors")
            held = MemorySource(slot.image, frozen.size_bytes)
            store.write_frozen(
                replace(own, run_id=meta.run_id), PacedSource(held, self._pace, beat), frozen.digest, beat
            )
            return
        if origin is None:
            raise LevelUnavailable(f"the immutable tensors {frozen.digest} of step {meta.step} are gone from memory")
        directory = frozen_directory_name(meta.run_id, frozen.digest)
        image = FrozenEntry(origin.url, origin.speed, meta.run_id, frozen.digest, directory)
        try:
            own = origin.read_manifest(image).meta
            source = FileSource(origin.storage, origin.place(image).shard_path, frozen.size_bytes)
        except (FormatError, FileNotFoundError) as error:
            where = shown(origin.url)
            raise LevelUnavailable(f"{where}: the immutable tensors {frozen.digest} are not there any more") from error
        with source:
            store.write_frozen(own, PacedSource(source, self._pace, beat), frozen.digest, beat)
