"""The part of a DTensor that this rank holds, and the ranks that hold the same part."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lazysnap.errors import StateError


@dataclass(frozen=True)
class HeldPart:
    """One rank's part of a tensor."""

    local: torch.Tensor
    """A plain tensor that shares its memory with the live one."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """The offsets of ``local`` in the global tensor."""
    replicas: tuple[int, ...]
    """The ranks that hold the same part, this one included, in order; empty outside the mesh."""


def held_part(tensor: torch.Tensor, name: str) -> HeldPart | None:
    """Return this rank's part of a DTensor, ``None`` for a plain tensor. No communication.

    Raises: StateError, for a DTensor with pending reductions.
    """
    if not isinstance(tensor, DTensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise StateError(f"{name}: a DTensor with partial values cannot be captured; reduce it before")
    mesh = tensor.device_mesh
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    local = tensor.to_local().detach()
    if mesh.get_coordinate() is None:
        return HeldPart(local, tuple(tensor.shape), (0,) * tensor.dim(), ())
    if tuple(local.shape) != tuple(shape):
        raise StateError(f"{name}: its local shard is {list(local.shape)}, its placements say {list(shape)}")
    return HeldPart(local, tuple(tensor.shape), tuple(offsets), replicas_of(tensor))


def replicas_of(tensor: DTensor) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a DTensor as this one, in order: they differ only along replicated
    mesh dimensions. Empty outside the mesh.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    index: list[Any] = []
    for placement, position in zip(tensor.placements, coordinate, strict=True):
        if isinstance(placement, Replicate):
            index.append(slice(None))
        else:
            index.append(position)
    return tuple(sorted(tensor.device_mesh.mesh[tuple(index)].flatten().tolist()))


def like(target: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the placements of ``target``, and ``local`` as this rank's shard."""
    return DTensor.from_local(
        local, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def box_of(target: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and shape of the part of a live tensor that this rank must fill."""
    part = held_part(target, "")
    assert part is not None
    return part.offsets, tuple(part.local.shape)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor in this rank's memory. Called at each step: no autograd, no collective."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    return tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """True if a plain tensor, or one of a subclass, has values at an address, or is empty."""
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        return False
