"""Images in memory and the state they make: tensors found by name, compared with the live model, decoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lazysnap.capture.dtypes import DTYPES, logical_facts, logical_form
from lazysnap.capture.plan import view_of
from lazysnap.errors import ShardCorrupt, StateMismatch
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.state.codec import decode
from lazysnap.state.modules import check_loadable, held_names, is_uninitialised

_SHOWN = 5


@dataclass(frozen=True)
class Image:
    """A verified image, its header read: a shard, or the immutable tensors that it refers to."""

    data: memoryview = field(repr=False)
    meta: CaptureMeta
    layout: Layout

    @classmethod
    def parse(cls, data: memoryview, meta: CaptureMeta, where: str) -> "Image":
        """Raises: ShardCorrupt, if the header is not what may be written."""
        return cls(data, meta, Layout.parse(data, len(data), where))

    def names(self) -> list[str]:
        """Every name that stands for a tensor here."""
        return [*(spec.name for spec in self.layout.specs), *self.meta.aliases]

    def find(self, name: str) -> tuple[TensorSpec, int, str | None] | None:
        """The tensor called so, its offset and its logical dtype; ``None`` if it is not here."""
        stored = self.meta.aliases.get(name, name)
        if stored not in self.layout:
            return None
        return *self.layout.find(stored), self.meta.tensors.get(stored, {}).get("dtype")


def check_apart(images: Sequence[Image], where: str) -> None:
    """Raises: ShardCorrupt, if a name stands for tensors in two of them."""
    names = [name for image in images for name in image.names()]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ShardCorrupt(f"{where}: tensor {twice!r} is in the shard and among the immutable tensors")


def check_fits(images: Sequence[Image], expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Compare a snapshot with the live model. Raises: StateMismatch, naming the first tensors that differ."""
    facts = {}
    for name in (name for image in images for name in image.names()):
        found = _find(images, name)
        assert found is not None
        _, spec, _, logical = found
        try:
            facts[name] = logical_facts(_dtype(spec), spec.shape, logical)
        except ValueError as error:
            raise ShardCorrupt(f"tensor {name}: {error}") from error
    compare(facts, expected, where)


def compare(
    held: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], expected: Mapping[str, torch.Tensor], where: str
) -> None:
    """Compare dtypes and shapes in a snapshot with the live model's. Raises: StateMismatch, naming what differs."""
    check_loadable(expected, where)
    names = held_names(expected, held)
    differences = []
    for name, tensor in expected.items():
        if name not in names:
            differences.append(f"{name}: not in the snapshot")
        elif not is_uninitialised(tensor) and held[names[name]] != (tensor.dtype, tuple(tensor.shape)):
            dtype, shape = held[names[name]]
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


def decode_state(images: Sequence[Image]) -> dict[str, Any]:
    """Build the state that the first image tells of, with tensors from all.

    Every tensor is cloned: loaders keep what they are given, and the images are not theirs. What was tied is one
    tensor again. Raises: ShardCorrupt, FormatError.
    """
    made: dict[tuple[int, str], torch.Tensor] = {}

    def tensor(name: str) -> torch.Tensor:
        found = _find(images, name)
        if found is None:
            raise ShardCorrupt(f"the shard has no tensor {name!r}, nor have the immutable tensors")
        image, spec, offset, logical = found
        key = id(image), spec.name
        if key not in made:
            copy = view_of(image.data, offset, _dtype(spec), spec.shape).clone()
            try:
                made[key] = logical_form(copy, logical)
            except ValueError as error:
                raise ShardCorrupt(f"tensor {name}: {error}") from error
        return made[key]

    state = decode(images[0].meta.state, tensor=tensor)
    if not isinstance(state, dict):
        raise ShardCorrupt(f"the small state is {type(state).__name__}, expected a dict")
    return state


def _find(images: Sequence[Image], name: str) -> tuple[Image, TensorSpec, int, str | None] | None:
    for image in images:
        found = image.find(name)
        if found is not None:
            return image, *found
    return None


def _dtype(spec: TensorSpec) -> torch.dtype:
    if spec.dtype not in DTYPES:
        raise ShardCorrupt(f"tensor {spec.name}: torch has no dtype for {spec.dtype}")
    return DTYPES[spec.dtype]
