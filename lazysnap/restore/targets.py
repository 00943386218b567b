"""The live tensors that a restart fills, and the part of a snapshot that each of them takes."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from lazysnap.console import some_of
from lazysnap.errors import StateError
from lazysnap.shard.pieces import Extent
from lazysnap.snapshots.assembly import JoinedTensor
from lazysnap.snapshots.tensors import Facts, room_for
from lazysnap.state.modules import check_loadable, is_uninitialised, saved_names
from lazysnap.state.sharding import box_of, local_of
from lazysnap.state.source import StateSource

Target = Callable[[str], "torch.Tensor | None"]

_SHOWN = 5
"""Tensors that an error names."""


def room_on_device(tensor: JoinedTensor, target: "torch.Tensor | None") -> torch.Tensor:
    """Return the place where a tensor is put together: on the device of the live one that it is to fill, so that copies
    to the device overlap with reading and comparing.

    The optimizer keeps the tensors of its state. Parameters are copied: until the restart is over the device holds two
    of each, as much as their gradients will take. Where it has no room, and for scalars (``step`` of most optimizers
    stays on the CPU), it is host memory. Raises: FormatError.
    """
    if target is not None and tensor.box[1] and not is_uninitialised(target) and tuple(target.shape) == tensor.shape:
        with contextlib.suppress(torch.OutOfMemoryError):
            return room_for(tensor, local_of(target).device)
    return room_for(tensor)


def is_part(target: Any, shape: Extent) -> TypeGuard[DTensor]:
    """True if a live tensor takes its part of a tensor of that global shape; all others get it whole."""
    return isinstance(target, DTensor) and tuple(target.shape) == shape


def is_empty_part(target: Any) -> TypeGuard[DTensor]:
    """True if nothing of the tensor falls to this rank: no shard needs to be found for it."""
    return isinstance(target, DTensor) and 0 in box_of(target)[1]


def wanted_box(target: Any, shape: Extent) -> tuple[Extent, Extent]:
    """Return the part of a tensor of that global shape that a live tensor, or none, is given: offsets and shape."""
    if is_part(target, shape):
        return box_of(target)
    return (0,) * len(shape), shape


def target_of(source: StateSource, expected: Mapping[str, torch.Tensor], saved: Iterable[str]) -> Target:
    """Return a function from a name in the snapshot to the live tensor that it fills.

    That is a parameter; for optimizer state it is the parameter to which the state belongs.
    """
    live = {saved_name: expected[name] for name, saved_name in saved_names(expected, saved).items()}
    optimizers = source.optimizer_parameters()

    def target(name: str) -> torch.Tensor | None:
        if name in live:
            return live[name]
        for path, parameters in optimizers.items():
            prefix = f"{path}.state."
            number = name.removeprefix(prefix).split(".", 1)[0]
            if name.startswith(prefix) and number.isdecimal() and int(number) < len(parameters):
                return parameters[int(number)]
        return None

    return target


def other_objects(source: StateSource, expected: Mapping[str, torch.Tensor]) -> Callable[[str], bool]:
    """Return a function that is true for tensors below objects of which no tensor is expected: optimizers."""
    paths = sorted(source.named(), key=len, reverse=True)

    def owner_of(name: str) -> str | None:
        for path in paths:
            if name.startswith(f"{path}."):
                return path
        return None

    owners = {owner_of(name) for name in expected}

    def is_of_other(name: str) -> bool:
        owner = owner_of(name)
        return owner is not None and owner not in owners

    return is_of_other


def check_fits(
    saved: Mapping[str, Facts | None],
    expected: Mapping[str, torch.Tensor],
    where: str,
    *,
    casts: bool,
    resizable: Collection[str],
) -> None:
    """Compare a snapshot with the live model. Raises: StateError, naming the first tensors that differ.

    Args:
        saved: the tensors of the snapshot but for those of other objects, ``None`` where facts are not known yet.
        expected: the live tensors.
        where: names the snapshot in the error.
        casts: one floating dtype may replace another, since loading converts the values.
        resizable: names of tensors that get the shape of the snapshot.
    """
    check_loadable(expected, where)
    names = saved_names(expected, saved)
    differences = []
    for name, tensor in expected.items():
        if name not in names:
            differences.append(f"{name}: not in the snapshot")
            continue
        facts = saved[names[name]]
        if facts is None or is_uninitialised(tensor):
            continue
        dtype, shape = facts
        is_cast = casts and dtype.is_floating_point and tensor.is_floating_point()
        has_shape = name in resizable or shape == tuple(tensor.shape)
        if (dtype != tensor.dtype and not is_cast) or not has_shape:
            differences.append(f"{name}: {dtype} {list(shape)} there, {tensor.dtype} {list(tensor.shape)} here")
    objects = {name.partition(".")[0] for name in expected}
    matched = set(names.values())
    for name in saved:
        top, dot, _ = name.partition(".")
        if dot and top in objects and name not in matched:
            differences.append(f"{name}: not in the model")
    if differences:
        shown = some_of(differences, _SHOWN, "; ")
        raise StateError(
            f"{where} is of another model: {shown}. Nothing was loaded. Use the model "
            'it was taken from, another directory, or start fresh without "latest"'
        )
