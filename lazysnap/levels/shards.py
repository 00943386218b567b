"""One shard and its manifest at one place: written block by block, committed, read back, deleted."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lazysnap import faults
from lazysnap.errors import FormatError, LevelError, NameTaken, ShardCorrupt
from lazysnap.levels.files import PAGE
from lazysnap.levels.source import BlockSource
from lazysnap.levels.storage import Storage, Writer
from lazysnap.levels.workers import Workers
from lazysnap.resolver import Entry, FrozenEntry
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums, block_ranges, digest
from lazysnap.shard.manifest import CaptureMeta, Manifest, parse_directory_name, parse_frozen_directory_name
from lazysnap.shard.stem import Stem

logger = logging.getLogger(__name__)

FROZEN_STEM = Stem.of_rank(0, 1)
"""Of every image of immutable tensors."""


@dataclass(frozen=True)
class NodeCapture:
    """The parts of one snapshot that go into one file."""

    stem: Stem
    members: tuple[CaptureMeta, ...]
    """In the order of their ranks."""

    @classmethod
    def of_rank(cls, meta: CaptureMeta) -> "NodeCapture":
        """One part, in a file of its own."""
        return cls(Stem.of_rank(meta.rank, meta.world_size), (meta,))

    @classmethod
    def of(cls, manifest: Manifest) -> "NodeCapture":
        """What a committed shard holds."""
        stem = Stem.parse(manifest.file.removesuffix(".safetensors"))
        assert stem is not None
        return cls(stem, manifest.members or (manifest.meta,))


@dataclass(frozen=True)
class ShardPlace:
    """Where the shard of one rank, or of a node, and its manifest are, or will be."""

    storage: Storage
    directory: str
    stem: Stem

    @property
    def shard_path(self) -> str:
        """The shard's path in the storage."""
        return f"{self.directory}/{self.stem.shard}"

    @property
    def manifest_path(self) -> str:
        """The manifest's path in the storage."""
        return f"{self.directory}/{self.stem.manifest}"

    @property
    def where(self) -> str:
        """The shard, for messages."""
        return f"{self.storage.url}/{self.shard_path}"

    def read_manifest(self) -> Manifest:
        """Of a node's shard: as its first member sees it. Raises: ShardCorrupt, FileNotFoundError, LevelUnavailable."""
        return Manifest.decode(self.storage.get(self.manifest_path), f"{self.storage.url}/{self.manifest_path}")

    def delete(self) -> None:
        """The manifest first, so that what a crash leaves is garbage, not a snapshot."""
        self.storage.delete(self.manifest_path)
        faults.point("level.store.uncommitted")
        self.storage.delete(self.shard_path)
        faults.point("level.store.deleted")
        self.storage.delete_directory(self.directory)

    def withdraw(self) -> None:
        """Take the commit back: what is there is damaged."""
        self.storage.delete(self.manifest_path)

    def delete_or_leave(self, *, shard_only: bool = False) -> None:
        """Delete, or leave it for the next sweep."""
        try:
            if shard_only:
                self.storage.delete(self.shard_path)
            else:
                self.delete()
        except (LevelError, OSError) as error:
            logger.warning("left in %s/%s: %s", self.storage.url, self.directory, error)

    def remove_if_empty(self) -> None:
        """Remove the directory that a failed write may have made, or leave it for the next sweep."""
        with contextlib.suppress(LevelError, OSError):
            self.storage.delete_directory(self.directory)


def stem_of(entry: Entry | FrozenEntry) -> Stem:
    """What the names of its files begin with."""
    if isinstance(entry, FrozenEntry):
        return FROZEN_STEM
    stem = Stem.parse(entry.file) if entry.file is not None else Stem.of_rank(entry.rank, entry.world_size)
    assert stem is not None
    return stem


def place_of(storage: Storage, entry: Entry | FrozenEntry) -> ShardPlace:
    """Where the files of an entry are."""
    return ShardPlace(storage, entry.location, stem_of(entry))


def entries_of(manifest: Manifest, level: str, speed: int, directory: str) -> tuple[Entry, ...]:
    """What a committed shard offers: one entry for each rank that it holds."""
    whole = NodeCapture.of(manifest)
    return tuple(entry_of(meta, level, speed, (directory, whole.stem)) for meta in whole.members)


def entry_of(meta: CaptureMeta, level: str, speed: int, at: tuple[str, Stem]) -> Entry:
    """The entry of one rank; ``at``: the directory, and what the names of its files begin with."""
    directory, stem = at
    facts = (meta.run_id, meta.run_started_ns, meta.step, meta.rank, meta.world_size)
    digest = None if meta.frozen is None else meta.frozen.digest
    file = stem.text if stem.is_node else None
    return Entry(level, speed, *facts, directory, digest, generation=meta.generation, file=file)


def check_place(manifest: Manifest, place: ShardPlace) -> None:
    """Whether a manifest stands where it says. Raises: ShardCorrupt."""
    meta, where = manifest.meta, f"{place.storage.url}/{place.manifest_path}"
    frozen = parse_frozen_directory_name(place.directory)
    if frozen is not None:
        if (meta.run_id, manifest.checksums.whole) != frozen:
            raise ShardCorrupt(f"{where}: holds {manifest.checksums.whole} of run {meta.run_id}, its name differs")
    elif meta.step != parse_directory_name(place.directory) or manifest.file != place.stem.shard:
        raise ShardCorrupt(f"{where}: holds step {meta.step} in {manifest.file}, its name says otherwise")


