"""Beyond 4 GiB: offsets in a slot, in a file, in ranges that are read; over memory and files that are mostly holes."""

import contextlib
import mmap
import os
import shutil

import pytest
import torch
from support.catalogue import inventory_of
from support.names import RUN, START, directory_of
from support.place import read_range
from support.slots import sparse_slot
from support.snapshots import lone_manifest

from lazysnap.capture.capture import Capture
from lazysnap.capture.copier import copy_eager
from lazysnap.capture.plan import make_plan
from lazysnap.errors import FormatError
from lazysnap.levels import open_store
from lazysnap.levels.blocks import FileBlocks, MemoryBlocks, VerifiedSource
from lazysnap.levels.files import open_direct, pwrite_all
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.source import map_anonymous
from lazysnap.restore.targets import check_fits
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums, block_ranges, digest
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.names import NodeName
from lazysnap.snapshots.assembly import Assembly
from lazysnap.snapshots.reader import OpenShard
from lazysnap.snapshots.reads import Reads
from lazysnap.snapshots.tensors import facts_of, into, room_for
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

GIB = 1 << 30
pytestmark = pytest.mark.slow
LARGE = 4 * GIB + 4096 * 11


def zeros(size_bytes, dtype):
    """A tensor over memory that nobody touches: the kernel has one page of zeros for all of it."""
    room = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(room, dtype=dtype)


