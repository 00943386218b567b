"""A shard and frozen tensors beside it: what was written stays readable, and is still what is written."""

import golden
import pytest
import torch
from safetensors.torch import load_file

from lazysnap.errors import FormatError
from lazysnap.shard.manifest import Manifest
from lazysnap.snapshots.assembly import Assembly, WholeSnapshot


def test_the_golden_snapshot_is_read_back_value_by_value_from_both_files():
    with golden.opened(golden.FROZEN_FOLDER) as whole:
        state = golden.read_back(whole)

    assert state["step"] == 7
    for name, tensor in golden.Base().state_dict().items():
        assert state["model"][name].dtype is tensor.dtype
        assert torch.equal(state["model"][name], tensor), name


def test_the_same_state_gives_the_golden_bytes():
    found = {
        str(path.relative_to(golden.FROZEN_FOLDER)): path.read_bytes()
        for path in golden.FROZEN_FOLDER.rglob("*")
        if path.is_file()
    }

    assert golden.make_frozen() == found


def test_any_safetensors_tool_opens_both_files():
    (base,) = golden.FROZEN_FOLDER.glob("frozen-*/*.safetensors")
    (shard,) = golden.FROZEN_FOLDER.glob("step-*/*.safetensors")

    assert sorted(load_file(base)) == ["model.tied", "model.wide"]
    assert sorted(load_file(shard)) == ["model.adapter"]


def test_the_manifest_of_the_shard_refers_to_the_frozen_tensors():
    (base,) = golden.FROZEN_FOLDER.glob("frozen-*/*.json")
    (shard,) = golden.FROZEN_FOLDER.glob("step-*/*.json")

    meta = Manifest.decode(shard.read_bytes(), "golden").meta
    assert meta.parameters == {"optimizer": ["adapter"]}
    reference = meta.frozen
    assert base.parent.name == f"frozen-{reference.digest}"
    assert reference.size_bytes == next(base.parent.glob("*.safetensors")).stat().st_size


def test_a_tensor_in_both_files_is_refused():
    with golden.opened(golden.FROZEN_FOLDER) as whole:
        [[shard, base]] = whole.snapshot.ranks
        with pytest.raises(FormatError, match=r"tensor 'model\.(tied|weight|wide)' is in the shard and among"):
            Assembly(0).add([shard, base, base])


def test_a_tensor_in_neither_file_is_refused():
    with golden.opened(golden.FROZEN_FOLDER) as whole:
        whole.snapshot.ranks[0] = whole.snapshot.ranks[0][:1]
        with pytest.raises(FormatError, match=r"no shard has the tensor 'model\.(tied|weight|wide)'"):
            golden.read_back(WholeSnapshot(whole.snapshot))
