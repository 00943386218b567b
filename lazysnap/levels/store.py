"""Snapshots at one level. The file is written first, the manifest last. The manifest commits, and is deleted first.

The layout (docs/format.md)::

    step-00001000-<run>-<start>/node-00000-of-00001.safetensors     the shards of the ranks of a node
    step-00001000-<run>-<start>/node-00000-of-00001.base            their frozen tensors (levels.node_base)
    step-00001000-<run>-<start>/node-00000-of-00001.json
    step-00001000-<run>-<start>/keep-before-anneal

The name of a directory determines its content, so no two writers ever use the same name for different bytes.

All functions block. They are thread-safe for different steps.
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from lazysnap import faults
from lazysnap.config import check_url, is_path, resolve_url
from lazysnap.errors import ConfigError, FormatError, LevelError
from lazysnap.levels.blocks import verify
from lazysnap.levels.leftovers import belongs_to_run
from lazysnap.levels.listing import list_names
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.node_base import BlockPlaces, Ranges, base_of
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import BlockSource, ByteCounter, no_progress
from lazysnap.levels.storage import Storage, Writer, os_errors_named
from lazysnap.levels.threads import in_threads
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums, digest
from lazysnap.shard.layout import PAGE
from lazysnap.shard.manifest import Manifest, Shard
from lazysnap.shard.names import SnapshotName, check_name, keep_file_name

logger = logging.getLogger(__name__)

_DIGEST_THREADS = 2
"""Threads that compare a base with the previous one: training continues meanwhile."""


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


def write_node_file(
    place: FilePlace,
    shards: Sequence[Shard],
    source: BlockSource,
    progress: ByteCounter = no_progress,
    *,
    former: str | None = None,
) -> Manifest:
    """Write and commit a node's file, and return its manifest. A file that is committed already is not written again.

    On return, file and manifest survive a power cut. Existing files of these names that are not committed are replaced.

    Args:
        place: the place of the file.
        shards: the shards in the file, in order.
        source: the bytes of the file.
        progress: called with the number of bytes after each block.
        former: directory of a snapshot of this node, whose base is reused if it has the same bytes.

    Raises: LevelError, also if other ranks committed a file of that name, which stays; CaptureAborted; as ``source``.
    On an error nothing of the file stays, unless the task was cancelled or abandoned: then a watched storage refuses to
    delete, because another writer may have written the file by now. The core deletes it later.
    """
    with os_errors_named(place.storage.url, f"writing step {shards[0].meta.step}"):
        manifest = _committed(place, shards)
        if manifest is None:
            faults.point("level.store.begin")
            manifest = _FileWriter(place, source, progress).write(shards, former)
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


class _FileWriter:
    """Writes one file of a node: its base, the file itself, the manifest."""

    def __init__(self, place: FilePlace, source: BlockSource, progress: ByteCounter) -> None:
        self._place = place
        self._source = source
        self._progress = progress
        self._digests: dict[int, str] = {}
        """The checksums by the numbers of the blocks."""
        self._written_bytes = 0
        self._is_published = False
        """True once an object has its name."""

    def write(self, shards: Sequence[Shard], former: str | None) -> Manifest:
        """Write and commit the file. See ``write_node_file``."""
        size_bytes = self._source.size_bytes
        # Until they are closed, no sweep of another process deletes the objects.
        with contextlib.ExitStack() as writers:
            try:
                base = base_of(shards, self._source)
                blocks = BlockPlaces(base, size_bytes, BLOCK_BYTES)
                if base and not self._take_over(former, blocks):
                    writer = self._open(writers, self._place.base_path, blocks.base_bytes)
                    self._write_blocks(writer, blocks.of_base())
                    self._publish(writer, blocks.base_bytes)
                writer = self._open(writers, self._place.file_path, blocks.file_bytes)
                self._write_blocks(writer, blocks.of_file())
                self._source.finish()
                faults.point("level.store.publish_shard")
                self._publish(writer, blocks.file_bytes)
                manifest = self._manifest(shards, base)
                faults.point("level.store.commit")
                # A watched storage raises, if the caller gave up while the write hung: then nothing is committed.
                self._place.storage.put(self._place.manifest_path, manifest.encode())
            except BaseException:
                writers.close()
                if self._is_published:
                    self._place.delete_or_leave()
                else:
                    self._place.remove_if_empty()
                raise
        return manifest

    def _manifest(self, shards: Sequence[Shard], base: Ranges) -> Manifest:
        digests = tuple(self._digests[index] for index in sorted(self._digests))
        checksums = Checksums(self._source.size_bytes, BLOCK_BYTES, digests)
        return Manifest(self._place.name, tuple(shards), checksums, time.time_ns(), base, self._written_bytes)

    # The base

    def _take_over(self, former: str | None, places: BlockPlaces) -> bool:
        """Link the base of the previous snapshot into this one; ``False`` if its bytes differ."""
        if former is None or former == self._place.directory:
            return False
        other = replace(self._place, directory=former)
        blocks = places.of_base()
        try:
            manifest = other.read_manifest()
            if manifest.base != places.base or manifest.checksums.block_bytes != BLOCK_BYTES:
                return False
            tasks = [partial(self._digest, index) for index in blocks]
            digests = in_threads(tasks, _DIGEST_THREADS, "lazysnap-base")
            if digests != [manifest.checksums.blocks[index] for index in blocks]:
                return False
            faults.point("level.store.take_over")
            is_taken = other.storage.link(other.base_path, self._place.base_path)
        except (FileNotFoundError, FormatError):
            return False  # it is being deleted, or damaged
        if is_taken:
            self._is_published = True
            self._digests.update(zip(blocks, digests, strict=True))
        return is_taken

    def _digest(self, index: int) -> str:
        checksum, _ = self._read(index)
        return checksum

    # Objects

    def _open(self, writers: contextlib.ExitStack, path: str, size_bytes: int) -> Writer:
        return writers.enter_context(contextlib.closing(self._place.storage.create(path, size_bytes)))

    def _publish(self, writer: Writer, size_bytes: int) -> None:
        writer.publish()
        self._is_published = True
        self._written_bytes += size_bytes

    def _write_blocks(self, writer: Writer, blocks: Sequence[int]) -> None:
        """Write blocks one behind the other, from ``parallel_writes`` threads."""
        tasks = (partial(self._write_block, writer, position, index) for position, index in enumerate(blocks))
        in_threads(tasks, self._place.storage.parallel_writes, "lazysnap-write")

    def _write_block(self, writer: Writer, position: int, index: int) -> None:
        """Write a block. Its checksum is computed by the thread that writes it."""
        checksum, block = self._read(index)
        self._digests[index] = checksum
        # The padding of the last page is cut off again when the object is published.
        writer.write(position * BLOCK_BYTES, block)
        self._progress(min(BLOCK_BYTES, self._source.size_bytes - index * BLOCK_BYTES))

    def _read(self, index: int) -> tuple[str, memoryview]:
        """Return a block and its checksum. Blocks: until it was captured. Raises: CaptureAborted; FormatError."""
        offset = index * BLOCK_BYTES
        length = min(BLOCK_BYTES, self._source.size_bytes - offset)
        block = self._source.view(offset, -(-length // PAGE) * PAGE)
        if len(block) < length:
            raise FormatError(f"{self._place.where}: {len(block)} bytes at {offset}, expected {length}")
        return digest(block[:length]), block


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
