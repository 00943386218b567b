"""Decodes the state in a snapshot: its tensors in memory, or mapped from one temporary file."""

import mmap
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from lazysnap.errors import FormatError
from lazysnap.exports.job import ExportJob
from lazysnap.exports.safetensors import fill_later, owners_of, tied_names
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.limits import with_stack
from lazysnap.shard.manifest import TAG
from lazysnap.snapshots.assembly import JoinedTensor, WholeSnapshot
from lazysnap.snapshots.reads import Reads
from lazysnap.snapshots.tensors import facts_of, into, room_for
from lazysnap.state.codec import decode, tensor_names

Choose = Callable[[Any], Any]
"""A function that returns a part of an encoded state."""


def parts_of(names: Collection[str] | None) -> Choose:
    """Return a function that chooses these objects of the state (``None``: all). Registered types stay encoded."""

    def choose(encoded: Any) -> dict[str, Any]:
        if not isinstance(encoded, dict):
            raise FormatError(f"the small state is {type(encoded).__name__}, expected a dict")
        chosen = {}
        for name, part in encoded.items():
            if names is None or name in names:
                chosen[name] = unregistered(part)
        return chosen

    return choose


def unregistered(encoded: Any) -> Any:
    """Return an encoded value in which values of registered types are replaced by the results of their encoders."""
    if isinstance(encoded, list):
        return [unregistered(item) for item in encoded]
    if not isinstance(encoded, Mapping):
        return encoded
    if encoded.get(TAG) == "registered":
        return unregistered(encoded.get("v"))
    return {key: unregistered(item) for key, item in encoded.items()}


def read_state(whole: WholeSnapshot, choose: Choose) -> dict[str, Any]:
    """Return the part of the state that ``choose`` returns, its tensors read and verified; tied ones are one tensor.

    Blocks. Raises: FormatError; LevelError; as ``choose``.
    """
    encoded, tensors = _chosen(whole, choose)
    return _decoded(whole, encoded, _read(tensors))


def mapped_state(whole: WholeSnapshot, choose: Choose, job: ExportJob, directory: str) -> dict[str, Any]:
    """As ``read_state``, with tensors that may be larger than memory.

    The tensors are assembled, once, in a safetensors file in ``directory`` and mapped from it. The file has no name:
    its space is freed with the last tensor, or when this process dies.
    """
    encoded, tensors = _chosen(whole, choose)
    return _decoded(whole, encoded, _map(tensors, job, directory))


def _chosen(whole: WholeSnapshot, choose: Choose) -> tuple[Any, dict[str, JoinedTensor]]:
    with whole.snapshot.naming():
        encoded = with_stack(partial(choose, whole.meta.state))
        names = tensor_names(encoded)
    return encoded, {name: whole.tensor(name) for name in names}


def _decoded(whole: WholeSnapshot, encoded: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    with whole.snapshot.naming():
        state = decode(encoded, tensor=tensors.__getitem__)
        if not isinstance(state, dict):
            raise FormatError(f"the state is {type(state).__name__}, expected a dict")
    return state


def _read(tensors: Mapping[str, JoinedTensor]) -> dict[str, torch.Tensor]:
    """Return tensors in memory, tied ones once. Blocks. Raises: FormatError; LevelError."""
    tied = tied_names(tensors, list(tensors))
    reads = Reads()
    loaded: dict[str, torch.Tensor] = {}
    for name, tensor in owners_of(tensors, tied).items():
        loaded[name] = room_for(tensor)
        reads.add(tensor, into(loaded[name]))
    reads.run()
    return _with_tied(loaded, tied, tensors)


def _map(tensors: Mapping[str, JoinedTensor], job: ExportJob, directory: str) -> dict[str, torch.Tensor]:
    """Return tensors in a mapped file, tied ones once. Blocks. Raises: FormatError; LevelError; OSError."""
    tied = tied_names(tensors, list(tensors))
    owners = owners_of(tensors, tied)
    layout = Layout.plan(tensor.spec(name) for name, tensor in owners.items())
    reads = Reads()
    with tempfile.TemporaryFile(dir=directory) as file:
        fill_later(file.fileno(), layout, owners, reads)
        job.fill(reads)
        mapped = mmap.mmap(file.fileno(), layout.size_bytes)
    loaded: dict[str, torch.Tensor] = {}
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        loaded[spec.name] = _tensor_at(mapped, offset, spec, owners[spec.name])
    return _with_tied(loaded, tied, tensors)


def _with_tied(
    loaded: Mapping[str, torch.Tensor], tied: Mapping[str, str], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the loaded tensors by all ``names``, in their order: tied names get the tensor of their owner."""
    return {name: loaded[tied.get(name, name)] for name in names}


def _tensor_at(mapped: mmap.mmap, offset: int, spec: TensorSpec, tensor: JoinedTensor) -> torch.Tensor:
    """Return a tensor over a part of a mapped file. Its storage has no other bytes, so none are saved with it."""
    if not spec.nbytes:
        return room_for(tensor)
    dtype, shape = facts_of(tensor.first)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=spec.nbytes, offset=offset).view(dtype).view(shape)
