"""A copy that lazysnap makes is what stock Accelerate loads, bit for bit; and it is complete or not there."""

import pytest
import safetensors.torch
import torch
from accelerate import PartialState
from accelerate.checkpointing import load_accelerator_state
from stock_net import Net, plain
from support.saving import Snapshot, put, write

import lazysnap
from lazysnap.data.streams import collect_rng
from lazysnap.errors import StateError
from lazysnap.exports.named import Named, name_snapshot
from lazysnap.state.walk import walk
from lazysnap.state.wrappers import wrapper_prefix


def contents(directory):
    """What each file of a checkpoint holds, plain, and the metadata of safetensors."""
    found = {}
    for path in directory.iterdir():
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, "pt") as opened:
                found[path.name] = [opened.metadata(), plain({key: opened.get_tensor(key) for key in opened.keys()})]  # noqa: SIM118
        elif not path.name.startswith("lazysnap"):
            found[path.name] = plain(torch.load(path, weights_only=False))  # written by this test
    return found


@pytest.mark.parametrize(("world", "stateful"), [(1, True), (2, False)])
def test_stock_load_state_reads_the_copy_bit_for_bit(ranks, tmp_path, world, stateful):
    level, directory = str(tmp_path / "level"), str(tmp_path / "copies" / "first")

    stock = tmp_path / "stock"
    settings = {"directory": directory, "stateful": stateful}
    saved = ranks.run("save", world, level=level, name="save_state-0", stock=str(stock), **settings)

    loaded = ranks.run("load", world, **settings)
    for rank, bits in enumerate(loaded):
        # As in stock, all ranks get the buffers of rank 0; DDP would send them with the next forward.
        assert bits == {**saved[rank], "model": saved[0]["model"]}
    assert contents(tmp_path / "copies" / "first") == contents(stock)
    assert (stock / "dl_state_dict.bin").exists() == stateful
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["first"], "no temporary directory stays"


def test_all_ranks_load_at_once_what_they_had_saved(ranks, tmp_path):
    """From the snapshot; the files for stock are put there meanwhile."""
    out, stock = tmp_path / "copies" / "out", tmp_path / "stock"
    places = {"level": str(tmp_path / "level"), "directory": str(out), "stock": str(stock)}
    found = ranks.run("integration", 2, **places)
    for rank, bits in enumerate(found):
        assert bits["step"] == 3
        assert bits["loaded"] == bits["saved"], rank
    assert contents(out) == contents(stock)
    assert [path.name for path in out.parent.iterdir()] == ["out"], "nothing is left beside it"


@pytest.mark.slow
def test_ranks_wait_for_a_checkpoint_longer_than_the_deadline_of_their_process_group(ranks, tmp_path):
    out = tmp_path / "copies" / "out"
    found = ranks.run("slow", 2, level=str(tmp_path / "level"), directory=str(out))
    for bits in found:
        assert bits["waited"] is True
        assert bits["loaded"] == {**bits["saved"], "model": found[0]["saved"]["model"]}


def state_of(model, optimizer, **facts):
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": collect_rng(),
        "accelerate": {"step": 7, **facts},
    }


def export(state, directory):
    """As the layout of ``save_state``, from a snapshot."""
    level = directory / "level"
    put(str(level), 1, state)
    lazysnap.export(level, directory / "out", format="accelerate")
    return directory / "out"


def stock_load(directory, model, optimizer, scaler=None):
    PartialState(cpu=True)  # stock cannot log without
    return load_accelerator_state(str(directory), [model], [optimizer], [], [], 0, scaler)


@pytest.mark.parametrize(("safe", "compiled"), [(True, True), (False, False)])
def test_tied_and_compiled_weights_come_back_in_both_formats(tmp_path, safe, compiled):
    model, fresh = Net(), Net()
    optimizer, other = torch.optim.SGD(model.parameters()), torch.optim.SGD(fresh.parameters())
    loaded = torch.compile(fresh) if compiled else fresh
    prefixes = {"model": wrapper_prefix(loaded)}
    assert prefixes["model"] == ("_orig_mod." if compiled else "")
    out = export(state_of(model, optimizer, safe_serialization=safe, prefixes=prefixes), tmp_path)
    assert (out / "model.safetensors").exists() == safe
    assert (out / "pytorch_model.bin").exists() == (not safe)
    assert stock_load(out, loaded, other) == {"step": 7}
    assert plain(fresh.state_dict()) == plain(model.state_dict())
    assert fresh.head.weight is fresh.embedding.weight


