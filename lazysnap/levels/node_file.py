"""One node's file and its manifest at one place: written block by block, committed, read back, deleted."""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from lazysnap import faults
from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.leftovers import is_stale
from lazysnap.levels.node_base import BlockPlaces, Ranges, base_of, places_of
from lazysnap.levels.source import BlockSource, ByteCounter, no_progress
from lazysnap.levels.storage import Storage, Writer
from lazysnap.levels.threads import in_threads
from lazysnap.memory.capture_reader import CaptureAborted
from lazysnap.resolver import Entry
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums, digest
from lazysnap.shard.layout import PAGE
from lazysnap.shard.manifest import Manifest, Shard
from lazysnap.shard.names import NodeName, SnapshotName, parse_keep_file_name

logger = logging.getLogger(__name__)

_DIGEST_THREADS = 2
"""Threads that compare a base with the previous one: training continues meanwhile."""


@dataclass(frozen=True)
class FilePlace:
    """The place of the file of one node and of its manifest, written or not."""

    storage: Storage
    directory: str
    name: NodeName

    @classmethod
    def of(cls, storage: Storage, entry: Entry) -> "FilePlace":
        """Return the place of the file that holds a shard, which is at a level."""
        name = NodeName.parse(entry.file)
        assert name is not None, f"{entry} is in memory"
        return cls(storage, entry.snapshot.directory, name)

    @property
    def file_path(self) -> str:
        """The file's path in the storage."""
        return f"{self.directory}/{self.name.file}"

    @property
    def base_path(self) -> str:
        """The path of the file's base in the storage; many files have none."""
        return f"{self.directory}/{self.name.base}"

    @property
    def manifest_path(self) -> str:
        """The manifest's path in the storage."""
        return f"{self.directory}/{self.name.manifest}"

    @property
    def where(self) -> str:
        """The file, for messages."""
        return f"{self.storage.url}/{self.file_path}"

    def read_manifest(self) -> Manifest:
        """Read the manifest. Raises: FormatError, also if it is of another place; FileNotFoundError; LevelError."""
        where = f"{self.storage.url}/{self.manifest_path}"
        manifest = Manifest.decode(self.storage.get(self.manifest_path), where)
        name = manifest.meta.name
        if name != SnapshotName.parse(self.directory) or manifest.name != self.name:
            raise FormatError(f"{where}: holds {name.directory} in {manifest.name.file}, its name says otherwise")
        return manifest

    def check_sizes(self, manifest: Manifest) -> None:
        """Raises: FormatError, if the file or its base has another size; FileNotFoundError; LevelError."""
        blocks = places_of(manifest)
        self._check_size(self.file_path, blocks.file_bytes)
        if manifest.base:
            self._check_size(self.base_path, blocks.base_bytes)

    def _check_size(self, path: str, size_bytes: int) -> None:
        size = self.storage.size(path)
        if size != size_bytes:
            raise FormatError(f"{self.storage.url}/{path}: {size} bytes, the manifest says {size_bytes}")

    def is_link(self) -> bool:
        """True if a file is a symbolic link, or is behind one: then it is not deleted."""
        paths = (self.file_path, self.base_path, self.manifest_path)
        return any(map(self.storage.is_link, paths))

    def is_stale(self) -> bool:
        """True if neither manifest nor file changed for a day."""
        return is_stale(self.storage, self.manifest_path) and is_stale(self.storage, self.file_path)

    def delete(self) -> None:
        """Delete the manifest, then the file and its base: a crash leaves garbage, not a snapshot."""
        self.storage.delete(self.manifest_path)
        faults.point("level.store.uncommitted")
        self.delete_bytes()
        faults.point("level.store.deleted")
        self.storage.delete_directory(self.directory)

    def delete_bytes(self) -> None:
        """Delete the file and its base, which have no manifest."""
        self.storage.delete(self.file_path)
        self.storage.delete(self.base_path)

    def withdraw(self) -> None:
        """Delete the manifest of a damaged file."""
        self.storage.delete(self.manifest_path)

    def delete_or_leave(self) -> None:
        """Delete the files; on an error leave them for the next sweep."""
        try:
            self.delete()
        except (LevelError, OSError) as error:
            logger.warning("left in %s/%s: %s", self.storage.url, self.directory, error)

    def remove_if_empty(self) -> None:
        """Remove the directory that a failed write may have made, or leave it for the next sweep."""
        with contextlib.suppress(CaptureAborted, LevelError, OSError):
            self.storage.delete_directory(self.directory)


def delete_files(places: Sequence[FilePlace]) -> bool:
    """Delete files of one directory. ``False``, and nothing is deleted, if it has a name or one is behind a link.

    Blocks. Raises: LevelError. Then each file is whole or has no manifest.
    """
    for directory in {place.directory for place in places}:
        if any(map(parse_keep_file_name, places[0].storage.list(directory))):
            return False
    if any(place.is_link() for place in places):
        return False
    for place in places:
        place.delete()
    return True


def entries_of(manifest: Manifest, level: str) -> list[Entry]:
    """Return the entries of a committed file at a level, one for each rank."""
    entries = []
    for shard in manifest.shards:
        meta = shard.meta
        capture = (meta.run_id, meta.start, meta.step, meta.rank, meta.world_size)
        entries.append(Entry(level, *capture, file=manifest.name.text))
    return entries


def read_committed(place: FilePlace) -> Manifest:
    """Return the manifest at a place, whose file exists in its full size; the file is not read.

    Raises: FormatError, also if the file is lost; FileNotFoundError, if nothing is committed; LevelError.
    """
    manifest = place.read_manifest()
    try:
        place.check_sizes(manifest)
    except FileNotFoundError as error:
        # The manifest is deleted first: a file is lost only if the manifest still exists.
        place.storage.size(place.manifest_path)
        raise FormatError(f"{place.where}: a manifest without its file: {_loss(manifest)}") from error
    return manifest


def _loss(manifest: Manifest) -> str:
    ranks = [shard.meta.rank for shard in manifest.shards]
    if len(ranks) == 1:
        return f"the shard of rank {ranks[0]} is lost"
    return f"the shards of ranks {ranks[0]} to {ranks[-1]} are lost"


def write_node_file(
    place: FilePlace,
    shards: Sequence[Shard],
    source: BlockSource,
    *,
    former: str | None = None,
    progress: ByteCounter = no_progress,
) -> Manifest:
    """Write and commit a node's file. After it returns, file and manifest are durable.

    Existing files of these names are replaced: they hold the same bytes, or were not committed.

    Args:
        place: the place of the file.
        shards: the shards in the file, in order.
        source: the bytes of the file.
        former: directory of a snapshot of this node, whose base is reused if it has the same bytes.
        progress: called with the number of bytes after each block.

    Raises: LevelError; CaptureAborted; OSError. On an error nothing of the file stays, unless the task was cancelled or
    abandoned: then a watched storage refuses to delete, because another writer may have written the file by now. The
    core deletes it later.
    """
    faults.point("level.store.begin")
    return _FileWriter(place, source, progress).write(shards, former)


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
        """See ``write_node_file``."""
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
