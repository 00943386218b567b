"""The file of a node with several ranks: valid safetensors as a whole, and the bytes of each shard in it."""

import dataclasses

import pytest
from support.catalogue import inventory_of
from support.image import write_node, write_shard
from support.place import PAGE, pattern
from support.snapshots import RUN, START, lone_manifest

from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.blocks import FileBlocks, WantedBytes, fill, verify
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import MemorySource, NodeSource, map_anonymous
from lazysnap.levels.store import open_storage
from lazysnap.memory.capture_reader import CaptureAborted
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.names import NodeName
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import open_snapshot, read

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("node files")]  # what all its tests read is written once

RANKS = (1, 2, 5)
SIZES = {1: 3 * BLOCK_BYTES + 5, 2: 10, 5: BLOCK_BYTES // 2}
"""Elements of each rank: blocks of the file hold one shard, or the end of one and the beginning of others."""


def meta(rank: int) -> CaptureMeta:
    return CaptureMeta(RUN, START, 7, rank, 6, captured_ns=3, aliases={"tied": "model.a"})


def shard(rank: int) -> tuple[memoryview, int]:
    specs = [TensorSpec("model.a", "F32", (SIZES[rank],)), TensorSpec("rng", "U8", (rank,))]
    layout = Layout.plan(specs, {"tied": "model.a"})
    room = map_anonymous(-(-layout.size_bytes // PAGE) * PAGE)
    room[: len(layout.header)] = layout.header
    room[len(layout.header) : layout.size_bytes] = pattern(layout.size_bytes - len(layout.header), rank)
    return room, layout.size_bytes


@pytest.fixture(scope="module")
def shards():
    return {rank: shard(rank) for rank in RANKS}


def joined(shards, ranks=RANKS) -> NodeSource:
    return NodeSource([(meta(rank), MemorySource(*shards[rank])) for rank in ranks])


@pytest.fixture(scope="module")
def written(shards, tmp_path_factory):
    """A level with the file, and its manifest."""
    storage = open_storage(str(tmp_path_factory.mktemp("level")))
    source = joined(shards)
    return storage, write_node(storage, NodeName(1, 2), source.shards, source)


def test_it_is_one_safetensors_file_whose_tensors_say_their_rank(shards, written):
    storage, manifest = written
    safetensors = pytest.importorskip("safetensors", reason="without torch it is not installed")
    path = f"{storage.url}/{manifest.meta.name.directory}/{manifest.name.file}"
    with safetensors.safe_open(path, "numpy") as file:
        names = set(file.keys())
        assert names >= {f"rank-{rank:05d}/{name}" for rank in RANKS for name in ("model.a", "rng")}
        assert names - {f"lazysnap/rank-{rank:05d}" for rank in RANKS} == {
            f"rank-{rank:05d}/{name}" for rank in RANKS for name in ("model.a", "rng")
        }
        assert file.metadata() == {f"rank-{rank:05d}/tied": f"rank-{rank:05d}/model.a" for rank in RANKS}
        for rank in RANKS:
            image, size = shards[rank]
            assert file.get_tensor(f"rank-{rank:05d}/rng").tobytes() == bytes(image[size - rank : size])


@pytest.mark.slow
def test_each_shard_stands_in_it_byte_for_byte_on_a_page(shards, written):
    storage, manifest = written
    blocks = FileBlocks(
        FilePlace.of(storage, inventory_of(storage).entries[0]), Manifest.decode(manifest.encode(), "here")
    )
    for part in manifest.shards:
        image, size = shards[part.meta.rank]
        assert (part.size_bytes, part.offset % PAGE) == (size, 0)
        got = bytearray(size)

        def put(at: int, data: memoryview, got: bytearray = got) -> None:
            got[at : at + len(data)] = data

        fill({blocks: [WantedBytes(part.offset, part.offset + size, put)]})
        assert got == image[:size]


def test_a_reader_finds_every_rank_and_its_tensors(shards, tmp_path):
    storage = open_storage(str(tmp_path))
    both = joined(shards, (1, 2))
    parts = [dataclasses.replace(part, meta=_of_three(part.meta)) for part in both.shards]
    write_node(storage, NodeName(0, 2), parts, both)
    write_shard(storage, _of_three(meta(5)), MemorySource(*shards[5]))
    catalogue = Catalogue(storage)

    snapshot = open_snapshot(catalogue, catalogue.find("latest"))

    assert [entry.rank for entry in inventory_of(storage).entries] == [0, 1, 2]
    for number, rank in enumerate(RANKS):
        image, size = shards[rank]
        stored = snapshot.shards[number].find("rng")
        got = bytearray(rank)
        read(
            {
                stored.shard: [
                    WantedBytes(stored.offset, stored.offset + rank, lambda at, data, got=got: _put(got, at, data))
                ]
            }
        )
        assert got == image[size - rank : size]


def _of_three(one: CaptureMeta) -> CaptureMeta:
    return dataclasses.replace(one, rank=RANKS.index(one.rank), world_size=3)


def _put(out: bytearray, at: int, data: memoryview) -> None:
    out[at : at + len(data)] = data


@pytest.mark.parametrize("length", [PAGE, 7 * PAGE, BLOCK_BYTES], ids=str)
def test_blocks_of_any_size_put_together_are_the_same_bytes(shards, length):
    source = joined(shards, (2, 5, 2))
    got = bytearray()
    for at in range(0, source.size_bytes, length):
        got += source.view(at, length)
    expected = bytearray(source.size_bytes)
    for part in source.shards:
        image, size = shards[part.meta.rank]
        expected[part.offset : part.offset + size] = image[:size]
    expected[: source.shards[0].offset] = got[: source.shards[0].offset]
    assert got[: source.size_bytes] == expected


def test_what_one_rank_dropped_is_nothing_of_the_node(shards, tmp_path):
    class Dropped(MemorySource):
        def finish(self) -> None:
            raise CaptureAborted("torn")

    storage = open_storage(str(tmp_path))
    source = NodeSource([(meta(1), MemorySource(*shards[1])), (meta(2), Dropped(*shards[2]))])
    with pytest.raises(CaptureAborted, match="torn"):
        write_node(storage, NodeName(0, 2), source.shards, source)

    assert inventory_of(storage).entries == ()
    assert storage.list() == []


def test_a_file_of_other_ranks_is_never_written_over(shards, tmp_path):
    storage = open_storage(str(tmp_path))
    theirs, ours = joined(shards, (2, 5)), joined(shards, (1, 2))
    written = write_node(storage, NodeName(0, 2), theirs.shards, theirs)

    with pytest.raises(LevelError, match=r"holds ranks \[2, 5\] of another writer"):
        write_node(storage, NodeName(0, 2), ours.shards, ours)

    assert verify(FilePlace.of(storage, inventory_of(storage).entries[0])) == written


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda parts: (parts[0], dataclasses.replace(parts[1], meta=parts[0].meta), parts[2]),
            "several shards of one",
        ),
        (lambda parts: (parts[0], dataclasses.replace(parts[1], offset=PAGE), parts[2]), "begins at byte"),
        (
            lambda parts: (parts[0], dataclasses.replace(parts[1], offset=parts[1].offset + 1), parts[2]),
            "begins at byte",
        ),
        (lambda parts: parts[:2], "the shards end at byte"),
        (
            lambda parts: (parts[0], parts[1], dataclasses.replace(parts[2], meta=_of_three(parts[2].meta))),
            "shards of different snapshots",
        ),
    ],
    ids=["twice", "overlapping", "off a page", "one missing", "another world"],
)
def test_a_manifest_whose_shards_cannot_be_is_refused(written, change, said):
    _, manifest = written
    wrong = dataclasses.replace(manifest, shards=change(manifest.shards))
    with pytest.raises(FormatError, match=said):
        Manifest.decode(wrong.encode(), "here")


def test_a_lone_shard_begins_its_file(shards):
    image, size = shards[5]
    good = lone_manifest(meta(5), PAGE, Checksums.of(image[:size]), 1)
    assert Manifest.decode(good.encode(), "here") == good
    wrong = dataclasses.replace(
        good, shards=(dataclasses.replace(good.shards[0], offset=PAGE, size_bytes=size - PAGE),)
    )
    with pytest.raises(FormatError, match="the only shard begins at byte"):
        Manifest.decode(wrong.encode(), "here")