class Large:
    """A model with 4 GiB in its widest dtype, so that everything else comes behind it in the image."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.model = torch.nn.Module()
        self.model.huge = torch.nn.Parameter(zeros(LARGE, torch.float64))
        self.model.register_buffer("small", torch.randn(1000, 3, generator=generator))
        self.model.register_buffer("turned", torch.randn(5, 7, generator=generator).t())
        self.model.register_buffer("bytes", torch.arange(200, dtype=torch.uint8))
        self.source = ObjectState({"model": self.model, "optimizer": torch.optim.SGD([self.model.huge], lr=0.1)})
        self.walked = walk(self.source.collect())
        self.plan = make_plan(self.walked, self.source)

    def meta(self):
        """Of a snapshot whose state is the small tensors alone."""
        state = {name: {"$": "tensor", "v": f"model.{name}"} for name in ("small", "turned", "bytes")}
        return CaptureMeta(RUN, START, 1, 0, 1, 0, state={"model": state})


@pytest.fixture(scope="module")
def large():
    return Large()


@pytest.fixture(scope="module")
def slot(large):
    """All but the 4 GiB of zeros captured; what nobody writes to takes no memory."""
    slot = sparse_slot(1 << 20, large.plan.layout.size_bytes)
    job = Capture(large.plan, slot, 1, large.walked.tensors, sequence=1)
    slot.begin(int(START, 16), 1, sequence=1, image_bytes=large.plan.layout.size_bytes, meta=b"{}")
    slot.image[: len(large.plan.layout.header)] = large.plan.layout.header
    copy_eager(job)
    return slot


def test_tensors_behind_4_gib_stand_where_the_header_says(large, slot):
    layout = Layout.parse(slot.image[: large.plan.layout.size_bytes], large.plan.layout.size_bytes)

    for name in ("small", "turned", "bytes"):
        spec, offset = layout.find(f"model.{name}")
        assert offset > 4 * GIB
        wanted = getattr(large.model, name).contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes(slot.image[offset : offset + spec.nbytes]) == wanted


def test_a_state_is_decoded_from_an_image_of_more_than_4_gib(large, slot):
    image = slot.image[: large.plan.layout.size_bytes]
    layout = Layout.parse(image, len(image), "slot")

    shard = OpenShard(0, large.meta(), layout, MemoryBlocks(image, None, "slot"))
    assembly = Assembly(0)
    found = assembly.add(shard)
    facts = {name: facts_of(stored) for name, stored in found.items()}
    check_fits(facts, large.source.expected(), "slot", casts=False)
    names = ("small", "turned", "bytes")
    assembly.request(f"model.{name}" for name in names)
    for name in names:
        reads, tensor = Reads(), assembly.tensor(f"model.{name}")
        reads.add(tensor, into(found := room_for(tensor)))
        reads.run()
        assert torch.equal(found, getattr(large.model, name)), name


@pytest.fixture(scope="module")
def snapshot(large, slot, tmp_path_factory):
    """The same as a file: its beginning and its end are written, directly, and all between is a hole."""
    root = tmp_path_factory.mktemp("large")
    size = large.plan.layout.size_bytes
    place = root / directory_of(1)
    place.mkdir()
    path = place / NodeName(0, 1).file
    path.touch()
    os.truncate(path, size)
    ends = (0, (4 * GIB) // BLOCK_BYTES * BLOCK_BYTES)
    hole = digest(bytes(BLOCK_BYTES))
    blocks = [hole] * len(list(block_ranges(size)))
    handle = open_direct(str(path), os.O_WRONLY)
    for start in ends:
        stop = min(start + BLOCK_BYTES, size)
        room = map_anonymous(BLOCK_BYTES)
        room[: stop - start] = slot.image[start:stop]
        blocks[start // BLOCK_BYTES] = digest(room[: stop - start])
        if handle >= 0:
            pwrite_all(handle, start, room[: -(-(stop - start) // 4096) * 4096])
        else:
            with path.open("r+b") as file:
                file.seek(start)
                file.write(room[: stop - start])
    if handle >= 0:
        os.close(handle)
    os.truncate(path, size)
    manifest = lone_manifest(
        large.meta(), len(large.plan.layout.header), Checksums(size, BLOCK_BYTES, tuple(blocks)), created_ns=1
    )
    (place / NodeName(0, 1).manifest).write_bytes(manifest.encode())
    assert path.stat().st_blocks * 512 < GIB, "the test would fill the disk"
    yield root
    shutil.rmtree(root)


def test_ranges_behind_4_gib_are_read_and_compared(large, slot, snapshot):
    store = open_store(str(snapshot))
    [entry] = inventory_of(store).entries
    manifest = store.read_manifest(entry)
    layout = large.plan.layout

    with contextlib.closing(FileBlocks(store.place(entry), manifest)) as blocks:
        reader = VerifiedSource(blocks)
        for name in ("small", "turned", "bytes"):
            spec, offset = layout.find(f"model.{name}")
            assert reader.view(offset, spec.nbytes) == slot.image[offset : offset + spec.nbytes]
        # Over the edge itself, more than one block.
        edge = 4 * GIB - BLOCK_BYTES - 5
        assert reader.view(edge, BLOCK_BYTES + 10) == slot.image[edge : edge + BLOCK_BYTES + 10]


def test_a_flipped_byte_behind_4_gib_is_found_when_all_is_read(snapshot):
    store = open_store(str(snapshot))
    [entry] = inventory_of(store).entries
    with open(snapshot / store.place(entry).file_path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
        file.flush()
        try:
            # All blocks before it are as they should be.
            with pytest.raises(FormatError, match=rf"block {4 * GIB // BLOCK_BYTES} \(bytes {4 * GIB} to"):
                store.verify(store.place(entry))
        finally:
            file.seek(-1, os.SEEK_END)
            file.write(byte)


def test_a_block_is_written_and_read_behind_4_gib_of_a_file(tmp_path):
    """As the keeper does, but into a file that is only as long as it says."""
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, LARGE)
    room = map_anonymous(4096 * 3)
    room[:] = os.urandom(len(room))
    handle = open_direct(str(path), os.O_WRONLY)
    if handle < 0:
        pytest.skip("no direct writes here")
    pwrite_all(handle, 4 * GIB, room)
    os.close(handle)

    found = map_anonymous(4096 * 3 + 7)
    storage = LocalStorage(str(tmp_path))
    read_range(storage, "file", 4 * GIB, found[: 4096 * 3])
    read_range(storage, "file", 4 * GIB - 1, found[:7])

    assert found[1:7] == room[:6]
    assert found[7 : 4096 * 3] == room[7:]