def write_shard(
    place: ShardPlace,
    metas: Sequence[CaptureMeta],
    source: BlockSource,
    *,
    expected: str | None = None,
    beat: Callable[[], None] | None = None,
) -> Manifest:
    """Write and commit; on return both files are durable. ``metas``: of the rank, or of all that a node's shard holds.

    Raises: NameTaken, and what another writer has there is untouched; ShardCorrupt, if the bytes have not the
    ``expected`` digest; LevelError, CaptureAborted, OSError, what ``beat`` raises, and nothing is left or visible.
    """
    beat = beat or (lambda: None)
    faults.point("level.store.begin")
    try:
        writer = place.storage.begin(place.shard_path, source.size_bytes)
    except BaseException:
        place.remove_if_empty()
        raise
    is_published = False
    # Until it is closed, no sweep of another process takes the shard for garbage.
    with contextlib.closing(writer):
        try:
            checksums, header_bytes = _write_blocks(place, writer, source)
            source.finish()
            if expected is not None and checksums.whole != expected:
                raise ShardCorrupt(f"{place.where}: {checksums.whole} was read, expected {expected}")
            faults.point("level.store.publish_shard")
            writer.publish()
            is_published = True
            members = tuple(metas) if place.stem.is_node else ()
            manifest = Manifest(metas[0], place.stem.shard, header_bytes, checksums, time.time_ns(), members)
            faults.point("level.store.commit")
            beat()  # whoever was given up while that hung commits nothing
            place.storage.put(place.manifest_path, manifest.encode(), exclusive=True)
            beat()  # and if it was this that hung, takes it back: nobody knows of it
        except NameTaken:
            if is_published and _is_there(place, manifest):
                return manifest  # a driver repeated what it got no answer to, and was told of its own
            writer.close()
            if is_published:  # a manifest that lost its shard, or a place that cannot keep names apart: leave it alone
                place.delete_or_leave(shard_only=True)
            raise
        except BaseException:
            # First the writer: what it removes is not published. What stands there now may be another writer's.
            writer.close()
            if is_published:
                place.delete_or_leave()
            else:
                place.remove_if_empty()
            raise
    return manifest


def _is_there(place: ShardPlace, manifest: Manifest) -> bool:
    """Whether the manifest that stands there is this very one."""
    try:
        return place.storage.get(place.manifest_path) == manifest.encode()
    except (LevelError, FormatError, OSError):
        return False


def _write_blocks(place: ShardPlace, writer: Writer, source: BlockSource) -> tuple[Checksums, int]:
    """Write from ``parallel_writes`` threads; each block's checksum is computed by the thread that writes it.

    Returns the checksums and the length of the shard's header.
    """
    size = source.size_bytes
    header_bytes = 0

    def one(offset: int, length: int) -> str:
        nonlocal header_bytes
        block = source.view(offset, -(-length // PAGE) * PAGE)
        if len(block) < length:
            raise ShardCorrupt(f"{place.where}: {len(block)} bytes at {offset}, expected {length}")
        if offset == 0:
            header_bytes = 8 + int.from_bytes(block[:8], "little")
        checksum = digest(block[:length])
        # The padding of the last page is cut off again when the file is published.
        writer.write(offset, block)
        return checksum

    def tasks() -> Iterator[Callable[[], str]]:
        for offset, length in block_ranges(size):
            source.wait(offset + length)
            yield lambda offset=offset, length=length: one(offset, length)  # type: ignore[misc]

    blocks = Workers[str](place.storage.parallel_writes, "lazysnap-write").run(tasks())
    return Checksums(size, BLOCK_BYTES, tuple(blocks)), header_bytes


def read_blocks(
    place: ShardPlace,
    manifest: Manifest,
    room: Callable[[int, int], memoryview],
    beat: Callable[[], None] | None = None,
) -> None:
    """Read a whole shard, each block into ``room(offset, length)``, and compare it with its checksum.

    While it is read, retention leaves it alone.
    Raises: ShardCorrupt, naming file and block; FileNotFoundError; LevelUnavailable.
    """
    checksums = manifest.checksums
    size = place.storage.size(place.shard_path)
    if size != checksums.size_bytes:
        raise ShardCorrupt(f"{place.where}: {size} bytes, the manifest says {checksums.size_bytes}")

    def one(index: int, offset: int, length: int) -> None:
        if beat is not None:
            beat()
        block = room(offset, length)
        reader.read_into(offset, block)
        checksums.verify_block(index, block, place.where)

    def tasks() -> Iterator[Callable[[], None]]:
        for index, span in enumerate(block_ranges(size, checksums.block_bytes)):
            yield lambda index=index, span=span: one(index, *span)  # type: ignore[misc]

    with place.storage.lease(place.shard_path), contextlib.closing(place.storage.reader(place.shard_path)) as reader:
        Workers[None](place.storage.parallel_reads, "lazysnap-read").run(tasks())
