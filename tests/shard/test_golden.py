"""What version 1 wrote stays readable, and is still what is written."""

import golden
import pytest
import torch
from safetensors.torch import load_file

from lazysnap.levels.blocks import MemoryBlocks
from lazysnap.shard.manifest import Manifest


def test_the_golden_snapshot_is_read_back_value_by_value():
    with golden.opened(golden.FOLDER) as whole:
        got = golden.read_back(whole)

    want = golden.state()
    assert got["small"] == want["small"]
    assert got["optimizer_states"][0]["lr"] == want["optimizer_states"][0]["lr"]
    for name, tensor in want["state_dict"].items():
        assert got["state_dict"][name].dtype is tensor.dtype
        assert torch.equal(got["state_dict"][name], tensor), name
    for name, tensor in want["optimizer_states"][0]["state"][0].items():
        assert torch.equal(got["optimizer_states"][0]["state"][0][name], tensor), name


def test_the_same_state_gives_the_golden_bytes():
    shard, manifest = golden.make()

    assert shard == golden.file_path().read_bytes()
    assert manifest == golden.manifest_path().read_bytes()


def test_any_safetensors_tool_opens_the_shard():
    tensors = load_file(golden.file_path())

    assert torch.equal(tensors["state_dict.net.weight"], golden.state()["state_dict"]["net.weight"])
    assert "state_dict.head.weight" not in tensors  # tied: stored once


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_found():
    good = golden.manifest_path().read_bytes()
    assert Manifest.decode(good, "golden").meta.step == 1000
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        with pytest.raises(ValueError, match="golden"):
            Manifest.decode(bytes(bad), "golden")


def test_a_flipped_bit_in_any_byte_of_the_shard_is_found_and_its_block_named():
    good = golden.file_path().read_bytes()
    checksums = Manifest.decode(golden.manifest_path().read_bytes(), "golden").checksums
    MemoryBlocks(memoryview(good), checksums, "golden").verify(len(good))
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        with pytest.raises(ValueError, match=f"golden: block {position // golden.BLOCK_BYTES} "):
            MemoryBlocks(memoryview(bad), checksums, "golden").verify(len(bad))
