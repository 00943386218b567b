"""Snapshots at one level. The file is written first, the manifest last. The manifest commits, and is deleted first.

The layout (docs/format.md)::

    step-00001000-<run>-<start>/node-00000-of-00001.safetensors     the shards of the ranks of a node
    step-00001000-<run>-<start>/node-00000-of-00001.base            their frozen tensors (levels.node_base)
    step-00001000-<run>-<start>/node-00000-of-00001.json
    step-00001000-<run>-<start>/keep-before-anneal

The name of a directory determines its content, so no two writers ever use the same name for different bytes.

All functions block. They are thread-safe for different steps.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from lazysnap import faults
from lazysnap.config import check_url, is_path, resolve_url
from lazysnap.errors import ConfigError, FormatError, LevelError
from lazysnap.levels.blocks import verify
from lazysnap.levels.leftovers import belongs_to_run
from lazysnap.levels.listing import list_names
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.node_file import FilePlace, write_node_file
from lazysnap.levels.source import BlockSource, ByteCounter, no_progress
from lazysnap.levels.storage import Storage, os_errors_named
from lazysnap.shard.manifest import Manifest, Shard
from lazysnap.shard.names import SnapshotName, check_name, keep_file_name

logger = logging.getLogger(__name__)


def open_storage(url: str, *, options: Mapping[str, Any] | None = None) -> Storage:
    """Return the storage at a path or fsspec URL. Does no I/O for local paths.

    Raises: LevelError, if fsspec does not know the protocol or lacks its package; ConfigError, for an ``s3://``
    URL that holds credentials.
    """
    check_url(url)
    url = resolve_url(url)
    if is_path(url):
        return LocalStorage(url)
    # fsspec costs 0.1 s that local levels need not pay.
    if urlsplit(url).scheme in ("s3", "s3a"):
        try:
            from lazysnap.levels.s3 import S3Storage
        except ImportError as error:
            raise LevelError(f"{url}: needs obstore: pip install 'lazysnap[s3]'") from error
        return S3Storage(url, options)
    from lazysnap.levels.fsspec_storage import FsspecStorage

    return FsspecStorage(url, options)


# ---------------------------------------------------------------- writing


def write_unless_committed(
    place: FilePlace,
    shards: Sequence[Shard],
    source: BlockSource,
    progress: ByteCounter = no_progress,
    *,
    former: str | None = None,
) -> Manifest:
    """Write and commit a node's file, and return its manifest. A file that is committed already is not written again.

    On return, file and manifest survive a power cut. The arguments are those of ``write_node_file``.
    Raises: LevelError, also if other ranks committed a file of that name, which stays; CaptureAborted; as
    ``source``. On an error nothing of the file stays.
    """
    with os_errors_named(place.storage.url, f"writing step {shards[0].meta.step}"):
        manifest = _committed(place, shards)
        if manifest is None:
            manifest = write_node_file(place, shards, source, former=former, progress=progress)
    # Nothing after the commit may fail the snapshot.
    faults.point("level.store.committed")
    return manifest


def _committed(place: FilePlace, shards: Sequence[Shard]) -> Manifest | None:
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
        return verify(place)
    except (FormatError, FileNotFoundError):
        return None


def _ranks(shards: Sequence[Shard]) -> list[int]:
    return [shard.meta.rank for shard in shards]


# ---------------------------------------------------------------- names


def keep(storage: Storage, snapshot: SnapshotName, name: str) -> None:
    """Give a snapshot a name: retention keeps it until ``release``. Raises: ConfigError, for a bad name; LevelError."""
    check_name(name)
    directory = snapshot.directory
    file = keep_file_name(name)
    with os_errors_named(storage.url, f"naming step {snapshot.step} {name!r}"):
        if file in storage.list(directory) and _belongs_to_others(storage, f"{directory}/{file}"):
            raise ConfigError(f"{storage.url}/{directory}/{file}: a file of another program; use another name")
        storage.put(f"{directory}/{file}", snapshot.run_id.encode())


def release(storage: Storage, run_id: str | None, name: str) -> list[str]:
    """Remove a name from the snapshots of a run (``None``: of all runs). Return the directories that had it.

    Raises: LevelError.
    """
    freed = []
    # No manifest is read: every node of a training does this.
    for directory in list_names(storage).directories:
        if name not in directory.names or run_id not in (None, directory.snapshot.run_id):
            continue
        if release_from(storage, directory.name, name):
            freed.append(directory.name)
    return freed


def release_from(storage: Storage, directory: str, name: str) -> bool:
    """Remove a name from the snapshot in a directory. Returns: True if it had that name. Raises: LevelError."""
    path = f"{directory}/{keep_file_name(name)}"
    if _is_our_name(storage, path):
        storage.delete(path)
        return True
    if _belongs_to_others(storage, path):
        logger.warning("%s/%s: not deleted, no run wrote it", storage.url, path)
    return False


def _belongs_to_others(storage: Storage, path: str) -> bool:
    """True if there is a ``keep-…`` object that no run gave. Another node may delete it meanwhile."""
    return not _is_our_name(storage, path) and storage.exists(path)


def _is_our_name(storage: Storage, path: str) -> bool:
    """True if a run gave a ``keep-…`` object, which its content shows."""
    return belongs_to_run(storage, path) and not storage.is_link(path)
