"""What version 2 wrote stays readable, and is still what is written: a shard, and immutable tensors beside it."""

import golden
import pytest
import torch
from safetensors.torch import load_file

from lazysnap.engine.image import Image, check_apart, decode_state
from lazysnap.errors import ShardCorrupt
from lazysnap.levels import open_store
from lazysnap.shard.manifest import Manifest


def read():
    store = open_store(str(golden.FOLDER_2))
    inventory = store.inventory()
    assert inventory.problems == ()
    (entry,), (base,) = inventory.entries, inventory.frozen
    manifest, of_base = store.read_manifest(entry), store.read_manifest(base)
    image, data = memoryview(bytearray(manifest.size_bytes)), memoryview(bytearray(of_base.size_bytes))
    store.read_image(entry, manifest, image)
    store.read_image(base, of_base, data)
    return [Image.parse(image, manifest.meta, "golden"), Image.parse(data, of_base.meta, "golden")]


def test_the_golden_snapshot_is_read_back_value_by_value_from_both_files():
    state = decode_state(read())

    assert state["step"] == 7
    for name, tensor in golden.Base().state_dict().items():
        assert state["model"][name].dtype is tensor.dtype
        assert torch.equal(state["model"][name], tensor), name


def test_the_same_state_gives_the_golden_bytes():
    found = {
        str(path.relative_to(golden.FOLDER_2)): path.read_bytes()
        for path in golden.FOLDER_2.rglob("*")
        if path.is_file()
    }

    assert golden.make_2() == found


def test_any_safetensors_tool_opens_both_files():
    (base,) = golden.FOLDER_2.glob("frozen-*/*.safetensors")
    (shard,) = golden.FOLDER_2.glob("step-*/*.safetensors")

    assert sorted(load_file(base)) == ["model.tied", "model.wide"]
    assert sorted(load_file(shard)) == ["model.adapter"]


def test_the_manifests_say_version_2_and_1():
    (base,) = golden.FOLDER_2.glob("frozen-*/*.json")
    (shard,) = golden.FOLDER_2.glob("step-*/*.json")

    assert b'"version":1,' in base.read_bytes()
    assert b'"version":2,' in shard.read_bytes()
    reference = Manifest.decode(shard.read_bytes(), "golden").meta.frozen
    assert base.parent.name == f"frozen-0123456789abcdef-{reference.digest}"
    assert reference.size_bytes == next(base.parent.glob("*.safetensors")).stat().st_size


def test_a_tensor_in_both_files_is_refused():
    shard, base = read()

    check_apart([shard, base], "golden")
    with pytest.raises(ShardCorrupt, match=r"golden: tensor 'model\.wide' is in the shard and"):
        check_apart([shard, base, base], "golden")


def test_a_tensor_in_neither_file_is_refused():
    shard, _ = read()

    with pytest.raises(ShardCorrupt, match=r"no tensor 'model\.(tied|weight)'"):
        decode_state([shard])
