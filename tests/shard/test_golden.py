"""The one format version: the golden snapshot is read, and is still what is written."""

import golden
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_flatten

from lazysnap.errors import FormatError
from lazysnap.levels.blocks import MemoryBlocks
from lazysnap.shard.manifest import Manifest


def test_the_golden_snapshot_is_read_back_value_by_value():
    with golden.opened() as whole:
        got = golden.read_back(whole)

    expected = {"model": dict(golden.Base().state_dict()), **golden.values()}
    got_leaves, got_structure = tree_flatten(got)
    leaves, structure = tree_flatten(expected)
    assert got_structure == structure
    for got_leaf, leaf in zip(got_leaves, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            assert got_leaf.dtype is leaf.dtype
            assert torch.equal(got_leaf, leaf)
        else:
            assert got_leaf == leaf


def test_tensors_come_back_with_their_memory_order():
    with golden.opened() as whole:
        orders = golden.read_back(whole)["orders"]

    assert orders["kernel"].is_contiguous(memory_format=torch.channels_last)
    assert [base.stride() for base in orders["bases"]] == [(1, 3), (1, 2)]
    assert orders["rows"].stride() == (3, 1)
    assert orders["every second"].stride() == (2, 1)  # memory with holes comes back without them
    assert orders["narrow"].stride() == golden.values()["orders"]["narrow"].stride()


def test_the_same_state_gives_the_golden_bytes():
    files = {}
    for path in golden.FOLDER.rglob("*"):
        if path.is_file():
            files[str(path.relative_to(golden.FOLDER))] = path.read_bytes()

    assert golden.make() == files


def test_any_safetensors_tool_opens_the_file():
    tensors = load_file(golden.SHARD_PATH)

    assert torch.equal(tensors["state_dict.net.weight"], golden.values()["state_dict"]["net.weight"])
    assert "state_dict.head.weight" not in tensors  # tied: stored once
    assert torch.equal(tensors["orders.kernel"], golden.values()["orders"]["kernel"])
    assert len([name for name in tensors if name.startswith("model.")]) == 3


def test_the_manifest_tells_what_a_header_cannot():
    meta = Manifest.decode(golden.MANIFEST_PATH.read_bytes(), "golden").meta

    assert meta.tensors == {
        "model.weight": {"frozen": True},
        "model.wide": {"dtype": "complex128", "frozen": True},
        "state_dict.double_complex": {"dtype": "complex128"},
        "orders.kernel": {"order": [0, 2, 3, 1]},
        "orders.bases.0": {"order": [1, 0]},
        "orders.bases.1": {"dtype": "complex128", "order": [1, 0]},
        "orders.narrow": {"order": [1, 0, 2]},
    }
    assert meta.parameters == {"optimizer": ["adapter"]}


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_found():
    good = golden.MANIFEST_PATH.read_bytes()
    assert Manifest.decode(good, "golden").meta.step == golden.STEP
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        with pytest.raises(ValueError, match="golden"):
            Manifest.decode(bytes(bad), "golden")


@pytest.mark.slow
def test_a_flipped_bit_in_any_byte_of_the_shard_is_found_and_its_block_named():
    good = golden.SHARD_PATH.read_bytes()
    checksums = Manifest.decode(golden.MANIFEST_PATH.read_bytes(), "golden").checksums
    MemoryBlocks(memoryview(good), checksums, "golden").view(0, len(good))
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        with pytest.raises(ValueError, match=f"golden: block {position // golden.BLOCK_BYTES} "):
            MemoryBlocks(memoryview(bad), checksums, "golden").view(0, len(bad))


def test_a_tensor_that_no_shard_has_is_refused():
    with golden.opened() as whole:
        whole.meta.state["small"]["none"] = {"$": "tensor", "v": "gone"}
        with pytest.raises(FormatError, match="no shard has the tensor 'gone'"):
            golden.read_back(whole)


@pytest.mark.parametrize(
    "order",
    [None, 1, "10", {}, [], [0], [0, 0], [0, 2], [-1, 0], [1, 0, 2], [1.0, 0], [True, 0], ["1", "0"], [[0], [1]]],
)
def test_an_order_that_is_no_permutation_of_the_dimensions_is_refused_before_anything_is_read(order):
    with golden.opened() as whole:
        [shard] = whole.snapshot.shards
        assert shard.stored("orders.bases.0").order == (1, 0)
        shard.meta.tensors["orders.bases.0"]["order"] = order

        with pytest.raises(FormatError, match=r"orders\.bases\.0: order must be the numbers of its 2 dimensions"):
            golden.read_back(whole)
