"""A level as a source of a restart. Work that hangs is abandoned after the level's deadline."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lazysnap.config import PersistentLevel
from lazysnap.levels.blocks import FileBlocks
from lazysnap.levels.listing import Listing, list_names
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import open_storage
from lazysnap.levels.watchdog import Beat, Watchdog
from lazysnap.levels.watched import WatchedStorage
from lazysnap.resolver import Entry, Inventory
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.names import SnapshotName
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import MOST_OPEN, OpenShard, open_shard

logger = logging.getLogger("lazysnap.engine")

_Result = TypeVar("_Result")


class Level:
    """See ``restore.sources.Source``. All work at the level runs in daemon threads, including its opening.

    Not thread-safe.
    """

    def __init__(self, level: PersistentLevel, distance: int = 0) -> None:
        """``distance``: see ``Entry``."""
        self._level = level
        self.distance = distance
        self._storage: Storage | None = None
        self._opening = threading.Lock()
        self._manifests: dict[str, Manifest] = {}
        self._num_opened = 0
        """Shards that were opened. Of many the first ones stay open until the end of the restart."""

    @property
    def url(self) -> str:
        """The URL of the level."""
        return self._level.url

    def _open(self) -> Storage:
        with self._opening:
            if self._storage is None:
                self._storage = open_storage(self.url, options=self._level.storage_options)
            return self._storage

    def forget(self) -> None:
        """Read manifests again."""
        self._manifests.clear()

    def begin_open(self) -> None:
        """Start to open the level: packages are imported, sessions made. Does not block."""
        Watchdog(lambda beat: self._open(), f"opening {self.url}", self._level.timeout_s)

    def begin_names(self, *, stamped: bool) -> Watchdog[Listing]:
        """Start to list the names of the snapshots at the level. Does not block."""

        def names(storage: Storage) -> Listing:
            return list_names(storage, stamped=stamped)

        return self._begin("listing", names)

    def begin_newest_id(self) -> Watchdog[str]:
        """Start to find the greatest id of a run or start in the names of directories; "" if there is none. Does not
        block.
        """

        def newest_id(storage: Storage) -> str:
            newest = ""
            for directory in storage.list():
                name = SnapshotName.parse(directory)
                if name is not None:
                    newest = max(newest, name.run_id, name.start)
            return newest

        return self._begin("listing", newest_id)

    def begin_inventory(self, listing: Listing, share: tuple[int, int]) -> Watchdog[Inventory]:
        """Start to read the manifests of a share of these snapshots. Does not block."""

        def inventory(storage: Storage) -> Inventory:
            return Catalogue(storage, listing).inventory(share)

        return self._begin("looking at", inventory)

    def _begin(self, action: str, work: Callable[[Storage], _Result]) -> Watchdog[_Result]:
        def watched(beat: Beat) -> _Result:
            return work(WatchedStorage(self._open(), beat))

        return Watchdog(watched, f"{action} {self.url}", self._level.timeout_s)

    def watch(self, action: str, work: Callable[[Beat], _Result]) -> _Result:
        """Call ``work`` at the level. Blocks. Raises: LevelHangs, if it makes no progress; as ``work``."""
        return Watchdog(work, action, self._level.timeout_s).result()

    def open(self, entry: Entry, where: str) -> OpenShard:
        """See ``Source``."""

        def opened(beat: Beat) -> OpenShard:
            shard = self._open_shard(entry, beat)
            try:
                beat()  # raises if the caller no longer waits, because nothing would close the shard
            except BaseException:
                shard.blocks.close()
                raise
            return shard

        return self.watch(f"opening {where}", opened)

    def _open_shard(self, entry: Entry, beat: Beat) -> OpenShard:
        storage = self._open()  # without a watchdog: another job reads the blocks later
        place = FilePlace.of(storage, entry)
        manifest = self._manifests.get(place.manifest_path)
        if manifest is None:  # one file may hold the shards of many ranks
            manifest = place.read_manifest()
            self._manifests[place.manifest_path] = manifest
        beat()
        blocks = FileBlocks(place, manifest, stays_open=self._num_opened < MOST_OPEN)
        self._num_opened += 1
        try:
            shard = manifest.of(entry.rank)
            return open_shard(shard.meta, blocks, shard.offset, shard.size_bytes)
        except BaseException:
            blocks.close()
            raise


def whole_snapshots(levels: Sequence[PersistentLevel], note: Callable[[str], None]) -> list[SnapshotName]:
    """Return the snapshots that have the manifests of all nodes, by the listings of these levels.

    A level that does not answer is skipped; ``note`` receives a line about it. Blocks: all are listed at once, each at
    most ``timeout_s`` without progress.
    """
    answers = [Level(level).begin_names(stamped=False) for level in levels]
    names = []
    for level, answer in zip(levels, answers, strict=True):
        try:
            directories = answer.result().directories
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            note(f"{level.url} is skipped: {error}")
            continue
        for directory in directories:
            if directory.is_whole:
                names.append(directory.snapshot)
    return names


def newest_id(levels: Sequence[PersistentLevel], timeout_s: float) -> str:
    """Return the greatest id of a run or start at any of these levels; "" if there is none.

    A level that fails, or does not answer within ``timeout_s``, is skipped. Blocks.
    """
    deadline = time.monotonic() + timeout_s
    answers = [Level(level).begin_newest_id() for level in levels]
    newest = ""
    for level, answer in zip(levels, answers, strict=True):
        if not answer.wait(max(0.0, deadline - time.monotonic())):
            logger.info("%s did not answer in %g s: its runs are not known yet", level.url, timeout_s)
            continue
        try:
            newest = max(newest, answer.result())
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            logger.info("%s: its runs are not known yet: %s", level.url, error)
    return newest
