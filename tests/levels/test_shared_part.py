"""What a node stores of a shard where all nodes see it: a shard of its own, cut out of a slot or of a file."""

import pytest
from support.catalogue import inventory_of
from support.image import write_node, write_shard
from support.place import PAGE, pattern
from support.snapshots import RUN, START

from lazysnap.errors import FormatError
from lazysnap.levels.blocks import FileBlocks
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.shared_part import SharedPart, has_shared_rows
from lazysnap.levels.source import MemorySource, NodeSource, map_anonymous
from lazysnap.levels.store import open_storage
from lazysnap.shard.checksum import BLOCK_BYTES
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.names import NodeName
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import open_snapshot

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("shared part")]  # what all its tests read is written once

ROWS = 5 * BLOCK_BYTES // 16
SPECS = [
    TensorSpec("big", "F32", (ROWS, 4)),
    TensorSpec("left", "F32", (3,)),
    TensorSpec("own", "F32", (5,)),
    TensorSpec("part", "U8", (7, 3)),
    TensorSpec("scalar", "U8", ()),
    TensorSpec("none", "U8", ()),
]


def fact(shape, rows=None, start=0):
    found = {"scope": "full", "global_shape": list(shape), "offsets": [start, *[0] * (len(shape) - 1)][: len(shape)]}
    return found if rows is None else {**found, "shared_rows": rows}


FACTS = {
    "big": fact((2 * ROWS, 4), [ROWS // 2, ROWS - 1], start=ROWS),
    "left": fact((3,), [0, 0]),
    "part": fact((9, 3), [2, 5], start=1),
    "scalar": fact(()),
    "none": fact((), [0, 0]),
}
KEPT = {"big": (ROWS // 2, ROWS - 1), "own": (0, 5), "part": (2, 5), "scalar": (0, 1)}


def meta(rank=0, **tensors):
    aliases = {"tied": "big", "gone": "left"}
    return CaptureMeta(RUN, START, 7, rank, 2, 3, tensors={**FACTS, **tensors}, aliases=aliases)


@pytest.fixture(scope="module")
def image():
    layout = Layout.plan(SPECS, {"tied": "big", "gone": "left"})
    room = map_anonymous(-(-layout.size_bytes // PAGE) * PAGE)
    room[: len(layout.header)] = layout.header
    room[len(layout.header) : layout.size_bytes] = pattern(layout.size_bytes - len(layout.header), 1)
    return layout, room


def expected(image):
    """Of each tensor that is kept, its bytes."""
    layout, room = image
    found = {}
    for name, (start, stop) in KEPT.items():
        spec, offset = layout.find(name)
        row = spec.nbytes // spec.shape[0] if spec.shape else spec.nbytes
        found[name] = bytes(room[offset + start * row : offset + stop * row])
    return found


def check(storage, rank, image):
    """What a level has of a rank is what it should have, verified."""
    catalogue = Catalogue(storage)
    plan = catalogue.find("7")
    snapshot = open_snapshot(catalogue, plan)
    shard = snapshot.shards[rank]
    found = {}
    for spec in shard.layout.specs:
        stored = shard.stored(spec.name)
        out = bytearray(spec.nbytes)
        path = f"{storage.url}/{plan.sources[rank][0].snapshot.directory}/{plan.sources[rank][0].file}.safetensors"
        with open(path, "rb") as file:
            file.seek(stored.offset)
            file.readinto(out)
        found[spec.name] = bytes(out)
    assert found == expected(image)
    assert shard.stored("big").extent == ((2 * ROWS, 4), (ROWS + ROWS // 2, 0))
    assert shard.stored("part").extent == ((9, 3), (3, 0))
    assert shard.meta.aliases == shard.layout.metadata == {"tied": "big"}
    assert not has_shared_rows(shard.meta)


def test_of_each_tensor_its_rows_are_stored_and_the_manifest_says_which(tmp_path, image):
    storage, (layout, room) = open_storage(str(tmp_path)), image
    for rank in (0, 1):
        part = SharedPart(meta(rank), MemorySource(room, layout.size_bytes))
        write_shard(storage, part.meta, part)

    for rank in (0, 1):
        check(storage, rank, image)


@pytest.mark.slow
def test_a_file_of_several_ranks_is_cut_as_well(tmp_path, image):
    near, shared, (layout, room) = open_storage(str(tmp_path / "near")), open_storage(str(tmp_path / "shared")), image
    both = NodeSource([(meta(rank), MemorySource(room, layout.size_bytes)) for rank in (0, 1)])
    manifest = write_node(near, NodeName(0, 1), both.shards, both)

    blocks = FileBlocks(FilePlace.of(near, inventory_of(near).entries[0]), manifest)
    parts = [SharedPart(one.meta, blocks, one.offset, one.size_bytes) for one in manifest.shards]
    together = NodeSource([(part.meta, part) for part in parts])
    write_node(shared, NodeName(0, 1), together.shards, together)
    blocks.close()

    for rank in (0, 1):
        check(shared, rank, image)


def test_a_damaged_block_ends_the_copy_and_nothing_is_visible(tmp_path, image):
    near, shared, (layout, room) = open_storage(str(tmp_path / "near")), open_storage(str(tmp_path / "shared")), image
    manifest = write_shard(near, meta(), MemorySource(room, layout.size_bytes))
    place = FilePlace.of(near, inventory_of(near).entries[0])
    with open(f"{near.url}/{place.file_path}", "r+b") as file:
        file.seek(4 * BLOCK_BYTES)
        file.write(b"flip")
    blocks = FileBlocks(place, manifest)
    part = SharedPart(meta(), blocks)

    with pytest.raises(FormatError, match="block 4"):
        write_shard(shared, part.meta, part)

    blocks.close()
    assert inventory_of(shared).entries == ()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[0], [3, 2], [-1, 2], [0, 8], [0.0, 1], "ab", [True, True]])
def test_rows_that_cannot_be_are_refused(image, rows):
    layout, room = image

    with pytest.raises(FormatError, match="'part': bad shared_rows"):
        SharedPart(meta(part=fact((9, 3), rows)), MemorySource(room, layout.size_bytes))
