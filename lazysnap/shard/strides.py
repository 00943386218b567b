"""The memory order of a dense tensor, as a permutation of its dimensions. Pure.

A permutation describes the strides of a tensor, of any box of it, and of its part on any rank. It cannot describe holes
or overlaps, so strides from an untrusted file stay inside the memory of the tensor.
"""

from collections.abc import Sequence
from typing import Any

Order = tuple[int, ...]
"""Dimensions, from the one with the largest steps in memory to the one with the smallest."""


def strides_of(shape: Sequence[int], order: Order | None) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor with this memory order; ``None``: row-major."""
    if order is None:
        order = tuple(range(len(shape)))
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def order_of(shape: Sequence[int], strides: Sequence[int]) -> Order | None:
    """Return the memory order of a dense tensor; ``None`` if it is row-major, empty, or has holes or overlaps."""
    if 0 in shape or tuple(strides) == strides_of(shape, None):
        return None
    # Of two dimensions with equal steps the one of size 1 is the inner one.
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1)))
    if strides_of(shape, order) != tuple(strides):
        return None
    return order


def is_order(value: Any, dims: int) -> bool:
    """True if this untrusted value is a list of all dimensions of a tensor, each once."""
    return isinstance(value, list) and all(type(dim) is int for dim in value) and sorted(value) == list(range(dims))
