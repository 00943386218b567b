"""A level as a restart reads it: whatever hangs there is passed over after the level's deadline."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from lazysnap.config import PersistentLevel
from lazysnap.engine.assembly import OpenShard
from lazysnap.engine.filling import Wanted, fill
from lazysnap.levels import SnapshotStore, open_store
from lazysnap.levels.attempt import Attempt
from lazysnap.levels.listing import Listing
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.redaction import shown
from lazysnap.levels.verified import VerifiedReader
from lazysnap.resolver import Entry, FrozenEntry, Inventory, joined
from lazysnap.shard.layout import Layout

_Beat = Callable[[], None]
_Result = TypeVar("_Result")


class LevelReader:
    """Every question runs in a daemon thread, opening the level included. Not thread-safe."""

    def __init__(self, level: PersistentLevel, speed: int) -> None:
        self._level = level
        self._speed = speed
        self._store: SnapshotStore | None = None
        self._opening = threading.Lock()

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

    def begin_names(self, *, marked: bool) -> Callable[[], Listing]:
        """Start to list what the level has by its name alone. Does not block; what is returned waits for it.

        It raises: LevelHangs; whatever the storage's package raises.
        """
        return self._begin(f"listing {shown(self.url)}", lambda beat: self._open().listing(marked=marked))

    def begin_look(self, listing: Listing, share: tuple[int, int]) -> Callable[[], Inventory]:
        """Start to find out what a share of that offers; as ``begin_names``."""

        def work(beat: _Beat) -> Inventory:
            found = [Inventory(self.url, problems=listing.problems)]
            for directory in listing.directories:
                found.append(self._open().inventory(Listing((directory,)), share))
                beat()
            return joined(found)

        return self._begin(f"looking at {shown(self.url)}", work)

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
            with contextlib.ExitStack() as until_read:
                reader = until_read.enter_context(VerifiedReader(store.place(entry), manifest))
                beat()  # nobody may wait any more
                layout = manifest.layout(reader.read(0, manifest.header_bytes), where)
                until_read.pop_all()
            return reader, layout

        reader, layout = self._attempt(f"opening {where}", work)
        stack.callback(reader.close)

        def read(wanted: Sequence[Wanted]) -> None:
            self._attempt(f"reading {where}", lambda beat: _fill(reader, wanted, beat))

        return OpenShard(rank, layout, reader.manifest.meta, read, where)

    def _begin(self, what: str, work: Callable[[_Beat], _Result]) -> Callable[[], _Result]:
        return partial(Attempt(work, what).result, self._level.timeout_s)

    def _attempt(self, what: str, work: Callable[[_Beat], _Result]) -> _Result:
        return self._begin(what, work)()


def _fill(reader: VerifiedReader, wanted: Sequence[Wanted], beat: _Beat) -> None:
    rooms: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    block_bytes = reader.manifest.checksums.block_bytes
    for _ in range(reader.parallel):
        rooms.put(map_anonymous(min(block_bytes, reader.manifest.size_bytes)))

    @contextlib.contextmanager
    def block(index: int) -> Iterator[memoryview]:
        room = rooms.get_nowait()
        try:
            beat()
            yield reader.read_block(index, room)
        finally:
            rooms.put(room)

    fill(wanted, block_bytes, block, reader.parallel)
