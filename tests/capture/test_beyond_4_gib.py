"""Offsets beyond 4 GiB: in a slot, in an image that is decoded, in a file. Memory and files are mostly holes."""

import fcntl
import mmap
import os

import pytest
import torch
from support.names import RUN, START
from support.place import read_range

from lazysnap.capture.capture import Capture
from lazysnap.capture.copier import copy_eager
from lazysnap.capture.plan import make_plan
from lazysnap.levels.blocks import MemoryBlocks
from lazysnap.levels.files import open_direct, pwrite_all
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.source import map_anonymous
from lazysnap.memory.slots import TrainerSlot, make_slot
from lazysnap.memory.words import SEALS, word_bytes
from lazysnap.restore.targets import check_fits
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.assembly import Assembly
from lazysnap.snapshots.reader import OpenShard
from lazysnap.snapshots.reads import Reads
from lazysnap.snapshots.tensors import facts_of, into, room_for
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

EDGE = 4 << 30
LARGE = EDGE + 4096 * 11
PAGE = 4096
SMALL_NAMES = ("small", "turned", "bytes")


def sparse_slot(image_bytes):
    """A slot in which only those pages take memory that are written to."""
    allocated = make_slot(PAGE, PAGE)
    magic, slot_id, meta_bytes, _ = memoryview(os.pread(allocated.descriptor, 32, 0)).cast("Q")
    allocated.close()
    image_capacity_bytes = -(-image_bytes // PAGE) * PAGE
    descriptor = os.memfd_create("lazysnap-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE + meta_bytes + image_capacity_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    os.pwrite(descriptor, word_bytes(magic, slot_id, meta_bytes, image_capacity_bytes), 0)
    return TrainerSlot.attach(descriptor)


class Large:
    """A model with 4 GiB in its widest dtype, so that everything else comes behind it, and its capture."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        # Nobody touches this memory: the kernel has one page of zeros for all of it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        zeros = mmap.mmap(-1, LARGE, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.model = torch.nn.Module()
        self.model.huge = torch.nn.Parameter(torch.frombuffer(zeros, dtype=torch.float64))
        self.model.register_buffer("small", torch.randn(1000, 3, generator=generator))
        self.model.register_buffer("turned", torch.randn(5, 7, generator=generator).t())
        self.model.register_buffer("bytes", torch.arange(200, dtype=torch.uint8))
        self.source = ObjectState({"model": self.model, "optimizer": torch.optim.SGD([self.model.huge], lr=0.1)})
        walked = walk(self.source.collect())
        plan = make_plan(walked, self.source)
        self.size_bytes = plan.layout.size_bytes
        self.slot = sparse_slot(self.size_bytes)
        capture = Capture(plan, self.slot, 1, walked.tensors, sequence=1)
        self.slot.begin(int(START, 16), 1, sequence=1, image_bytes=self.size_bytes, meta=b"{}")
        self.slot.image[: len(plan.layout.header)] = plan.layout.header
        copy_eager(capture)  # all but the 4 GiB of zeros

    @property
    def image(self):
        return self.slot.image[: self.size_bytes]


@pytest.fixture(scope="module")
def large():
    large = Large()
    yield large
    large.slot.close()


def test_tensors_beyond_4_gib_are_captured_where_the_header_says(large):
    layout = Layout.parse(large.image, large.size_bytes)
    for name in SMALL_NAMES:
        spec, offset = layout.find(f"model.{name}")
        assert offset > EDGE
        expected = getattr(large.model, name).contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes(large.slot.read(offset, spec.nbytes)[: spec.nbytes]) == expected


def test_tensors_beyond_4_gib_of_an_image_are_decoded(large):
    state = {name: {"$": "tensor", "v": f"model.{name}"} for name in SMALL_NAMES}
    meta = CaptureMeta(RUN, START, 1, 0, 1, 0, state={"model": state})
    layout = Layout.parse(large.image, large.size_bytes, "slot")
    assembly = Assembly(0)
    stored = assembly.add(OpenShard(meta, layout, MemoryBlocks(large.image, None, "slot")))
    facts = {name: facts_of(part) for name, part in stored.items()}
    check_fits(facts, large.source.expected(), "slot", casts=False, resizable=())
    assembly.request(f"model.{name}" for name in SMALL_NAMES)
    for name in SMALL_NAMES:
        tensor = assembly.tensor(f"model.{name}")
        decoded = room_for(tensor)
        reads = Reads()
        reads.add(tensor, into(decoded))
        reads.run()
        assert torch.equal(decoded, getattr(large.model, name)), name


def test_a_block_beyond_4_gib_of_a_file_is_written_and_read(tmp_path):
    """As the keeper does, but into a file that is only as long as it says."""
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, LARGE)
    block = map_anonymous(3 * PAGE)
    block[:] = os.urandom(len(block))
    handle = open_direct(str(path), os.O_WRONLY)
    if handle < 0:
        pytest.skip("no direct writes here")
    pwrite_all(handle, EDGE, block)
    os.close(handle)

    storage = LocalStorage(str(tmp_path))
    whole = map_anonymous(3 * PAGE)
    read_range(storage, "file", EDGE, whole)
    over_the_edge = map_anonymous(7)
    read_range(storage, "file", EDGE - 1, over_the_edge)

    assert whole == block
    assert bytes(over_the_edge) == b"\0" + bytes(block[:6])
