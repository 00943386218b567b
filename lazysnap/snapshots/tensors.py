"""Creates torch tensors for tensors in shards."""

import torch

from lazysnap.capture.dtypes import DTYPES, logical_facts
from lazysnap.errors import FormatError
from lazysnap.shard.pieces import Extent
from lazysnap.shard.strides import strides_of
from lazysnap.snapshots.assembly import JoinedTensor
from lazysnap.snapshots.reader import StoredTensor
from lazysnap.snapshots.reads import Span, Use

Facts = tuple[torch.dtype, Extent]
"""Dtype and shape."""


def facts_of(stored: StoredTensor) -> Facts:
    """Return dtype and global shape in the program. Raises: FormatError, if torch has no such dtype."""
    where = f"{stored.shard.where}: tensor {stored.spec.name}"
    logical = stored.logical
    if stored.spec.dtype not in DTYPES:
        raise FormatError(f"{where}: torch has no dtype for {stored.spec.dtype}")
    try:
        dtype, _ = logical_facts(DTYPES[stored.spec.dtype], stored.spec.shape, logical)
    except ValueError as error:
        raise FormatError(f"{where}: {error}") from error
    return dtype, stored.extent[0]


def room_for(tensor: JoinedTensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a new tensor for the wanted box, with dtype and memory order of the stored one. Raises: FormatError.

    ``device``: default the CPU, whatever ``torch.set_default_device`` says.
    """
    shape = tensor.box[1]
    dtype, _ = facts_of(tensor.first)
    strides = strides_of(shape, tensor.first.order)
    try:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device or "cpu")
    except RuntimeError as error:
        if 0 not in shape:
            raise  # no memory
        # A shape like [0, 2**61, 2**61] is damaged.
        raise FormatError(f"{tensor.first.shard.where}: tensor {tensor.name}: {error}") from error


def into(target: torch.Tensor) -> Use:
    """Return a ``Use`` that copies into a tensor, on any device and in any memory order."""

    def use(span: Span, data: memoryview) -> None:
        # Inference tensors can be written only in inference mode, which is set per thread.
        with torch.inference_mode(target.is_inference()):
            flat = torch.frombuffer(data, dtype=torch.uint8)
            if flat.data_ptr() % target.dtype.itemsize:
                flat = flat.clone()
            source = flat.view(target.dtype).as_strided(span.shape, span.strides)
            place = tuple(slice(start, start + n) for start, n in zip(span.offsets, span.shape, strict=True))
            target[place].copy_(source)

    return use
