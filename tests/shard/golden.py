"""The objects that the golden bytes of each format version hold. Never edited: a new version gets new ones."""

import contextlib
import pathlib
from collections.abc import Iterator

import torch

from lazysnap.capture.frozen import choose_frozen
from lazysnap.capture.plan import make_plan, view_of
from lazysnap.config import PersistentLevel
from lazysnap.engine.assembly import Assembly, OpenShard
from lazysnap.engine.reading import LevelReader
from lazysnap.keeper.node_source import NodeSource
from lazysnap.levels import open_store
from lazysnap.levels.local import PAGE
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.manifest import (
    CaptureMeta,
    FrozenReference,
    Manifest,
    directory_name,
    frozen_directory_name,
    manifest_name,
    shard_name,
)
from lazysnap.shard.stem import Stem
from lazysnap.state.codec import tensor_names
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "v1"
BLOCK_BYTES = 4096


def state() -> dict:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
    return {
        "state_dict": {
            "net.weight": weight,
            "head.weight": weight,
            "half": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
            "count": torch.tensor(7),
            "mask": torch.tensor([True, False, True]),
            "empty": torch.empty(0, 5),
            "double_complex": torch.tensor([1 + 2j, -3.5j], dtype=torch.complex128),
        },
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight * 2}}, "lr": 1e-3}],
        "small": {"none": None, "flag": True, "text": "Grüße", "big": 2**70, "infinite": float("inf"), "pair": (1, 2)},
    }


