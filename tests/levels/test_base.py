"""The base of a fine-tuning's file: stored once, taken over by the snapshots behind it, and nobody's but their own."""

import contextlib
import functools
import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
from deaths import run_forks
from support.damage import flip
from support.image import write_node
from support.listing import files_below
from support.place import PAGE, pattern

from lazysnap.errors import FormatError
from lazysnap.levels.blocks import Buffers, FileBlocks, WantedBytes, fill, verify
from lazysnap.levels.leftovers import sweep
from lazysnap.levels.node_base import BlockPlaces
from lazysnap.levels.node_file import FilePlace, delete_files, read_committed
from lazysnap.levels.source import MemorySource, NodeSource, map_anonymous, shard_of
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import open_storage
from lazysnap.shard.checksum import BLOCK_BYTES
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.names import NodeName

RUN, START = "0" * 16, "1" * 16
NAME = NodeName(0, 1)
FROZEN_BYTES = 3 * BLOCK_BYTES + 5000
TRAINED_BYTES = 70_000


@functools.lru_cache(maxsize=4)
def frozen_pattern(num_bytes: int, seed: int) -> bytes:
    return pattern(num_bytes, seed)


@dataclass(frozen=True)
class FineTuning:
    """A snapshot of two frozen tensors, one behind the other, and of one that is trained."""

    step: int
    version: int = 0
    """Of the frozen tensors."""
    rank: int = 0
    world_size: int = 1
    frozen_bytes: int = FROZEN_BYTES

    @property
    def layout(self) -> Layout:
        half = self.frozen_bytes // 2
        return Layout.plan(
            [
                TensorSpec("trained", "U8", (TRAINED_BYTES,)),
                TensorSpec("frozen.0", "U8", (half,)),
                TensorSpec("frozen.1", "U8", (self.frozen_bytes - half,)),
            ]
        )

    @property
    def meta(self) -> CaptureMeta:
        tensors = {name: {"frozen": True} for name in ("frozen.0", "frozen.1")}
        return CaptureMeta(RUN, START, self.step, self.rank, self.world_size, captured_ns=3, tensors=tensors)

    @property
    def image(self) -> bytes:
        trained = pattern(TRAINED_BYTES, 100 + self.step + self.rank)
        return self.layout.header + trained + frozen_pattern(self.frozen_bytes, self.version + 10 * self.rank)

    @property
    def source(self) -> MemorySource:
        image = self.image
        room = map_anonymous(-(-len(image) // PAGE) * PAGE)
        room[: len(image)] = image
        return MemorySource(room, len(image))

    @property
    def directory(self) -> str:
        return self.meta.name.directory

    def write(self, storage: Storage, former: "FineTuning | None" = None) -> Manifest:
        source = self.source
        where = None if former is None else former.directory
        return write_node(storage, NAME, [shard_of(self.meta, source)], source, former=where)

    def place(self, storage: Storage) -> FilePlace:
        return FilePlace(storage, self.directory, NAME)


def bytes_of(storage, directory, name=NAME):
    """Every byte of a committed file, each block compared."""
    place = FilePlace(storage, directory, name)
    manifest = read_committed(place)
    out = bytearray(manifest.size_bytes)

    def put(at, data):
        out[at : at + len(data)] = data

    with contextlib.closing(FileBlocks(place, manifest)) as blocks:
        fill({blocks: [WantedBytes(0, len(out), put)]})
    return out


@pytest.fixture
def storage(tmp_path):
    return open_storage(str(tmp_path / "level"))


def inode(storage, snapshot):
    return os.stat(pathlib.Path(storage.url) / snapshot.directory / NAME.base).st_ino


def test_the_second_snapshot_takes_the_base_of_the_first_over(storage):
    first, second = FineTuning(1), FineTuning(2)
    written = first.write(storage)
    assert written.base == ((1, 3),)
    assert written.written_bytes == written.size_bytes

    written = second.write(storage, first)

    assert inode(storage, first) == inode(storage, second)
    assert written.written_bytes == written.size_bytes - 2 * BLOCK_BYTES
    for snapshot in (first, second):
        assert bytes_of(storage, snapshot.directory) == snapshot.image
        assert verify(snapshot.place(storage)).base == ((1, 3),)
    assert not [path for path in files_below(storage.url) if ".tmp-" in str(path)]


def test_a_snapshot_needs_no_other_one(storage):
    first, second = FineTuning(1), FineTuning(2)
    first.write(storage)
    second.write(storage, first)
    assert delete_files([first.place(storage)])

    assert bytes_of(storage, second.directory) == second.image
    assert storage.list() == [second.directory]


@pytest.mark.parametrize(
    "why", ["others bytes", "no such snapshot", "no base there", "base is gone", "damaged manifest"]
)
def test_a_base_that_cannot_be_taken_over_is_written_anew(storage, why):
    first, second = FineTuning(1), FineTuning(2, version=1 if why == "others bytes" else 0)
    if why == "no base there":
        first = replace(first, frozen_bytes=5000)
    if why != "no such snapshot":
        first.write(storage)
    if why == "base is gone":
        storage.delete(first.place(storage).base_path)
    if why == "damaged manifest":
        flip(pathlib.Path(storage.url) / first.place(storage).manifest_path)

    written = second.write(storage, first)

    assert written.written_bytes == written.size_bytes
    assert bytes_of(storage, second.directory) == second.image


def test_a_small_share_of_frozen_tensors_makes_no_base(storage):
    snapshot = FineTuning(1, frozen_bytes=BLOCK_BYTES + 5000)

    assert snapshot.write(storage).base == ()
    assert storage.list(snapshot.directory) == [NAME.manifest, NAME.file]


def test_several_ranks_share_one_base(storage):
    written = []
    for step in (1, 2):
        ranks = [FineTuning(step, rank=rank, world_size=2) for rank in range(2)]
        together = NodeSource([(each.meta, each.source) for each in ranks])
        former = FineTuning(1).directory
        written.append(write_node(storage, NAME, together.shards, together, former=former))

    first, second = written
    assert first.base == second.base
    assert len(first.base) == 2
    assert second.written_bytes < second.size_bytes // 2
    data = bytes_of(storage, FineTuning(2).directory)
    for rank, shard in enumerate(second.shards):
        image = FineTuning(2, rank=rank, world_size=2).image
        assert data[shard.offset : shard.offset + shard.size_bytes] == image


def test_a_copy_to_another_level_takes_the_base_of_that_level_over(storage, tmp_path):
    other = open_storage(str(tmp_path / "other"))
    former = None
    for step in (1, 2):
        snapshot = FineTuning(step)
        manifest = snapshot.write(storage)
        blocks = FileBlocks(snapshot.place(storage), manifest)
        with contextlib.closing(blocks):
            copied = write_node(other, NAME, manifest.shards, blocks, former=former)
        assert bytes_of(other, snapshot.directory) == snapshot.image
        former = snapshot.directory
    assert copied.written_bytes < copied.size_bytes


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_base_is_found(storage, damage):
    snapshot = FineTuning(1)
    snapshot.write(storage)
    path = pathlib.Path(storage.url) / snapshot.place(storage).base_path
    if damage == "flipped":
        flip(path)
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()

    with pytest.raises((FormatError, FileNotFoundError)):
        verify(snapshot.place(storage))
    if damage != "flipped":
        with pytest.raises(FormatError):
            read_committed(snapshot.place(storage))


def test_a_base_that_is_gone_is_missing_for_each_thread_that_reads(storage):
    snapshot = FineTuning(1)
    manifest = snapshot.write(storage)
    os.unlink(pathlib.Path(storage.url) / snapshot.directory / NAME.base)

    with contextlib.closing(FileBlocks(snapshot.place(storage), manifest)) as blocks:
        for _ in range(2):
            with pytest.raises(FileNotFoundError), blocks.block(1, Buffers()):
                pass


@pytest.mark.parametrize("base", [((1, 1),), ((2, 1),), ((1, 3), (2, 3)), ((1, 2), (0, 1)), ((3, 4),), ((1, 10**9),)])
def test_a_base_that_is_no_part_of_the_file_is_refused(storage, base):
    """The last block is short, so it cannot be in a base."""
    manifest = FineTuning(1).write(storage)

    with pytest.raises(FormatError, match="base: blocks"):
        Manifest.decode(replace(manifest, base=base).encode(), "hostile")


def test_blocks_are_where_both_lists_say():
    places = BlockPlaces(((1, 3), (5, 6)), 7 * 100 + 30, 100)

    assert places.of_base() == [1, 2, 5]
    assert places.of_file() == [0, 3, 4, 6, 7]
    assert (places.base_bytes, places.file_bytes) == (300, 430)
    for is_in_base, blocks in ((True, places.of_base()), (False, places.of_file())):
        assert [places.find(index) for index in blocks] == [(is_in_base, 100 * at) for at in range(len(blocks))]


def test_a_reader_that_knows_the_page_of_the_format_alone_reads_it(storage):
    first, second = FineTuning(1), FineTuning(2)
    first.write(storage)
    second.write(storage, first)
    reader = pathlib.Path(__file__).parents[1] / "format_reader.py"
    program = (
        f"import pathlib, runpy, sys; found = runpy.run_path({str(reader)!r})['newest'](pathlib.Path(sys.argv[1]))\n"
        "for name in ('trained', 'frozen.0', 'frozen.1'): sys.stdout.buffer.write(found.tensor(name).tobytes())"
    )
    done = subprocess.run([sys.executable, "-c", program, storage.url], capture_output=True, check=True)

    assert done.stdout == second.image[len(second.layout.header) :]


# ---------------------------------------------------------------- deaths


def work(root):
    """Store, take over, delete; in a fork that dies somewhere."""
    storage = open_storage(root)
    former = None
    for step in (1, 2, 3):
        snapshot = small(step)
        snapshot.write(storage, former)
        with open(f"{root}.committed", "a") as file:
            file.write(f"{step}\n")
        if step == 3:
            delete_files([small(1).place(storage)])
        former = snapshot


def small(step):
    return FineTuning(step, frozen_bytes=2 * BLOCK_BYTES + 5000)


@pytest.mark.slow
def test_killed_at_any_point_what_was_committed_is_whole(tmp_path):
    log = tmp_path / "points"
    assert run_forks("test_base", [(tmp_path / "dry", "", log)]) == [0]
    passed = log.read_text().splitlines()
    # The first time is that of a snapshot that takes nothing over: see test_store.py.
    points = [f"{name}:{passed.count(name)}" for name in sorted(set(passed))]
    assert f"level.store.take_over:{passed.count('level.store.take_over')}" in points
    run_forks("test_base", [(tmp_path / point, f"{point}:kill", "") for point in points])
    for point in points:
        root = tmp_path / point
        committed = tmp_path / f"{point}.committed"
        steps = [int(line) for line in committed.read_text().split()] if committed.exists() else []
        storage = open_storage(str(root))
        for step in steps[-2:]:
            assert bytes_of(storage, small(step).directory) == small(step).image, point
        # A new keeper goes on, from whatever is there.
        small(4).write(storage, small(max(steps, default=1)))
        assert bytes_of(storage, small(4).directory) == small(4).image, point
        sweep(storage)
        assert not [path for path in files_below(storage.url) if ".tmp-" in str(path)], point
