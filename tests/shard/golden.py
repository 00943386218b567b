"""The objects that the golden bytes of the format hold: one snapshot."""

import contextlib
import pathlib
from collections.abc import Iterator

import torch
from support.snapshots import lone_manifest

from lazysnap.capture.dtypes import stored_form
from lazysnap.capture.plan import CapturePlan, make_plan, view_of
from lazysnap.exports.states import read_state
from lazysnap.levels.store import open_storage
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import PAGE
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.names import NodeName, SnapshotName
from lazysnap.snapshots.assembly import WholeSnapshot
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import open_snapshot
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import Walk, walk

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "v1"
BLOCK_BYTES = 4096
RUN, START, STEP = "0123456789abcdef", "00000000deadbeef", 1000
DIRECTORY = SnapshotName(RUN, STEP, START).directory
SHARD_PATH = FOLDER / DIRECTORY / NodeName(0, 1).file
MANIFEST_PATH = FOLDER / DIRECTORY / NodeName(0, 1).manifest


class Base(torch.nn.Module):
    """Tied weights, a dtype that a shard has no name for, and one parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4), requires_grad=False)
        self.tied = self.weight
        self.wide = torch.nn.Parameter(torch.tensor([1 + 2j, -3.5j], dtype=torch.complex128), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.tensor([[0.5, -0.25]]))


def values() -> dict:
    """The state beside the model."""
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
    picture = torch.arange(36.0).reshape(2, 3, 3, 2)
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
        "orders": {
            "kernel": picture.to(memory_format=torch.channels_last),
            "rows": torch.arange(6.0).reshape(2, 3),
            "bases": [torch.arange(6.0).reshape(2, 3).T, torch.arange(4.0).reshape(2, 2).T.to(torch.complex128)],
            "every second": torch.arange(8.0).reshape(2, 4)[:, ::2],
            "narrow": torch.arange(4.0).reshape(4, 1, 1).permute(2, 0, 1),
        },
        "small": {"none": None, "flag": True, "text": "Grüße", "big": 2**70, "infinite": float("inf"), "pair": (1, 2)},
    }


class GoldenState(ObjectState):
    """Without random numbers: they differ at every start."""

    def collect(self) -> dict:
        return {"model": super().collect()["model"], **values()}


def make() -> dict[str, bytes]:
    """The two files as this version writes them, by path."""
    source = GoldenState({"model": Base()})
    walked = walk(source.collect())
    plan = make_plan(walked, source)
    image = _image_of(plan, walked)
    run = {"run_id": RUN, "start": START, "rank": 0, "world_size": 1}
    meta = CaptureMeta(
        **run,
        step=STEP,
        captured_ns=1_700_000_001_000_000_000,
        tensors=plan.logical,
        aliases=plan.aliases,
        state=walked.skeleton,
        packages={"lazysnap": "0.1.0"},
        parameters={"optimizer": ["adapter"]},
    )
    return _files(image, meta, Checksums.of(memoryview(image), BLOCK_BYTES))


def _image_of(plan: CapturePlan, walked: Walk) -> bytearray:
    """The bytes of a file of tensors."""
    image = bytearray(-(-plan.layout.size_bytes // PAGE) * PAGE)
    image[: len(plan.layout.header)] = plan.layout.header
    for index in plan.order:
        record = plan.records[index]
        if record.nbytes:
            place = (record.offset, record.stored_dtype, record.stored_shape)
            view_of(memoryview(image), *place).copy_(stored_form(walked.tensors[index]))
    del image[plan.layout.size_bytes :]
    return image


def _files(data: bytearray, meta: CaptureMeta, checksums: Checksums) -> dict[str, bytes]:
    """A file of tensors and its manifest, by path."""
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    manifest = lone_manifest(meta, header_bytes, checksums, 1_700_000_002_000_000_000)
    return {
        f"{DIRECTORY}/{NodeName(0, 1).file}": bytes(data),
        f"{DIRECTORY}/{NodeName(0, 1).manifest}": manifest.encode(),
    }


@contextlib.contextmanager
def opened() -> Iterator[WholeSnapshot]:
    """The golden snapshot."""
    catalogue = Catalogue(open_storage(str(FOLDER)))
    [plan] = catalogue.plans()
    assert catalogue.problems == []
    with contextlib.closing(open_snapshot(catalogue, plan)) as snapshot:
        yield WholeSnapshot(snapshot)


def read_back(whole: WholeSnapshot) -> dict:
    """Its state."""
    return read_state(whole, lambda state: state)
