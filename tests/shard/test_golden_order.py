"""Tensors that are not row-major: their bytes are, and the manifest tells the order in which they lay in memory."""

import random

import golden
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

from lazysnap.errors import FormatError
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.strides import order_of, strides_of

DIRECTORY = golden.ORDER_FOLDER / golden.directory_name(3000)
FILE, MANIFEST = (DIRECTORY / f"node-00000-of-00001.{kind}" for kind in ("safetensors", "json"))


def test_the_golden_snapshot_is_read_back_with_its_values_and_strides():
    with golden.opened(golden.ORDER_FOLDER) as whole:
        state = golden.read_back(whole)

    wanted = golden.ordered_state()
    for got, want in zip(tree_leaves(state), tree_leaves(wanted), strict=True):
        assert torch.equal(got, want)
    assert state["model"]["kernel"].is_contiguous(memory_format=torch.channels_last)
    assert [base.stride() for base in state["bases"]] == [(1, 3), (1, 2)]
    assert state["model"]["rows"].stride() == (3, 1)
    assert state["every second"].stride() == (2, 1)  # memory with holes comes back without them
    assert state["narrow"].stride() == wanted["narrow"].stride()


def test_the_same_state_gives_the_golden_bytes():
    assert golden.made(golden.ordered_state(), 3000) == (FILE.read_bytes(), MANIFEST.read_bytes())


def test_any_safetensors_tool_reads_the_values():
    tensors = load_file(FILE)

    assert torch.equal(tensors["model.kernel"], golden.ordered_state()["model"]["kernel"])


@pytest.mark.parametrize(
    "order",
    [None, 1, "10", {}, [], [0], [0, 0], [0, 2], [-1, 0], [1, 0, 2], [1.0, 0], [True, 0], ["1", "0"], [[0], [1]]],
)
def test_an_order_that_is_no_permutation_of_the_dimensions_is_refused_before_anything_is_read(order):
    with golden.opened(golden.ORDER_FOLDER) as whole:
        [[shard]] = whole.snapshot.ranks
        assert shard.stored("bases.0").order == (1, 0)
        shard.meta.tensors["bases.0"]["order"] = order

        with pytest.raises(FormatError, match=r"tensor bases\.0: order must be the numbers of its 2 dimensions"):
            golden.read_back(whole)


def test_the_manifest_tells_the_order_where_it_is_not_row_major_and_nothing_else():
    meta = Manifest.decode(MANIFEST.read_bytes(), "golden").meta

    assert meta.tensors == {
        "model.kernel": {"order": [0, 2, 3, 1]},
        "bases.0": {"order": [1, 0]},
        "bases.1": {"dtype": "complex128", "order": [1, 0]},
        "narrow": {"order": [1, 0, 2]},
    }


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
