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

    Tied tensors are stored once, under the alphabetically first name; the header's ``__metadata__`` holds the other
    names, as with ``safetensors.torch.save_model``.
    Blocks. Raises: ConfigError; FormatError; StateError, for a dtype that safetensors does not have; LevelError;
    OSError.
    """
    chosen = chosen_tensors(whole.meta.state, job.only)
    tensors = {name: whole.tensor(stored) for name, stored in chosen.items()}
    tied = tied_names(tensors, sorted(tensors))
    reads = Reads()
    with contextlib.ExitStack() as files:
        add_file(reads, files, path, {name: tensor for name, tensor in tensors.items() if name not in tied}, tied)
        job.fill(reads)
    if not tied:
        return []
    count = f"{len(tied)} tied tensor{'s are' if len(tied) > 1 else ' is'}"
    return [f"{count} stored once: load with safetensors.torch.load_model"]


def tied_names(tensors: Mapping[str, JoinedTensor], order: Sequence[str]) -> dict[str, str]:
    """Return the names of tensors that are tied to one that comes before them in ``order``, and the name of that."""
    first: dict[tuple[object, ...], str] = {}
    for name in order:
        if tensors[name].size_bytes:
            first.setdefault(tensors[name].key, name)
    owners = {name: first.get(tensors[name].key, name) for name in order}
    return {name: owner for name, owner in owners.items() if owner != name}


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
        layout = Layout.plan([tensor.spec(name) for name, tensor in tensors.items()], {**FORMAT, **metadata})
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
