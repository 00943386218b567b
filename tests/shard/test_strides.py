"""The memory order of a tensor: which strides have one, and which strides follow from it."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from lazysnap.shard.strides import order_of, strides_of


@given(shape=st.lists(st.integers(1, 3), max_size=5), seed=st.integers(0, 99))
def test_the_strides_of_any_permuted_tensor_follow_from_its_order(shape, seed):
    dims = random.Random(seed).sample(range(len(shape)), len(shape))
    tensor = torch.empty(shape).permute(dims)

    order = order_of(tensor.shape, tensor.stride())

    assert strides_of(tensor.shape, order) == tensor.stride()


@given(shape=st.lists(st.integers(0, 4), max_size=4), data=st.data())
def test_an_order_is_given_for_memory_without_holes_and_overlaps_alone(shape, data):
    strides = data.draw(st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape)))

    order = order_of(shape, strides)

    assert order is None or strides_of(shape, order) == tuple(strides)
