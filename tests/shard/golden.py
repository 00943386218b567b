"""The objects that the golden bytes of each format version hold. Never edited: a new version gets new ones."""

import contextlib
import pathlib
from collections.abc import Iterator

import torch
from support.snapshots import lone_manifest

from lazysnap.capture.dtypes import stored_form
from lazysnap.capture.frozen import FrozenSet, digest_of, frozen_parameters
from lazysnap.capture.plan import make_plan, view_of
from lazysnap.exports.states import read_state
from lazysnap.levels import open_store
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import PAGE
from lazysnap.shard.manifest import CaptureMeta, FrozenReference
from lazysnap.shard.names import NodeName, SnapshotName, frozen_directory_name
from lazysnap.snapshots.assembly import WholeSnapshot
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import open_snapshot
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "v1"
BLOCK_BYTES = 4096
RUN, START = "0123456789abcdef", "00000000deadbeef"


def directory_name(step: int) -> str:
    return SnapshotName(RUN, step, START).directory


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
    return made(state(), 1000)


def made(values: dict, step: int) -> tuple[bytes, bytes]:
    """Shard and manifest of these values."""
    walked = walk(values)
    plan = make_plan(walked, ObjectState({}))
    image = bytearray(-(-plan.layout.size_bytes // PAGE) * PAGE)
    image[: len(plan.layout.header)] = plan.layout.header
    for index in plan.order:
        record, tensor = plan.records[index], walked.tensors[index]
        if record.nbytes:
            place = (record.offset, record.stored_dtype, record.stored_shape)
            view_of(memoryview(image), *place).copy_(stored_form(tensor))
    del image[plan.layout.size_bytes :]
    meta = CaptureMeta(
        run_id="0123456789abcdef",
        start=START,
        step=step,
        rank=0,
        world_size=1,
        captured_ns=1_700_000_001_000_000_000,
        tensors=plan.logical,
        aliases=plan.aliases,
        state=walked.skeleton,
        packages={"lazysnap": "0.1.0"},
    )
    checksums = Checksums.of(memoryview(image), BLOCK_BYTES)
    manifest = lone_manifest(meta, len(plan.layout.header), checksums, 1_700_000_002_000_000_000)
    return bytes(image), manifest.encode()


def file_path() -> pathlib.Path:
    return FOLDER / directory_name(1000) / NodeName(0, 1).file


def manifest_path() -> pathlib.Path:
    return FOLDER / directory_name(1000) / NodeName(0, 1).manifest


# ---------------------------------------------------------------- tensors that are not row-major

ORDER_FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "v1-order"


def ordered_state() -> dict:
    picture = torch.arange(36.0).reshape(2, 3, 3, 2)
    return {
        "model": {"kernel": picture.to(memory_format=torch.channels_last), "rows": torch.arange(6.0).reshape(2, 3)},
        "bases": [torch.arange(6.0).reshape(2, 3).T, torch.arange(4.0).reshape(2, 2).T.to(torch.complex128)],
        "every second": torch.arange(8.0).reshape(2, 4)[:, ::2],
        "narrow": torch.arange(4.0).reshape(4, 1, 1).permute(2, 0, 1),
    }


# ---------------------------------------------------------------- frozen tensors in a file of their own

FROZEN_FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "v1-frozen"


class Base(torch.nn.Module):
    """Tied weights, a dtype that a shard has no name for, and one parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4), requires_grad=False)
        self.tied = self.weight
        self.wide = torch.nn.Parameter(torch.tensor([1 + 2j, -3.5j], dtype=torch.complex128), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.tensor([[0.5, -0.25]]))


class StateOfBase(ObjectState):
    """Without random numbers: they differ at every start."""

    def collect(self) -> dict:
        state = super().collect()
        return {name: state[name] for name in state if name not in ("rng", "lazysnap")} | {"step": 7}


def make_frozen() -> dict[str, bytes]:
    """The four files as this version writes them, by path."""
    source = StateOfBase({"model": Base()})
    walked = walk(source.collect())
    named = list(zip(walked.names, walked.tensors, strict=True))
    frozen = FrozenSet.of(frozen_parameters(named, source, least_bytes=1), named)
    assert frozen is not None
    plan = make_plan(walked, source, frozen)
    base = bytearray(frozen.size_bytes)
    digest_of(frozen.copied_into(memoryview(base)), lambda: None)
    image = bytearray(-(-plan.layout.size_bytes // PAGE) * PAGE)
    image[: len(plan.layout.header)] = plan.layout.header
    for index in plan.order:
        record = plan.records[index]
        view_of(memoryview(image), record.offset, record.stored_dtype, record.stored_shape).copy_(walked.tensors[index])
    del image[plan.layout.size_bytes :]
    run = {"run_id": "0123456789abcdef", "start": START, "rank": 0, "world_size": 1}
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
        parameters={"optimizer": ["adapter"]},
    )
    files = {}
    for folder, data, one in (
        (frozen_directory_name(meta.frozen.digest), base, of_base),
        (directory_name(2000), image, meta),
    ):
        header_bytes = 8 + int.from_bytes(data[:8], "little")
        checksums = Checksums.of(memoryview(data))
        manifest = lone_manifest(one, header_bytes, checksums, 1_700_000_002_000_000_000)
        files[f"{folder}/{NodeName(0, 1).file}"] = bytes(data)
        files[f"{folder}/{NodeName(0, 1).manifest}"] = manifest.encode()
    return files


@contextlib.contextmanager
def opened(folder: pathlib.Path) -> Iterator[WholeSnapshot]:
    """The one snapshot in a folder."""
    catalogue = Catalogue(open_store(str(folder)))
    [plan] = catalogue.plans()
    assert catalogue.problems == []
    with contextlib.closing(open_snapshot(catalogue, plan, verify=True)) as snapshot:
        yield WholeSnapshot(snapshot)


def read_back(whole: WholeSnapshot) -> dict:
    """Its state."""
    return read_state(whole, lambda state: state)