def make() -> tuple[bytes, bytes]:
    """Shard and manifest as this version writes them."""
    walked = walk(state())
    plan = make_plan(walked, ObjectState({}))
    image = bytearray(-(-plan.layout.size_bytes // PAGE) * PAGE)
    image[: len(plan.layout.header)] = plan.layout.header
    for index in plan.order:
        record, tensor = plan.records[index], walked.tensors[index]
        if record.nbytes:
            view_of(memoryview(image), record.offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
    del image[plan.layout.size_bytes :]
    meta = CaptureMeta(
        run_id="0123456789abcdef",
        run_started_ns=1_700_000_000_000_000_000,
        step=1000,
        rank=0,
        world_size=1,
        captured_ns=1_700_000_001_000_000_000,
        tensors=plan.logical,
        aliases=plan.aliases,
        state=walked.skeleton,
        packages={"lazysnap": "0.1.0"},
    )
    checksums = Checksums.of(memoryview(image), BLOCK_BYTES)
    manifest = Manifest(meta, shard_name(0, 1), len(plan.layout.header), checksums, 1_700_000_002_000_000_000)
    return bytes(image), manifest.encode()


def shard_path() -> pathlib.Path:
    return FOLDER / directory_name(1000) / shard_name(0, 1)


def manifest_path() -> pathlib.Path:
    return FOLDER / directory_name(1000) / manifest_name(0, 1)


# ---------------------------------------------------------------- version 2: immutable tensors in a file of their own

FOLDER_2 = pathlib.Path(__file__).parents[1] / "golden" / "v2"


class Base(torch.nn.Module):
    """Tied weights, a dtype that a shard has no name for, and one parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4), requires_grad=False)
        self.tied = self.weight
        self.wide = torch.nn.Parameter(torch.tensor([1 + 2j, -3.5j], dtype=torch.complex128), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.tensor([[0.5, -0.25]]))


class State2(ObjectState):
    """Without random numbers: they differ at every start."""

    def collect(self) -> dict:
        return {name: value for name, value in super().collect().items() if name != "rng"} | {"step": 7}


def make_2() -> dict[str, bytes]:
    """The four files as this version writes them, by path."""
    source = State2({"model": Base()})
    walked = walk(source.collect())
    frozen = choose_frozen(zip(walked.names, walked.tensors, strict=True), source, least_bytes=1)
    assert frozen is not None
    plan = make_plan(walked, source, frozen)
    base = bytearray(frozen.size_bytes)
    frozen.copy_into(memoryview(base), lambda: None)
    image = bytearray(-(-plan.layout.size_bytes // PAGE) * PAGE)
    image[: len(plan.layout.header)] = plan.layout.header
    for index in plan.order:
        record = plan.records[index]
        view_of(memoryview(image), record.offset, record.stored_dtype, record.stored_shape).copy_(walked.tensors[index])
    del image[plan.layout.size_bytes :]
    run = {"run_id": "0123456789abcdef", "run_started_ns": 1_700_000_000_000_000_000, "rank": 0, "world_size": 1}
    of_base = CaptureMeta(
        **run, step=0, captured_ns=1_700_000_000_500_000_000, tensors=frozen.logical, aliases=frozen.aliases
    )
    meta = CaptureMeta(
        **run,
        step=2000,
        captured_ns=1_700_000_001_000_000_000,
        tensors=plan.logical,
        aliases=plan.aliases,
        state=walked.skeleton,
        packages={"lazysnap": "0.2.0"},
        frozen=FrozenReference(Checksums.of(memoryview(base)).whole, len(base)),
    )
    files = {}
    for folder, data, one in (
        (frozen_directory_name(run["run_id"], meta.frozen.digest), base, of_base),
        (directory_name(2000), image, meta),
    ):
        header_bytes = 8 + int.from_bytes(data[:8], "little")
        checksums = Checksums.of(memoryview(data))
        manifest = Manifest(one, shard_name(0, 1), header_bytes, checksums, 1_700_000_002_000_000_000)
        files[f"{folder}/{shard_name(0, 1)}"] = bytes(data)
        files[f"{folder}/{manifest_name(0, 1)}"] = manifest.encode()
    return files


@contextlib.contextmanager
def opened(folder: pathlib.Path) -> Iterator[list[OpenShard]]:
    """The shard of the one snapshot in a folder, and the immutable tensors beside it."""
    inventory = open_store(str(folder)).inventory()
    assert inventory.problems == ()
    reader = LevelReader(PersistentLevel(str(folder)), 1)
    with contextlib.ExitStack() as stack:
        shards = [reader.open(entry, "golden", stack) for entry in inventory.entries]
        yield [*shards, *(reader.open_frozen(image, "golden", stack) for image in inventory.frozen)]


def assembled(*shards: OpenShard) -> Assembly:
    """Ready to be read."""
    made = Assembly(shards[0].rank, lambda name, shape: ((0,) * len(shape), shape))
    for shard in shards:
        made.add(shard)
    made.want(tensor_names(shards[0].meta.state))
    return made


# ---------------------------------------------------------------- version 3: all ranks of a node in one file

FOLDER_3 = pathlib.Path(__file__).parents[1] / "golden" / "v3"
STEM_3 = Stem.of_node(1, 2)


class Held:
    """One rank's shard that is whole."""

    def __init__(self, meta: CaptureMeta, image: bytes) -> None:
        self.meta, self.size_bytes, self._image = meta, len(image), memoryview(image)

    def wait(self, upto: int) -> None:
        assert upto <= self.size_bytes

    def view(self, offset: int, length: int) -> memoryview:
        assert offset + length <= self.size_bytes
        return self._image[offset : offset + length]

    def finish(self) -> None:
        pass


def state_3(rank: int) -> dict:
    """Ends on a page boundary for no rank; ties, other dtypes, and a tensor without bytes at the end."""
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3) + rank
    return {
        "net": {"weight": weight, "tied": weight, "half": torch.tensor([1.5, rank], dtype=torch.bfloat16)},
        "wide": torch.tensor([1 + 2j, rank - 3.5j], dtype=torch.complex128),
        "mask": torch.tensor([True, rank == 2, True]),
        "none": torch.empty(0, 5, dtype=torch.bool),
        "loop": {"rank": rank, "text": "Grüße"},
    }


def held_3(rank: int) -> Held:
    """The shard of one of the ranks 2, 3 and 4 of 5."""
    walked = walk(state_3(rank))
    plan = make_plan(walked, ObjectState({}))
    image = bytearray(-(-plan.layout.size_bytes // PAGE) * PAGE)
    image[: len(plan.layout.header)] = plan.layout.header
    for index in plan.order:
        record = plan.records[index]
        if record.nbytes:
            target = view_of(memoryview(image), record.offset, record.stored_dtype, record.stored_shape)
            target.copy_(torch.view_as_real(t) if (t := walked.tensors[index]).is_complex() else t)
    meta = CaptureMeta(
        run_id="0123456789abcdef",
        run_started_ns=1_700_000_000_000_000_000,
        step=3000,
        rank=rank,
        world_size=5,
        captured_ns=1_700_000_001_000_000_000 + rank,
        tensors=plan.logical,
        aliases=plan.aliases,
        state=walked.skeleton,
        packages={"lazysnap": "0.3.0"},
        generation="00000000deadbeef",
        parameters={"optimizer": ["net.weight"]} if rank == 2 else None,
    )
    return Held(meta, bytes(image[: plan.layout.size_bytes]))


def make_3() -> dict[str, bytes]:
    """The two files as this version writes them, by path."""
    parts = [held_3(rank) for rank in (2, 3, 4)]
    source = NodeSource(parts)
    data = bytes(source.view(0, -(-source.size_bytes // PAGE) * PAGE)[: source.size_bytes])
    checksums = Checksums.of(memoryview(data), BLOCK_BYTES)
    metas = tuple(part.meta for part in parts)
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    manifest = Manifest(metas[0], STEM_3.shard, header_bytes, checksums, 1_700_000_002_000_000_000, metas)
    folder = directory_name(3000)
    return {f"{folder}/{STEM_3.shard}": data, f"{folder}/{STEM_3.manifest}": manifest.encode()}
