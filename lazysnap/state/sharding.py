"""What of a tensor this rank holds: DTensors as their local shard, replicated tensors as this rank's share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lazysnap.errors import UnsupportedState
from lazysnap.shard.pieces import volume
from lazysnap.topology import replica_owner


@dataclass(frozen=True)
class Held:
    """One rank's part of a tensor."""

    local: torch.Tensor
    """A plain tensor that shares its memory with the live one."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where ``local`` begins in the whole."""
    captured_here: bool = True
    """Whether this rank captures it; otherwise another one that holds the same does."""


def held_part(tensor: torch.Tensor, name: str) -> Held | None:
    """This rank's part of a DTensor, ``None`` for a plain tensor. No communication.

    Raises: UnsupportedState, for a DTensor with pending reductions.
    """
    if not isinstance(tensor, DTensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedState(f"{name}: a DTensor with partial values cannot be captured; reduce it before")
    mesh = tensor.device_mesh
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Held(tensor.to_local().detach(), tuple(tensor.shape), (0,) * tensor.dim(), captured_here=False)
    local = tensor.to_local().detach()
    if tuple(local.shape) != tuple(shape):
        raise UnsupportedState(f"{name}: its local shard is {list(local.shape)}, its placements say {list(shape)}")
    return Held(local, tuple(tensor.shape), tuple(offsets), _is_owner(name, tensor, coordinate))


def _is_owner(name: str, tensor: DTensor, coordinate: Sequence[int]) -> bool:
    return tuple(coordinate) == _owner(name, tensor, coordinate)


def _owner(name: str, tensor: DTensor, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Along replicated mesh dimensions exactly one rank captures: a pure function of the name. Where it sits."""
    mesh = tensor.device_mesh
    replicated = [dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    number = replica_owner(name, volume([mesh.size(dim) for dim in replicated]))
    found = list(coordinate)
    for dim in reversed(replicated):
        number, found[dim] = divmod(number, mesh.size(dim))
    return tuple(found)


def owner_of(target: Any, name: str) -> int | None:
    """The rank that captures what this one holds of a DTensor called ``name``; ``None`` for others, or outside."""
    coordinate = target.device_mesh.get_coordinate() if isinstance(target, DTensor) else None
    if coordinate is None:
        return None
    return int(target.device_mesh.mesh[_owner(name, target, coordinate)])


def like(target: DTensor, local: torch.Tensor) -> DTensor:
    """``local`` as this rank's shard of a DTensor that is placed as ``target`` is."""
    return DTensor.from_local(
        local,
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def box_of(target: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and shape of the part of a live tensor that this rank has to fill."""
    held = held_part(target, "") if isinstance(target, DTensor) else None
    if held is None:
        return (0,) * target.dim(), tuple(target.shape)
    return held.offsets, tuple(held.local.shape)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor in this rank's memory. Hot: no autograd, no collective."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor
