"""A level as a restart reads it: whatever hangs there is passed over after the level's deadline."""

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from lazysnap.config import PersistentLevel
from lazysnap.engine.assembly import OpenShard
from lazysnap.levels import SnapshotStore, open_store
from lazysnap.levels.attempt import Attempt
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.redaction import shown
from lazysnap.levels.verified import VerifiedReader
from lazysnap.resolver import Entry, FrozenEntry, Inventory
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import CaptureMeta, Manifest

_Beat = Callable[[], None]
_Result = TypeVar("_Result")


class LevelReader:
    """Every question runs in a daemon thread, opening the level included. Not thread-safe."""

    def __init__(self, level: PersistentLevel, speed: int) -> None:
        self._level = level
        self._speed = speed
        self._store: SnapshotStore | None = None
        self._opening = threading.Lock()
        self._listing: Attempt[Inventory] | None = None

    @property
    def url(self) -> str:
        """Of the level."""
        return self._level.url

    def _open(self) -> SnapshotStore:
        with self._opening:
            if self._store is None:
                self._store = open_store(self.url, speed=self._speed, options=self._level.storage_options)
            return self._store

    def begin_open(self) -> None:
        """Start to open the level: packages are imported, sessions made. Does not block."""
        Attempt(lambda beat: self._open(), f"opening {shown(self.url)}")

    def begin_inventory(self) -> None:
        """Start to list the level, as it is from now on. Does not block."""
        self._listing = Attempt(lambda beat: self._open().inventory(), f"listing {shown(self.url)}")

    def inventory(self) -> Inventory:
        """What the level offers. Blocks: at most ``timeout_s`` from ``begin_inventory`` on.

        Raises: LevelHangs; whatever the storage's package raises.
        """
        if self._listing is None:
            self.begin_inventory()
        assert self._listing is not None
        return self._listing.result(self._level.timeout_s)

    def read(self, entry: Entry) -> tuple[memoryview, CaptureMeta]:
        """A shard, every block verified. Blocks: as long as blocks arrive. Raises: as ``inventory``; ShardCorrupt."""

        def work(beat: _Beat) -> tuple[memoryview, CaptureMeta]:
            store = self._open()
            manifest = store.read_manifest(entry)
            beat()
            return self._fill(manifest, lambda out: store.read_image(entry, manifest, out, beat))

        return Attempt(work, f"reading step {entry.step} at {shown(self.url)}").result(self._level.timeout_s)

    def read_frozen(self, entry: FrozenEntry) -> tuple[memoryview, CaptureMeta]:
        """Immutable tensors, every block verified and their digest compared; see ``read``."""

        def work(beat: _Beat) -> tuple[memoryview, CaptureMeta]:
            store = self._open()
            manifest = store.read_manifest(entry)
            beat()
            return self._fill(manifest, lambda out: store.read_image(entry, manifest, out, beat))

        return Attempt(work, f"reading immutable tensors at {shown(self.url)}").result(self._level.timeout_s)

    def open(self, entry: Entry, where: str, stack: contextlib.ExitStack) -> OpenShard:
        """A shard to read ranges of, verified block by block, and leased until ``stack`` ends. Raises: as ``read``."""
        return self._ranges(entry, entry.rank, where, stack)

    def open_frozen(self, entry: FrozenEntry, where: str, stack: contextlib.ExitStack) -> OpenShard:
        """Immutable tensors to read ranges of; see ``open``."""
        return self._ranges(entry, 0, where, stack)

    def _ranges(self, entry: Entry | FrozenEntry, rank: int, where: str, stack: contextlib.ExitStack) -> OpenShard:
        def work(beat: _Beat) -> tuple[VerifiedReader, Layout]:
            store = self._open()
            manifest = store.read_manifest(entry)
            beat()
            reader = VerifiedReader(store.place(entry), manifest)
            return reader, manifest.layout(reader.read(0, manifest.header_bytes), where)

        reader, layout = self._attempt(f"opening {where}", work)
        stack.callback(reader.close)

        def read_into(offset: int, out: memoryview) -> None:
            out[:] = self._attempt(f"reading {where}", lambda beat: reader.read(offset, len(out)))

        return OpenShard(rank, layout, reader.manifest.meta, read_into, where)

    def _attempt(self, what: str, work: Callable[[_Beat], _Result]) -> _Result:
        return Attempt(work, what).result(self._level.timeout_s)

    @staticmethod
    def _fill(manifest: Manifest, read: Callable[[memoryview], None]) -> tuple[memoryview, CaptureMeta]:
        image = map_anonymous(manifest.size_bytes)
        read(image)
        return image, manifest.meta
