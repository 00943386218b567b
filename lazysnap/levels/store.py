"""Snapshots at one level. The file is written first, the manifest last. The manifest commits, and is deleted first.

The layout (docs/format.md)::

    step-00001000-<run>-<start>/node-00000-of-00001.safetensors     the shards of the ranks of a node
    step-00001000-<run>-<start>/node-00000-of-00001.base            their frozen tensors (levels.base)
    step-00001000-<run>-<start>/node-00000-of-00001.json
    step-00001000-<run>-<start>/keep-before-anneal

The name of a directory determines its content, so no two writers ever use the same name for different bytes.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from lazysnap import faults
from lazysnap.config import check_url, is_path, resolve_url
from lazysnap.errors import ConfigError, FormatError, LazySnapError, LevelError
from lazysnap.levels.blocks import read_node_file
from lazysnap.levels.leftovers import IsOurs, belongs_to_run, sweep
from lazysnap.levels.listing import list_names
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.node_file import FilePlace, write_node_file
from lazysnap.levels.source import BlockSource, Progress, no_progress
from lazysnap.levels.storage import Storage, level_error
from lazysnap.levels.watchdog import Beat
from lazysnap.levels.watched import RateLimiter, WatchedStorage
from lazysnap.resolver import Entry
from lazysnap.shard.manifest import Manifest, Shard
from lazysnap.shard.names import NodeName, check_name, keep_file_name

logger = logging.getLogger(__name__)


def open_store(url: str, *, options: Mapping[str, Any] | None = None) -> "SnapshotStore":
    """Return the store at a path or fsspec URL. Does no I/O for local paths.

    Raises: LevelError, if fsspec does not know the protocol or lacks its package; ConfigError, for an ``s3://``
    URL that holds credentials.
    """
    check_url(url)
    url = resolve_url(url)
    if is_path(url):
        return SnapshotStore(LocalStorage(url))
    # fsspec costs 0.1 s that local levels need not pay.
    if urlsplit(url).scheme in ("s3", "s3a"):
        try:
            from lazysnap.levels.s3 import S3Storage
        except ImportError as error:
            raise LevelError(f"{url}: needs obstore: pip install 'lazysnap[s3]'") from error
        return SnapshotStore(S3Storage(url, options))
    from lazysnap.levels.fsspec_storage import FsspecStorage

    return SnapshotStore(FsspecStorage(url, options))


class SnapshotStore:
    """All snapshots at one level. Thread-safe for different steps. Every method blocks.

    Raises: LevelError, if the level does not answer or refuses.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.url = storage.url

    def watched(self, beat: Beat, pace: RateLimiter | None = None) -> "SnapshotStore":
        """Return this store as one job uses it, over a ``WatchedStorage``."""
        return SnapshotStore(WatchedStorage(self.storage, beat, pace))

    # ---------------------------------------------------------------- writing

    def write_file(
        self,
        name: NodeName,
        shards: Sequence[Shard],
        source: BlockSource,
        progress: Progress = no_progress,
        *,
        former: str | None = None,
    ) -> Manifest:
        """Write and commit a node's file, and return its manifest. The source may still receive later bytes.

        ``former``: directory of a snapshot of this node, whose base may serve this one, too.

        On return, file and manifest survive a power cut. A file that is committed already is not written again.
        Raises: LevelError, also if other ranks committed a file of that name, which stays; CaptureAborted; as
        ``source``. On an error nothing of the file stays.
        """
        meta = shards[0].meta
        place = FilePlace(self.storage, meta.name.directory, name)
        with self._naming(f"writing step {meta.step}"):
            manifest = self._committed(place, shards)
            if manifest is None:
                manifest = write_node_file(place, shards, source, former=former, progress=progress)
        # Nothing after the commit may fail the snapshot.
        faults.point("level.store.committed")
        return manifest

    def _committed(self, place: FilePlace, shards: Sequence[Shard]) -> Manifest | None:
        """Return the manifest, if an earlier keeper committed these captures and they read back whole.

        ``None``, if the file is missing or damaged. Raises: LevelError, if other ranks wrote it.
        """
        try:
            committed = place.read_manifest()
            if _ranks(committed.shards) != _ranks(shards):
                raise LevelError(
                    f"{place.where}: holds ranks {_ranks(committed.shards)} of another writer; not replaced by ranks "
                    f"{_ranks(shards)}"
                )
            if committed.shards != tuple(shards):
                return None
            return self.verify(place)
        except (FormatError, FileNotFoundError):
            return None

    @contextlib.contextmanager
    def _naming(self, action: str) -> Iterator[None]:
        """Turn OSError into LevelError within the context. Errors of this package stay."""
        try:
            yield
        except LazySnapError:
            raise
        except OSError as error:
            raise level_error(self.url, action, error) from error

    # ---------------------------------------------------------------- reading

    def place(self, entry: Entry) -> FilePlace:
        """Return the place of an entry's files."""
        name = NodeName.parse(entry.file)
        assert name is not None, f"{entry} is in memory"
        return FilePlace(self.storage, entry.location, name)

    def verify(self, place: FilePlace, *, skips_base: bool = False) -> Manifest:
        """Read a node's file, compare every block with its checksum, and return the manifest.

        Raises: FormatError, naming file and block; FileNotFoundError; LevelError.

        Args:
            place: the file.
            skips_base: do not read the base of the file.
        """
        manifest = place.read_manifest()
        read_node_file(place, manifest, skips_base=skips_base)
        return manifest

    # ---------------------------------------------------------------- keeping and deleting

    def keep(self, entry: Entry, name: str) -> None:
        """Give a snapshot a name: retention keeps it until ``release``. Raises: ConfigError, for a bad name."""
        check_name(name)
        file = keep_file_name(name)
        with self._naming(f"naming step {entry.step} {name!r}"):
            if file in self.storage.list(entry.location) and self._belongs_to_others(entry.location, file):
                raise ConfigError(f"{self.url}/{entry.location}/{file}: a file of somebody else; take another name")
            self.storage.put(f"{entry.location}/{file}", entry.run_id.encode())

    def release(self, run_id: str | None, name: str) -> list[str]:
        """Take a name from the snapshots of a run (``None``: of all runs). Return the directories that had it."""
        freed = []
        file = keep_file_name(name)
        # No manifest is read: every node of a training does this.
        for directory in list_names(self.storage).directories:
            if name not in directory.names or run_id not in (None, directory.snapshot.run_id):
                continue
            if self._is_our_name(directory.name, file):
                self.storage.delete(f"{directory.name}/{file}")
                freed.append(directory.name)
            elif self._belongs_to_others(directory.name, file):
                logger.warning("%s/%s/%s: not deleted, no run wrote it", self.url, directory.name, file)
        return freed

    def _belongs_to_others(self, directory: str, file: str) -> bool:
        """True if there is a ``keep-…`` object that no run gave. Another node may delete it meanwhile."""
        return not self._is_our_name(directory, file) and self.storage.exists(f"{directory}/{file}")

    def _is_our_name(self, directory: str, file: str) -> bool:
        """True if a run gave a ``keep-…`` object, which its content shows."""
        path = f"{directory}/{file}"
        return belongs_to_run(self.storage, path) and not self.storage.is_link(path)

    def sweep(self, is_ours: IsOurs | None = None) -> list[str]:
        """Delete files that dead writers left (``levels.leftovers``), and return their paths.

        ``is_ours``: the nodes whose files are deleted; ``None``: all. Files of a living writer always stay.
        """
        with self._naming("sweeping"):
            return sweep(self.storage, is_ours)


def _ranks(shards: Sequence[Shard]) -> list[int]:
    return [shard.meta.rank for shard in shards]
