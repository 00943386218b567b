"""Tensors of a snapshot as safetensors files: without torch, and with a few blocks of memory."""

import contextlib
import os
from collections.abc import Mapping, Sequence

from lazysnap.errors import FormatError, StateError
from lazysnap.exports.job import ExportJob, behind
from lazysnap.exports.weights import chosen_tensors
from lazysnap.levels.files import pwrite_all
from lazysnap.shard.layout import Layout
from lazysnap.snapshots.assembly import JoinedTensor, WholeSnapshot
from lazysnap.snapshots.reads import Reads, written

FORMAT = {"format": "pt"}
"""The metadata of every file: its tensors are those of torch."""


def write_safetensors(whole: WholeSnapshot, job: ExportJob, path: str) -> list[str]:
    """Write the chosen weights to a new file; return notes for the user.

    Tied tensors are stored once, under the alphabetically first name. The header's ``__metadata__`` has the other
    names, as with ``safetensors.torch.save_model``.
    Blocks. Raises: ConfigError; FormatError; StateError, for a dtype that safetensors does not have; LevelError;
    OSError.
    """
    chosen = chosen_tensors(whole.meta.state, job.only)
    tensors = {name: whole.tensor(stored) for name, stored in chosen.items()}
    tied = tied_names(tensors, sorted(tensors))
    reads = Reads()
    with contextlib.ExitStack() as files:
        add_file(reads, files, path, owners_of(tensors, tied), tied)
        job.fill(reads)
    if not tied:
        return []
    count = "1 tied tensor is"
    if len(tied) > 1:
        count = f"{len(tied)} tied tensors are"
    return [f"{count} stored once: load with safetensors.torch.load_model"]


def tied_names(tensors: Mapping[str, JoinedTensor], order: Sequence[str]) -> dict[str, str]:
    """Return the names of tensors that are tied to an earlier one in ``order``, each with the name of that owner.

    Empty tensors are not tied.
    """
    owners: dict[tuple[object, ...], str] = {}
    for name in order:
        if tensors[name].size_bytes:
            owners.setdefault(tensors[name].key, name)
    tied = {}
    for name in order:
        owner = owners.get(tensors[name].key, name)
        if owner != name:
            tied[name] = owner
    return tied


def owners_of(tensors: Mapping[str, JoinedTensor], tied: Mapping[str, str]) -> dict[str, JoinedTensor]:
    """Return the tensors that are not tied to another one."""
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


def add_file(
    reads: Reads,
    files: contextlib.ExitStack,
    path: str,
    tensors: Mapping[str, JoinedTensor],
    metadata: Mapping[str, str],
) -> None:
    """Make a file of these tensors, which is filled when ``reads`` runs; it is open until ``files`` ends.

    Raises: StateError, for a dtype or a name that safetensors does not have; OSError.
    """
    for name, tensor in tensors.items():
        if tensor.first.logical is not None:
            raise StateError(
                f"tensor {name!r} is {tensor.first.logical}, which safetensors cannot hold; export to .ckpt or a DCP "
                "directory, or choose other tensors with `lazysnap export --only`"
            )
    try:
        specs = [tensor.spec(name) for name, tensor in tensors.items()]
        layout = Layout.plan(specs, {**FORMAT, **metadata})
    except FormatError as error:
        raise StateError(f"{path}: safetensors cannot hold these tensors: {error}") from error
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
    files.callback(os.close, handle)
    fill_later(handle, layout, tensors, reads)


def fill_later(handle: int, layout: Layout, tensors: Mapping[str, JoinedTensor], reads: Reads) -> None:
    """Write the header of a safetensors file into an empty one; its tensors are written when ``reads`` runs.

    Raises: OSError.
    """
    os.ftruncate(handle, layout.size_bytes)
    pwrite_all(handle, 0, memoryview(layout.header))
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        tensor = tensors[spec.name]
        reads.add(tensor, written(tensor, behind(handle, offset)))
