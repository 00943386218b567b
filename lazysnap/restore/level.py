"""A level as a restart reads it. What hangs there is given up after the level's deadline."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from lazysnap.config import PersistentLevel
from lazysnap.levels import SnapshotStore, open_store
from lazysnap.levels.blocks import FileBlocks
from lazysnap.levels.listing import Listing, list_names
from lazysnap.levels.watchdog import Beat, Watchdog
from lazysnap.resolver import Entry, Inventory
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.names import SnapshotName
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import OpenShard, open_shard

logger = logging.getLogger("lazysnap.engine")

_Result = TypeVar("_Result")


class LevelAnswer(Generic[_Result]):
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


class Level:
    """See ``restore.sources.Source``. Every question runs in a daemon thread, opening the level included.

    Not thread-safe.
    """

    def __init__(self, level: PersistentLevel, speed: int) -> None:
        """``speed``: its rank among the sources, see ``Entry``."""
        self._level = level
        self.speed = speed
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
                self._store = open_store(self.url, speed=self.speed, options=self._level.storage_options)
            return self._store

    def forget(self) -> None:
        """Read manifests anew."""
        self._manifests.clear()

    def begin_open(self) -> None:
        """Start to open the level: packages are imported, sessions made. Does not block."""
        Watchdog(lambda beat: self._open(), f"opening {self.url}")

    def begin_names(self, *, marked: bool) -> LevelAnswer[Listing]:
        """Start to list what the level has by its name alone. Does not block."""
        return self._begin("listing", lambda store: list_names(store.storage, marked=marked))

    def begin_newest_id(self) -> LevelAnswer[str]:
        """Start to find the greatest id of a run or start in the names of its directories; "" without any. Does not
        block."""

        def newest_id(store: SnapshotStore) -> str:
            newest = ""
            for directory in store.storage.list():
                name = SnapshotName.parse(directory)
                if name is not None:
                    newest = max(newest, name.run_id, name.start)
            return newest

        return self._begin("listing", newest_id)

    def begin_look(self, listing: Listing, share: tuple[int, int]) -> LevelAnswer[Inventory]:
        """Start to find out what a share of that offers. Does not block."""
        return self._begin("looking at", lambda store: Catalogue(store, listing).inventory(share))

    def _begin(self, what: str, work: Callable[[SnapshotStore], _Result]) -> LevelAnswer[_Result]:
        watched = Watchdog(lambda beat: work(self._open().watched(beat)), f"{what} {self.url}")
        return LevelAnswer(watched, self._level.timeout_s)

    def watch(self, what: str, work: Callable[[Beat], _Result]) -> _Result:
        """Do some work at the level. Blocks. Raises: LevelHangs, if it does not move for too long; what it raises."""
        return Watchdog(work, what).result(self._level.timeout_s)

    def open(self, entry: Entry, where: str) -> OpenShard:
        """See ``Source``."""

        def opened(beat: Beat) -> OpenShard:
            shard = self._open_shard(entry, beat)
            try:
                beat()  # if nobody waits any more, nobody would close what is open
            except BaseException:
                shard.blocks.close()
                raise
            return shard

        return self.watch(f"opening {where}", opened)

    def _open_shard(self, entry: Entry, beat: Beat) -> OpenShard:
        store = self._open()  # not watched: another job reads the blocks, after the one that opens them
        place = store.place(entry)
        manifest = self._manifests.get(place.manifest_path)
        if manifest is None:  # one file may hold the shards of many ranks
            manifest = self._manifests[place.manifest_path] = store.read_manifest(entry)
        beat()
        blocks = FileBlocks(place, manifest)
        try:
            return open_shard(entry.rank, blocks, verify=True)
        except BaseException:
            blocks.close()
            raise


def newest_id(levels: Sequence[PersistentLevel], timeout_s: float) -> str:
    """Return the greatest id of a run or start at any of these levels; "" if there is none.

    A level that fails, or does not answer within ``timeout_s``, is left out. Blocks.
    """
    until = time.monotonic() + timeout_s
    answers = [Level(level, 0).begin_newest_id() for level in levels]
    newest = ""
    for level, answer in zip(levels, answers, strict=True):
        if not answer.comes(until):
            logger.info("%s did not answer in %g s: its runs are not known yet", level.url, timeout_s)
            continue
        try:
            newest = max(newest, answer())
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            logger.info("%s: its runs are not known yet: %s", level.url, error)
    return newest
