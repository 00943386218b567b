"""Torch dtypes and their names in a shard. Dtypes without a name are stored as another dtype."""

import torch

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Every torch dtype that a shard holds unchanged."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

# Not as plain bytes: these are unaligned at the end of the file, and torch reads complex numbers with instructions that
# need alignment.
_STORED_AS: dict[torch.dtype, torch.dtype] = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}
# Older releases of torch lack these dtypes. safetensors has names for them, which its older readers do not know.
for _name in ("float8_e8m0fnu", "float4_e2m1fn_x2"):
    if hasattr(torch, _name):
        _STORED_AS[getattr(torch, _name)] = torch.uint8
_LOGICAL = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED_AS}


def logical_name(dtype: torch.dtype) -> str | None:
    """Return the name that the manifest must remember; ``None`` for a dtype that a shard holds unchanged."""
    if dtype not in _STORED_AS:
        return None
    return str(dtype).removeprefix("torch.")


def is_storable(dtype: torch.dtype) -> bool:
    """True if a shard can hold tensors of this dtype."""
    return dtype in DTYPE_NAMES or dtype in _STORED_AS


def is_converted(tensor: torch.Tensor) -> bool:
    """True if ``stored_form`` copies the tensor: complex numbers whose conjugation is pending."""
    return tensor.dtype in _STORED_AS and tensor.is_conj()


def stored_form(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a shard stores it: itself, or a view of the same memory with a dtype that has a name."""
    if tensor.dtype not in _STORED_AS:
        return tensor
    tensor = tensor.detach().resolve_conj()
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor)
    return tensor.view(_STORED_AS[tensor.dtype])


def logical_facts(stored: torch.dtype, shape: tuple[int, ...], name: str | None) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape in the program of a stored tensor. Raises: ValueError, if ``name`` does not fit."""
    if name is None:
        return stored, shape
    dtype = _LOGICAL.get(name)
    if dtype is None or _STORED_AS[dtype] is not stored or (dtype.is_complex and shape[-1:] != (2,)):
        raise ValueError(f"the logical dtype {name!r:.50} does not fit {stored} {list(shape)}")
    if dtype.is_complex:
        return dtype, shape[:-1]
    return dtype, shape
