"""A level as a restart reads it: whatever hangs there is passed over after the level's deadline."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from lazysnap.config import PersistentLevel
from lazysnap.levels import SnapshotStore, open_store
from lazysnap.levels.blocks import FileBlocks, Wanted
from lazysnap.levels.listing import Listing
from lazysnap.levels.redaction import shown
from lazysnap.levels.watchdog import Beat, Watchdog
from lazysnap.resolver import Entry, FrozenEntry, Inventory, joined
from lazysnap.shard.manifest import Manifest
from lazysnap.snapshots.reader import OpenShard, open_shard, read

_Result = TypeVar("_Result")


class Answer(Generic[_Result]):
    """The answer of a level to a question that was begun."""

    def __init__(self, work: "Watchdog[_Result]", timeout_s: float) -> None:
        self._work = work
        self.timeout_s = timeout_s
        """Seconds for which it may show no progress."""

    def comes(self, until: float | None) -> bool:
        """True if the answer, or an error, is there by the monotonic time ``until``; ``None``: always. Blocks."""
        return until is None or self._work.wait(max(0.0, until - time.monotonic()))

    def __call__(self) -> _Result:
        """Return the answer. Blocks. Raises: LevelHangs; whatever the storage's package raises."""
        return self._work.result(self.timeout_s)


class LevelReader:
    """Every question runs in a daemon thread, opening the level included. Not thread-safe."""

    def __init__(self, level: PersistentLevel, speed: int) -> None:
        self._level = level
        self._speed = speed
        self._store: SnapshotStore | None = None
        self._opening = threading.Lock()
        self._manifests: dict[str, Manifest] = {}

    @property
    def url(self) -> str:
        """The URL of the level."""
        return self._level.url

    def _open(self) -> SnapshotStore:
        with self._opening:
            if self._store is None:
                self._store = open_store(self.url, speed=self._speed, options=self._level.storage_options)
            return self._store

    def begin_open(self) -> None:
        """Start to open the level: packages are imported, sessions made. Does not block."""
        Watchdog(lambda beat: self._open(), f"opening {shown(self.url)}")

    def begin_names(self, *, marked: bool) -> Answer[Listing]:
        """Start to list what the level has by its name alone. Does not block."""
        return self._begin(f"listing {shown(self.url)}", lambda beat: self._open().listing(marked=marked))

    def begin_look(self, listing: Listing, share: tuple[int, int]) -> Answer[Inventory]:
        """Start to find out what a share of that offers; as ``begin_names``."""

        def work(beat: Beat) -> Inventory:
            found = [Inventory(self.url, problems=listing.problems)]
            for directory in listing.directories:
                found.append(self._open().inventory(Listing((directory,)), share))
                beat()
            return joined(found)

        return self._begin(f"looking at {shown(self.url)}", work)

    def open(self, entry: Entry | FrozenEntry, where: str, stack: contextlib.ExitStack) -> OpenShard:
        """A shard or a file of frozen tensors, its header verified, open until ``stack`` ends.

        Raises: as ``Answer``; ShardCorrupt; FileNotFoundError.
        """

        def work(beat: Beat) -> tuple[OpenShard, contextlib.ExitStack]:
            store = self._open()
            place = store.place(entry)
            manifest = self._manifests.get(place.manifest_path)
            if manifest is None:  # one file may hold the shards of many ranks
                manifest = self._manifests[place.manifest_path] = store.read_manifest(entry)
            beat()
            rank = entry.rank if isinstance(entry, Entry) else 0
            with contextlib.ExitStack() as until_read:
                blocks = FileBlocks(place, manifest)
                until_read.callback(blocks.close)
                shard = open_shard(manifest, rank, blocks, verify=True)
                beat()  # if nobody waits any more, nobody would close what is open
                return shard, until_read.pop_all()

        shard, held = self._attempt(f"opening {where}", work)
        stack.callback(held.close)
        return shard

    def read(self, shard: OpenShard, wanted: Sequence[Wanted]) -> None:
        """Read what is wanted of a shard, verified. Blocks. Raises: as ``open``."""
        self._attempt(f"reading {shown(shard.where)}", lambda beat: read({shard: wanted}, beat=lambda count: beat()))

    def _begin(self, what: str, work: Callable[[Beat], _Result]) -> Answer[_Result]:
        return Answer(Watchdog(work, what), self._level.timeout_s)

    def _attempt(self, what: str, work: Callable[[Beat], _Result]) -> _Result:
        return self._begin(what, work)()
