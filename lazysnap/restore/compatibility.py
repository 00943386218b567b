"""Whether a snapshot is of the live model."""

from collections.abc import Mapping

import torch

from lazysnap.errors import StateMismatch
from lazysnap.snapshots.tensors import Facts
from lazysnap.state.modules import check_loadable, held_names, is_uninitialised

_SHOWN = 5


def check_fits(held: Mapping[str, Facts | None], expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Compare a snapshot with the live model. Raises: StateMismatch, naming the first tensors that differ.

    ``held``: every tensor of the snapshot, ``None`` where its facts are not known yet.
    """
    check_loadable(expected, where)
    names = held_names(expected, held)
    differences = []
    for name, tensor in expected.items():
        if name not in names:
            differences.append(f"{name}: not in the snapshot")
            continue
        facts = held[names[name]]
        if facts is None or is_uninitialised(tensor):
            continue
        dtype, shape = facts
        if (dtype, shape) != (tensor.dtype, tuple(tensor.shape)):
            differences.append(f"{name}: {dtype} {list(shape)} there, {tensor.dtype} {list(tensor.shape)} here")
    prefixes = tuple({name.split(".", 1)[0] + "." for name in expected})
    known = set(names.values())
    differences += [f"{name}: not in the model" for name in held if name.startswith(prefixes) and name not in known]
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise StateMismatch(
            f"{where} is of another model: {'; '.join(differences[:_SHOWN])}{more}. Nothing was loaded. Use the model "
            'it was taken from, another directory, or start fresh without "latest"'
        )