def test_the_scale_of_a_grad_scaler_comes_back(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scaler, fresh = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (512.0, 4.0))
    for one in (scaler, fresh):
        one.scale(torch.ones(1))
    state = state_of(model, optimizer) | {"scaler": scaler.state_dict() | {"scale": torch.tensor(512.0)}}
    out = export(state, tmp_path)
    stock_load(out, model, optimizer, fresh)
    assert fresh.state_dict() == scaler.state_dict()


def test_models_that_a_save_hook_took_out_are_not_written(tmp_path):
    """Scripts write some of their models themselves."""
    model = torch.nn.Linear(2, 2)
    state = state_of(model, torch.optim.SGD(model.parameters()), models=["model_1"])
    out = export(state | {"model_1": {"w": torch.ones(3)}}, tmp_path)
    assert safetensors.torch.load_file(out / "model.safetensors").keys() == {"w"}


def test_the_size_of_an_export_is_that_of_its_own_files(tmp_path):
    """Also in a directory of ``save_state``, in which the program has files, too."""
    model = torch.nn.Linear(2, 2)
    level = str(tmp_path / "level")
    put(level, 1, state_of(model, torch.optim.SGD(model.parameters())))
    exported = lazysnap.export(level, tmp_path / "out", format="accelerate")
    directory = tmp_path / "named"
    name_snapshot(str(directory), Named(level, exported.run_id, exported.step))
    (directory / "history.csv").write_bytes(bytes(1000))

    assert lazysnap.export(level, directory, format="accelerate").size_bytes == exported.size_bytes
    assert (directory / "history.csv").exists()


def test_weights_that_safetensors_cannot_hold_are_refused_by_name(tmp_path):
    model = torch.nn.Linear(2, 2)
    state = state_of(model, torch.optim.SGD(model.parameters()))
    state["model"]["_extra_state"] = {"scale": 1.0}
    with pytest.raises(StateError, match=r"_extra_state.*safe_serialization=False"):
        export(state, tmp_path)


def test_a_snapshot_of_another_loop_is_refused(tmp_path):
    with pytest.raises(StateError, match="a snapshot of an Accelerator has the parts"):
        export({"model": {}, "rng": collect_rng()}, tmp_path)


def test_a_snapshot_without_a_random_state_is_refused_not_half_written(tmp_path):
    """Stock loads NumPy's state before torch's, and drops both without a word if one is missing."""
    model = torch.nn.Linear(2, 2)
    state = state_of(model, torch.optim.SGD(model.parameters()))
    del state["rng"]["numpy"]
    with pytest.raises(StateError, match=r"no random state of \['numpy'\]"):
        export(state, tmp_path)
    assert not (tmp_path / "out").exists()


def test_the_random_states_and_the_step_are_those_of_every_rank(tmp_path):
    """All else is of rank 0; the layout has one file of it for all ranks."""
    model = torch.nn.Linear(2, 2)
    second = {"rng": collect_rng(), "accelerate": {"step": 3}}
    second["rng"]["torch"] = torch.Generator().manual_seed(77).get_state()
    snapshot = Snapshot(str(tmp_path / "level"), 2, step=1)
    for rank, state in enumerate([state_of(model, torch.optim.SGD(model.parameters())), second]):
        walked = walk(state)
        boxes = {name: (tensor, None) for name, tensor in zip(walked.names, walked.tensors, strict=True)}
        write(snapshot, rank, boxes, walked.skeleton)

    lazysnap.export(tmp_path / "level", tmp_path / "out", format="accelerate")

    names = sorted(path.name for path in (tmp_path / "out").glob("random_states_*"))
    assert names == ["random_states_0.pkl", "random_states_1.pkl"]
    of_second = torch.load(tmp_path / "out" / "random_states_1.pkl", weights_only=False)
    assert torch.equal(of_second["torch_manual_seed"], second["rng"]["torch"])
    assert of_second["step"] == 3
