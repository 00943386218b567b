"""A snapshot of several ranks, in every format: the bits that torch itself saves of that step, whole."""

import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import flat
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import lazysnap
from lazysnap.cli import main

WORLDS = [("ddp", 2), ("fsdp", 3), ("hsdp", 4), ("tp", 4)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("exports of many ranks"),  # each world trains once for all of them
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
]


@pytest.fixture(scope="module")
def saved(worlds, tmp_path_factory):
    """By strategy and size: a level, and what torch saved of the same step."""
    places = {}

    def place(strategy, size):
        if (strategy, size) not in places:
            root = tmp_path_factory.mktemp("saved")
            facts = {"url": str(root / "level"), "reference": str(root / "reference.pt")}
            worlds.run(size, "save", strategy=strategy, **facts)
            places[strategy, size] = facts["url"], facts["reference"]
        return places[strategy, size]

    return place


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world[0]}x{world[1]}")
def test_every_format_holds_the_bits_that_torch_saves_whole(saved, tmp_path, world):
    url, reference = saved(*world)
    whole = torch.load(reference, weights_only=False)  # written by this test

    done = lazysnap.export(url, tmp_path / "w.safetensors")
    assert (done.step, done.format, done.url) == (1, "safetensors", url)
    weights = load_file(tmp_path / "w.safetensors")
    assert flat(weights) == flat({n: t for n, t in whole["model"].items() if n != "head.weight"})

    lazysnap.export(url, tmp_path / "state.ckpt", which=1)
    state = torch.load(tmp_path / "state.ckpt", weights_only=True)
    assert flat(state["model"]) == flat(whole["model"])
    assert state["model"]["head.weight"].data_ptr() == state["model"]["embedding.weight"].data_ptr()
    names = [name for group in whole["optimizer"]["param_groups"] for name in group["params"]]
    by_name = {names[number]: held for number, held in state["optimizer"]["state"].items()}
    assert flat(by_name) == flat({name: whole["optimizer"]["state"][name] for name in by_name})
    assert by_name.keys() == whole["optimizer"]["state"].keys()
    assert state["own"]["number"] == 0
    with zipfile.ZipFile(tmp_path / "state.ckpt") as archive:
        assert archive.testzip() is None, "other readers than torch compare checksums"

    lazysnap.export(url, tmp_path / "dcp")
    stock = FileSystemReader(f"{reference}.dcp").read_metadata().state_dict_metadata
    ours = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert {key for key in ours if key.startswith(("model.", "optimizer."))} == set(stock)
    found = _load_state_dict_from_keys({"model", "optimizer"}, checkpoint_id=tmp_path / "dcp")
    expected = _load_state_dict_from_keys({"model", "optimizer"}, checkpoint_id=f"{reference}.dcp")
    assert flat(found) == flat(expected)


@pytest.mark.parametrize(("origin", "target"), [(("fsdp", 3), ("ddp", 2)), (("ddp", 2), ("tp", 4))], ids=str)
def test_another_world_loads_an_exported_directory_and_trains_on(worlds, saved, tmp_path, origin, target):
    url, reference = saved(*origin)
    lazysnap.export(url, tmp_path / "dcp")

    found = worlds.run(target[1], "load", directory=str(tmp_path / "dcp"), strategy=target[0], reference=reference)

    assert all(rank["equal"] for rank in found)


def test_the_command_says_what_was_written_its_size_and_from_where(saved, tmp_path, capsys):
    url, _ = saved("ddp", 2)
    assert main(["export", url, "latest", "--to", str(tmp_path / "w.safetensors")]) == 0
    out = capsys.readouterr().out
    size = (tmp_path / "w.safetensors").stat().st_size
    assert str(tmp_path / "w.safetensors") in out
    assert f"safetensors, {size / 1000:.1f} kB, step 1 of run " in out
    assert url in out


def test_a_state_dict_of_stock_torch_loads_one_rank_of_the_directory(saved, tmp_path):
    """No process group: what a notebook does."""
    url, reference = saved("tp", 4)
    whole = torch.load(reference, weights_only=False)
    lazysnap.export(url, tmp_path / "dcp")
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in whole["model"].items()}}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert flat(target["model"]) == flat(whole["model"])
