"""Digests with which a restart detects that a loader gives other data than before."""

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch.utils.data import Subset

_MOST_BYTES = 1 << 20
"""Maximum bytes of each tensor or array."""
_MOST_SUBSETS = 8


def digest_of(value: Any) -> int:
    """Return a digest of a batch, or of indices.

    For tensors on a device, and of special kinds (sparse, quantized), only shape and dtype count.
    """
    digest = xxhash.xxh3_64()
    _add(digest, value)
    return digest.intdigest() >> 1  # fits a signed integer of 64 bits


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor) and not value.is_nested:  # a nested tensor may have no shape
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if _is_readable(value):
            digest.update(bytes_of(value, _MOST_BYTES))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            digest.update(str(name).encode())
            _add(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, (bool, int, float, str, bytes, type(None))):
        digest.update(repr(value).encode())
    elif getattr(getattr(value, "dtype", None), "hasobject", False):  # its bytes are addresses
        _add(digest, value.tolist())
    elif hasattr(value, "tobytes"):  # an array of NumPy
        digest.update(value.tobytes()[:_MOST_BYTES])
    else:
        digest.update(type(value).__qualname__.encode())


def _is_readable(tensor: torch.Tensor) -> bool:
    """True if ``bytes_of`` can read the values of a tensor."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    # Other classes override operations, and may have no memory (DTensor, MaskedTensor).
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def bytes_of(tensor: torch.Tensor, most_bytes: int | None = None) -> bytes:
    """Return a copy of the bytes of a tensor on the CPU, at most the first ``most_bytes``. It needs no NumPy."""
    values = tensor.detach().resolve_conj().resolve_neg()
    flat = values.contiguous().reshape(-1).view(torch.uint8)[:most_bytes]
    data = bytearray(len(flat))
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(flat)
    return bytes(data)


class SubsetDigest:
    """The digest of the indices of a ``Subset``, computed once for each list of indices."""

    def __init__(self) -> None:
        self._indices: list[Any] = []
        self._digest: int | None = None

    def of(self, dataset: Any) -> int | None:
        """Return the digest of the ``Subset`` objects around ``dataset``; ``None``, if there is none."""
        indices: list[Any] = []
        while isinstance(dataset, Subset) and len(indices) < _MOST_SUBSETS:
            indices.append(dataset.indices)
            dataset = dataset.dataset
        if not indices:
            return None
        is_known = len(indices) == len(self._indices)
        is_known = is_known and all(old is new for old, new in zip(self._indices, indices, strict=True))
        if not is_known:
            self._indices = indices
            self._digest = digest_of([list(numbers) for numbers in indices])
        return self._digest
