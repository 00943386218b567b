"""The objects that the golden bytes of format version 1 hold. Never edited: a new version gets new ones."""

import pathlib

import torch

from lazysnap.capture.plan import make_plan, view_of
from lazysnap.levels.local import PAGE
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.manifest import CaptureMeta, Manifest, directory_name, manifest_name, shard_name
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
