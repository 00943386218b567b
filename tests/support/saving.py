"""Snapshots of several ranks, written as the format says, from states that are given."""

import time
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from lazysnap.capture.dtypes import DTYPE_NAMES, logical_name, stored_form
from lazysnap.capture.plan import view_of
from lazysnap.levels.source import MemorySource, map_anonymous
from lazysnap.levels.store import open_storage
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.names import SnapshotName
from lazysnap.state.walk import walk
from support.image import write_shard
from support.snapshots import lone_manifest

RUN = "1" * 16
OTHER = "2" * 16
STARTED = "a" * 16


def directory_of(step: int, run: str = RUN) -> str:
    return SnapshotName(run, step, STARTED).directory


@dataclass(frozen=True)
class Snapshot:
    """What all shards of one have in common."""

    url: str
    world: int
    step: int = 10
    run: str = RUN
    start: str = STARTED
    parameters: dict | None = None
    block_bytes: int | None = None
    """None: written by the store, with its own size."""

    @property
    def directory(self) -> str:
        return SnapshotName(self.run, self.step, self.start).directory

    def meta(self, rank, **facts):
        return CaptureMeta(
            self.run,
            self.start,
            self.step,
            rank,
            self.world,
            3,
            parameters=self.parameters,
            **facts,
        )


def image_of(tensors: dict, aliases=None) -> tuple[Layout, memoryview]:
    """Header and bytes of tensors by name."""
    stored = {name: stored_form(tensor.detach()).contiguous() for name, tensor in tensors.items()}
    layout = Layout.plan(
        [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in stored.items()], aliases
    )
    room = map_anonymous(-(-layout.size_bytes // 4096) * 4096)
    room[: len(layout.header)] = layout.header
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        tensor = stored[spec.name]
        view_of(room, offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
    return layout, room


def write(snapshot: Snapshot, rank: int, boxes: dict, state, aliases=None) -> Manifest:
    """One rank's shard. ``boxes``: by name the tensor, and ``(global shape, offsets, scope)`` or None."""
    storage = open_storage(snapshot.url)
    facts = {name: _facts(tensor, place) for name, (tensor, place) in boxes.items()}
    facts = {name: fields for name, fields in facts.items() if fields}
    meta = snapshot.meta(rank, tensors=facts, aliases=aliases or {}, state=state)
    layout, room = image_of({name: tensor for name, (tensor, _) in boxes.items()}, aliases)
    if snapshot.block_bytes is None:
        return write_shard(storage, meta, MemorySource(room, layout.size_bytes))
    image = room[: layout.size_bytes]
    checksums = Checksums.of(image, snapshot.block_bytes)
    manifest = lone_manifest(meta, len(layout.header), checksums, time.time_ns())
    storage.put(f"{snapshot.directory}/{manifest.name.file}", bytes(image))
    storage.put(f"{snapshot.directory}/{manifest.name.manifest}", manifest.encode())
    return manifest


def _facts(tensor, place):
    kept = logical_name(tensor.dtype)
    facts = {} if kept is None else {"dtype": kept}
    if place is not None:
        shape, offsets, scope = place
        facts |= {"scope": scope, "global_shape": list(shape), "offsets": list(offsets)}
    return facts


def write_all(snapshot: Snapshot, state, cut, aliases=None) -> list[Manifest]:
    """A snapshot of ``world`` ranks from one whole state. ``cut(name, tensor, rank)``: offsets and box, or None."""
    walked = walk(state)
    manifests = []
    for rank in range(snapshot.world):
        boxes = {}
        for name, tensor in zip(walked.names, walked.tensors, strict=True):
            assert not isinstance(tensor, DTensor)
            found = cut(name, tensor, rank)
            if found is not None:
                offsets, box = found
                boxes[name] = (box, None if offsets is None else (tensor.shape, offsets, "shard"))
        manifests.append(write(snapshot, rank, boxes, walked.skeleton, aliases))
    return manifests


def put(url: str, step: int, state: dict) -> None:
    """Write a snapshot of one rank; tied tensors are stored once."""
    walked = walk(state)
    boxes, aliases, seen = {}, {}, {}
    for name, tensor in zip(walked.names, walked.tensors, strict=True):
        owner = seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.dtype), name) if tensor.numel() else name
        if owner == name:
            boxes[name] = (tensor.detach(), None)
        else:
            aliases[name] = owner
    write(Snapshot(url, 1, step=step), 0, boxes, walked.skeleton, aliases)


def rows(world):
    """Cuts the first dimension as FSDP2 does; empty parts are not stored, tensors without dimensions are rank 0's."""

    def cut(name, tensor, rank):
        if not tensor.dim() or not tensor.numel():
            return (tuple([0] * tensor.dim()), tensor) if rank == 0 else None
        height = -(-tensor.shape[0] // world)
        part = tensor[rank * height : (rank + 1) * height]
        return ((rank * height, *[0] * (tensor.dim() - 1)), part) if len(part) else None

    return cut


def bits(tensor: torch.Tensor) -> tuple:
    """Everything that must be equal."""
    tensor = tensor.detach().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), data
