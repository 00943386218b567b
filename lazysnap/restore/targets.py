"""The live tensors that a restart fills, and the part of a snapshot that each of them takes."""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from lazysnap.console import some_of
from lazysnap.errors import StateError
from lazysnap.shard.pieces import Extent
from lazysnap.snapshots.assembly import JoinedTensor
from lazysnap.snapshots.reader import StoredTensor
from lazysnap.snapshots.tensors import Facts, facts_of, room_for
from lazysnap.state.modules import check_loadable, is_uninitialised, saved_names
from lazysnap.state.sharding import box_of, local_of
from lazysnap.state.source import StateSource

_SHOWN = 5
"""Tensors that an error names."""


def room_on_device(tensor: JoinedTensor, target: "torch.Tensor | None") -> torch.Tensor:
    """Return an empty tensor to assemble into: on the device of the live tensor that it will fill, so that copies to
    the device overlap with reading and comparing.

    The optimizer keeps the tensors of its state. Parameters are copied: until the restart is over the device holds two
    of each, as much as their gradients will take. If the device has no space, and for scalars (``step`` of most
    optimizers stays on the CPU), it is host memory. Raises: FormatError.
    """
    if target is not None and tensor.box[1] and not is_uninitialised(target) and tuple(target.shape) == tensor.shape:
        with contextlib.suppress(torch.OutOfMemoryError):
            return room_for(tensor, local_of(target).device)
    return room_for(tensor)


def is_part(target: Any, shape: Extent) -> TypeGuard[DTensor]:
    """True if a live tensor takes its part of a tensor of that global shape; all others get it whole."""
    return isinstance(target, DTensor) and tuple(target.shape) == shape


def is_empty_part(target: Any) -> TypeGuard[DTensor]:
    """True if this rank needs nothing of the tensor, so that no shard has to be found for it."""
    return isinstance(target, DTensor) and 0 in box_of(target)[1]


class LiveTensors:
    """The live tensors of this rank, and the matching tensors of a snapshot.

    A tensor of the snapshot fills a *target*: the parameter of that name. For optimizer state the target is the
    parameter to which the state belongs, because it has the same placement.
    """

    def __init__(self, source: StateSource, names: Collection[str], where: str, *, casts: bool) -> None:
        """Ask the program's objects. Raises: StateError, if they raise, because no other snapshot would help.

        Args:
            source: the state of the training.
            names: the tensors in the snapshot.
            where: names the snapshot in errors.
            casts: see ``check_fits``.
        """
        self._where = where
        self._casts = casts
        try:
            self._expected = source.expected()
            self._resizable = source.resizable_names()
            self._parameters_by_path = source.optimizer_parameters()
            self._paths = sorted(source.named(), key=len, reverse=True)
        except StateError:
            raise
        except Exception as error:
            raise StateError(
                f"the program's objects cannot be asked for the tensors to restore: {error!r}. Nothing was loaded"
            ) from error
        self._live: dict[str, torch.Tensor] = {}
        """Expected tensors by their names in the snapshot."""
        for name, saved_name in saved_names(self._expected, names).items():
            self._live[saved_name] = self._expected[name]
        self._owners = set(map(self._owner_of, self._expected))
        """Paths of the objects with expected tensors."""
        self._facts: dict[str, Facts | None] = {}
        """Tensors of the snapshot that belong to these objects; ``None`` if facts are not known yet."""
        for name in names:
            if self._belongs_to_owner(name):
                self._facts[name] = None

    def _owner_of(self, name: str) -> str | None:
        """Return the path of the object that a tensor belongs to; ``None`` if it is of no object."""
        for path in self._paths:
            if name.startswith(f"{path}."):
                return path
        return None

    def _belongs_to_owner(self, name: str) -> bool:
        """False for tensors of objects without expected tensors: optimizers."""
        owner = self._owner_of(name)
        return owner is None or owner in self._owners

    def target(self, name: str) -> torch.Tensor | None:
        """Return the target of a tensor of the snapshot; ``None`` if it has none."""
        if name in self._live:
            return self._live[name]
        for path, parameters in self._parameters_by_path.items():
            prefix = f"{path}.state."
            number = name.removeprefix(prefix).split(".", 1)[0]
            if name.startswith(prefix) and number.isdecimal() and int(number) < len(parameters):
                return parameters[int(number)]
        return None

    def wanted_box(self, name: str, shape: Extent) -> tuple[Extent, Extent]:
        """Return the part of a tensor of that global shape for its target: offsets and shape."""
        target = self.target(name)
        if is_part(target, shape):
            return box_of(target)
        return (0,) * len(shape), shape

    def is_wanted(self, name: str) -> bool:
        """False for a live tensor of which this rank needs nothing.

        Its shape is known. Optimizer state may have another shape than its parameter, so it is searched for.
        """
        return name not in self._live or not is_empty_part(self._live[name])

    def note(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Record dtype and shape of tensors in a shard, by name. Raises: FormatError, if torch has no such dtype."""
        for name, stored in tensors.items():
            facts = facts_of(stored)
            if self._belongs_to_owner(name):
                self._facts[name] = facts

    def check_fits(self) -> None:
        """See ``check_fits``. Unknown facts are not compared."""
        check_fits(self._facts, self._expected, self._where, casts=self._casts, resizable=self._resizable)


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
        saved: the tensors of the snapshot except those of other objects, ``None`` where facts are not known yet.
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
