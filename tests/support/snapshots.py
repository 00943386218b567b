"""Snapshots made of plain bytes, without torch, and what of them can be read back."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.blocks import FileBlocks, WantedBytes, fill
from lazysnap.levels.node_file import FilePlace, delete_files, entries_of
from lazysnap.levels.source import ByteCounter, MemorySource, map_anonymous, no_progress
from lazysnap.levels.storage import Storage
from lazysnap.resolver import Entry
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest, Shard
from lazysnap.shard.names import NodeName, SnapshotName
from support.catalogue import inventory_of
from support.image import write_shard
from support.place import PAGE, pattern

RUN, OTHER = "0" * 16, "f" * 16
"""Two runs; the other one was started later."""
START = "1" * 16
SHARD, MANIFEST = "node-00000-of-00001.safetensors", "node-00000-of-00001.json"


@functools.lru_cache(maxsize=8)
def _image(seed: int, elements: int) -> tuple[memoryview, int]:
    layout = Layout.plan([TensorSpec("weight", "U8", (elements,))])
    room = map_anonymous(-(-layout.size_bytes // PAGE) * PAGE)
    room[: len(layout.header)] = layout.header
    room[len(layout.header) : layout.size_bytes] = pattern(elements, seed)
    return room, layout.size_bytes


def directory(step: int, run_id: str = RUN, start: str = START) -> str:
    """The name of a snapshot's directory."""
    return SnapshotName(run_id, step, start).directory


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a snapshot: a single tensor ``weight`` whose bytes follow from the fields here."""

    step: int
    run_id: str = RUN
    elements: int = 5000
    rank: int = 0
    world_size: int = 1
    start: str = START

    @property
    def image(self) -> memoryview:
        """The bytes of the shard."""
        room, size = _image(self._seed, self.elements)
        return room[:size]

    @property
    def _seed(self) -> int:
        return int(self.run_id, 16) * 1_000_003 + self.step * 1009 + self.rank

    @property
    def meta(self) -> CaptureMeta:
        """What the manifest says; ``state`` tells the fields, so that a reader can make the same image."""
        state = {"elements": self.elements}
        where = (self.run_id, self.start, self.step, self.rank, self.world_size)
        return CaptureMeta(*where, captured_ns=3, state=state)

    def source(self) -> MemorySource:
        """What it is written from."""
        room, size = _image(self._seed, self.elements)
        return MemorySource(room, size)

    def write(self, store: Storage) -> Entry:
        """Write and commit it."""
        manifest = write_shard(store, self.meta, self.source())
        return entries_of(manifest, store.url)[0]

    def delete(self, store: Storage) -> bool:
        """Delete it as keepers and ``lazysnap prune`` do; ``False``: it has to stay."""
        directory = self.meta.name.directory
        return delete_files([FilePlace(store, directory, NodeName(self.rank, self.world_size))])

    def write_later(self, store: Storage) -> Callable[[], Entry]:
        """What writes it."""
        return lambda: self.write(store)


def lone_manifest(meta: CaptureMeta, header_bytes: int, checksums: Checksums, created_ns: int) -> Manifest:
    """Of a file that holds one shard."""
    shard = Shard(meta, 0, checksums.size_bytes, header_bytes)
    return Manifest(NodeName(meta.rank, meta.world_size), (shard,), checksums, created_ns)


def key_of(manifest: Manifest, rank: int, name: str) -> str:
    """What a rank's tensor is called in the file of its node."""
    return name if len(manifest.shards) == 1 else f"rank-{rank:05d}/{name}"


def read_image(store: Storage, entry: Entry, out: memoryview, progress: ByteCounter = no_progress) -> Manifest:
    """The file of an entry, verified. Raises: as ``fill``."""
    manifest, place = FilePlace.of(store, entry).read_manifest(), FilePlace.of(store, entry)
    place.check_sizes(manifest)

    def put(at: int, data: memoryview) -> None:
        out[at : at + len(data)] = data

    with contextlib.closing(FileBlocks(place, manifest)) as blocks:
        fill({blocks: [WantedBytes(0, manifest.size_bytes, put)]}, progress=progress)
    return manifest


def read_whole(store: Storage, entry: Entry, progress: ByteCounter = no_progress) -> None:
    """Read an entry as a restore does, and compare every byte with what was written.

    Raises: FormatError, FileNotFoundError, LevelError: what is allowed of a snapshot that is damaged or gone.
    AssertionError: bytes were given out that are not those that were written.
    """
    manifest = FilePlace.of(store, entry).read_manifest()
    out = map_anonymous(manifest.size_bytes)
    read_image(store, entry, out, progress)
    meta = manifest.meta
    was = Snapshot(meta.step, meta.run_id, meta.state["elements"], meta.rank, meta.world_size, meta.start)
    assert (meta.step, meta.run_id, meta.rank) == (entry.step, entry.run_id, entry.rank)
    assert out == was.image, f"{entry.snapshot.directory} was read without complaint, and is not what was written"


@dataclass(frozen=True)
class Findings:
    """What a restart would find at a place."""

    whole: tuple[Entry, ...]
    """Read back, every byte."""
    problems: tuple[str, ...]
    """What was said of the rest."""

    def steps(self, run_id: str = RUN) -> list[int]:
        """Of the whole ones."""
        return sorted(entry.step for entry in self.whole if entry.run_id == run_id)


def look(store: Storage) -> Findings:
    """Read back everything that the inventory offers. Raises: AssertionError, LevelError."""
    inventory = inventory_of(store)
    whole, problems = [], list(inventory.problems)
    for entry in inventory.entries:
        try:
            read_whole(store, entry)
        except (FormatError, FileNotFoundError, LevelError) as error:
            problems.append(f"{entry.snapshot.directory}: {error}")
        else:
            whole.append(entry)
    return Findings(tuple(whole), tuple(problems))


def overwrite(storage: Storage, path: str, data: bytes) -> None:
    """What damages an object without anyone's help."""
    storage.delete(path)
    storage.put(path, data)
