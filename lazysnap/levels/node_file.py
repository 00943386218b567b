"""One node's file and its manifest at one place: written block by block, committed, read back, deleted."""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lazysnap import faults
from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.leftovers import is_settled
from lazysnap.levels.source import BlockSource, Progress, no_progress
from lazysnap.levels.storage import Storage, Writer
from lazysnap.levels.threads import in_threads
from lazysnap.memory.failures import CaptureAborted
from lazysnap.resolver import Entry
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums, block_ranges, digest
from lazysnap.shard.layout import PAGE
from lazysnap.shard.manifest import Manifest, Shard
from lazysnap.shard.names import NodeName, SnapshotName, parse_keep_file_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FilePlace:
    """The place of the file of one node and of its manifest, written or not."""

    storage: Storage
    directory: str
    name: NodeName

    @property
    def file_path(self) -> str:
        """The file's path in the storage."""
        return f"{self.directory}/{self.name.file}"

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

    def check_size(self, size_bytes: int) -> None:
        """Raises: FormatError, if the file has another size; FileNotFoundError; LevelError."""
        size = self.storage.size(self.file_path)
        if size != size_bytes:
            raise FormatError(f"{self.where}: {size} bytes, the manifest says {size_bytes}")

    def is_link(self) -> bool:
        """True if a file is a symbolic link, or is behind one: then it is not deleted."""
        return self.storage.is_link(self.file_path) or self.storage.is_link(self.manifest_path)

    def is_settled(self) -> bool:
        """True if neither manifest nor file changed for a day."""
        return is_settled(self.storage, self.manifest_path) and is_settled(self.storage, self.file_path)

    def delete(self) -> None:
        """Delete the manifest, then the file: a crash leaves garbage, not a snapshot."""
        self.storage.delete(self.manifest_path)
        faults.point("level.store.uncommitted")
        self.storage.delete(self.file_path)
        faults.point("level.store.deleted")
        self.storage.delete_directory(self.directory)

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


def entries_of(manifest: Manifest, level: str, speed: int, directory: str) -> list[Entry]:
    """Return the entries of a committed file, one for each rank."""
    found = []
    for meta in (shard.meta for shard in manifest.shards):
        facts = (meta.run_id, meta.start, meta.step, meta.rank, meta.world_size)
        found.append(Entry(level, speed, *facts, directory, file=manifest.name.text))
    return found


def read_committed(place: FilePlace) -> Manifest:
    """Return the manifest at a place, whose file is there in its full size; the file is not read.

    Raises: FormatError, also if the file is lost; FileNotFoundError, if nothing is committed; LevelError.
    """
    manifest = place.read_manifest()
    try:
        place.check_size(manifest.size_bytes)
    except FileNotFoundError as error:
        # The manifest is deleted first: only one that is still there says that something is lost.
        place.storage.size(place.manifest_path)
        raise FormatError(f"{place.where}: a manifest without its file: {_loss(manifest)}") from error
    return manifest


def _loss(manifest: Manifest) -> str:
    ranks = [shard.meta.rank for shard in manifest.shards]
    if len(ranks) == 1:
        return f"the shard of rank {ranks[0]} is lost"
    return f"the shards of ranks {ranks[0]} to {ranks[-1]} are lost"


def write_node_file(
    place: FilePlace, shards: Sequence[Shard], source: BlockSource, *, progress: Progress = no_progress
) -> Manifest:
    """Write and commit a node's file. On return file and manifest are durable.

    Existing files of these names are replaced: they hold the same bytes, or were not committed.
    Raises: LevelError; CaptureAborted; OSError. On an error nothing of the file stays, unless the caller of the job
    gave up: a watched storage refuses to delete then, because another writer may have written the file by now. A
    cancelled write deletes it: its caller waits, so there is no other writer.
    """
    faults.point("level.store.begin")
    try:
        writer = place.storage.create(place.file_path, source.size_bytes)
    except BaseException:
        place.remove_if_empty()
        raise
    is_published = False
    # Until it is closed, no sweep of another process takes the file for garbage.
    with contextlib.closing(writer):
        try:
            checksums = _write_blocks(place, writer, source, progress)
            source.finish()
            faults.point("level.store.publish_shard")
            writer.publish()
            is_published = True
            manifest = Manifest(place.name, tuple(shards), checksums, time.time_ns())
            faults.point("level.store.commit")
            # A watched storage raises, if the caller gave up while the write hung: then nothing is committed.
            place.storage.put(place.manifest_path, manifest.encode())
        except BaseException:
            writer.close()
            if not is_published:
                place.remove_if_empty()
            else:
                place.delete_or_leave()
            raise
    return manifest


def _write_blocks(place: FilePlace, writer: Writer, source: BlockSource, progress: Progress) -> Checksums:
    """Write from ``parallel_writes`` threads; each block's checksum is computed by the thread that writes it."""
    size = source.size_bytes

    def one(offset: int, length: int) -> tuple[str, float]:
        block = source.view(offset, -(-length // PAGE) * PAGE)
        if len(block) < length:
            raise FormatError(f"{place.where}: {len(block)} bytes at {offset}, expected {length}")
        began = time.perf_counter()
        checksum = digest(block[:length])
        took_s = time.perf_counter() - began
        # The padding of the last page is cut off again when the file is published.
        writer.write(offset, block)
        progress(length)
        return checksum, took_s

    tasks = (partial(one, *block) for block in block_ranges(size))
    blocks = in_threads(tasks, place.storage.parallel_writes, "lazysnap-write")
    return Checksums(size, BLOCK_BYTES, tuple(text for text, _ in blocks), sum(took_s for _, took_s in blocks))
