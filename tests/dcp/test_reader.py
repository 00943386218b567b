"""One process reads what one or several ranks wrote: every value bit by bit, by every key."""

import collections
import contextlib
import math
import os
import pathlib
import pickle
import shutil
import uuid

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saving import OTHER, RUN, Snapshot, bits, directory_of, rows, write, write_all
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys

from lazysnap.dcp import SnapshotLoadPlanner, SnapshotReader
from lazysnap.errors import ConfigError
from lazysnap.levels import open_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


def tensors() -> dict:
    """One of every kind, odd sizes, two blocks' worth."""
    torch.manual_seed(3)
    wide = torch.randn(5, 3, dtype=torch.float64)
    return {
        "weight": torch.randn(37, 11),
        "low": torch.randn(3, 5).to(torch.bfloat16),
        "half": torch.randn(7).half(),
        "double": wide,
        "scalar": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "counts": torch.arange(9, dtype=torch.int64).view(3, 3),
        "bytes": torch.arange(251, dtype=torch.uint8),
        "empty": torch.empty(0, 4),
        "fp8": torch.randn(9, 3).to(torch.float8_e4m3fn),
        "fp8b": torch.randn(5).to(torch.float8_e4m3fnuz),
        "complex": torch.complex(wide, wide.flip(0)),
        "complex64": torch.randn(4, 3, dtype=torch.complex64),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
    }


def blank(state):
    """The same structure, other values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None


def load(url, state, *, planner=None, **settings):
    reader = SnapshotReader(str(url), **settings)
    dcp.load(state, storage_reader=reader, planner=planner)
    return reader


@contextlib.contextmanager
def refused(*words):
    """What DCP raises is no ``Exception``; its text holds the error of ours."""
    with pytest.raises(CheckpointException) as caught:
        yield
    text = str(caught.value)
    assert [word for word in words if word not in text] == [], text


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert bits(found) == bits(expected)
    else:
        assert found == expected


# -------------------------------------------------------------------- values


@pytest.mark.parametrize(("world", "block_bytes"), [(1, None), (1, 7), (3, 4096), (4, 1000)])
def test_every_kind_of_tensor_comes_back_bit_by_bit(tmp_path, world, block_bytes):
    state = {"model": tensors()}
    cut = rows(world) if world > 1 else lambda name, tensor, rank: (None, tensor)
    write_all(Snapshot(str(tmp_path), world, block_bytes=block_bytes), state, cut)
    target = blank(state)

    reader = load(tmp_path, target)

    assert_same(target, state)
    assert reader.step == 10


def test_values_that_are_no_tensors_come_back_as_they_were(tmp_path):
    state = {
        "epoch": 3,
        "betas": (0.9, 0.999),
        "nested": {"list": [1, 2.5, None], "inf": math.inf, "deep": [{"a": 1}, {"b": [torch.ones(2), 7]}]},
        "pair": (torch.arange(3), "text", [torch.eye(2)]),
        "path": pathlib.PurePosixPath("/x"),
        "big": 1 << 80,
    }
    write_all(Snapshot(str(tmp_path), 1), state, lambda name, tensor, rank: (None, tensor))
    for planner in (None, SnapshotLoadPlanner()):
        target = blank(state)

        load(tmp_path, target, planner=planner)

        pair, expected = target.pop("pair"), dict(state).pop("pair")
        assert pair[0].equal(expected[0])
        assert pair[1] == "text"
        assert pair[2][0].equal(expected[2][0])
        deep = target["nested"].pop("deep")
        assert deep[0] == {"a": 1}
        assert deep[1]["b"][0].equal(torch.ones(2))
        assert deep[1]["b"][1] == 7
        assert target == {
            "epoch": 3,
            "betas": (0.9, 0.999),
            "nested": {"list": [1, 2.5, None], "inf": math.inf},
            "path": pathlib.PurePosixPath("/x"),
            "big": 1 << 80,
        }


def test_tied_tensors_are_stored_once_and_found_by_both_names(tmp_path):
    weight = torch.randn(6, 4)
    snapshot = Snapshot(str(tmp_path), 2)
    state = {"model": {"a": weight, "b": weight.clone()}}
    cut = rows(2)
    write_all(snapshot, state, lambda name, *at: cut(name, *at) if name == "model.a" else None, {"model.b": "model.a"})
    target = blank(state)

    load(tmp_path, target)

    assert target["model"]["b"].equal(weight)
    assert target["model"]["a"].equal(weight)


def test_one_rank_may_store_apart_what_another_one_stores_as_tied(tmp_path):
    snapshot = Snapshot(str(tmp_path), 2)
    a = torch.randn(4, 2)
    state = {"a": {"$": "tensor", "v": "a"}, "b": {"$": "tensor", "v": "b"}}
    write(snapshot, 0, {"a": (a[:2], ((4, 2), (0, 0), "shard"))}, state, {"b": "a"})
    second = {name: (a[2:].clone(), ((4, 2), (2, 0), "shard")) for name in "ab"}
    write(snapshot, 1, second, state)
    target = {"a": torch.zeros(4, 2), "b": torch.zeros(4, 2)}

    load(tmp_path, target)

    assert target["a"].equal(a)
    assert target["b"].equal(a)


def test_frozen_tensors_are_read_from_their_own_file(tmp_path):
    base, adapter = torch.randn(40, 8), torch.randn(8, 2)
    snapshot = Snapshot(str(tmp_path), 1)
    state = {"base": {"$": "tensor", "v": "base"}, "adapter": {"$": "tensor", "v": "adapter"}}
    write(snapshot, 0, {"adapter": (adapter, None)}, state, frozen={"base": base})
    target = {"base": torch.zeros(40, 8), "adapter": torch.zeros(8, 2)}

    load(tmp_path, target)

    assert target["base"].equal(base)
    assert target["adapter"].equal(adapter)


def test_another_dtype_is_cast_as_dcp_does_and_said(tmp_path, caplog):
    weight = torch.randn(5)
    write_all(Snapshot(str(tmp_path), 1), {"w": weight}, lambda name, tensor, rank: (None, tensor))
    target = {"w": torch.zeros(5, dtype=torch.bfloat16)}

    load(tmp_path, target)

    assert target["w"].equal(weight.bfloat16())
    assert "were cast" in caplog.text


def test_another_shape_is_an_error(tmp_path):
    write_all(Snapshot(str(tmp_path), 1), {"w": torch.randn(5)}, lambda name, tensor, rank: (None, tensor))

    with refused("w", "[5]", "[6]"):
        load(tmp_path, {"w": torch.zeros(6)})


# -------------------------------------------------------------------- keys


def training(wrap=lambda model: model):
    torch.manual_seed(5)
    inner = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model = wrap(inner)
    groups = [{"params": [inner[2].weight, inner[2].bias], "lr": 1e-2}, {"params": [inner[0].weight, inner[0].bias]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for _ in range(2):
        inner(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def names_of(model, optimizer):
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def save_training(url, model, optimizer, **facts):
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "epoch": 4}
    parameters = {"optimizer": names_of(model, optimizer)}
    write_all(
        Snapshot(str(url), 1, **{"parameters": parameters, **facts}), state, lambda name, tensor, rank: (None, tensor)
    )
    return state


def flat(state):
    if not isinstance(state, (dict, list)) or (isinstance(state, list) and not any(map(_is_container, state))):
        return {"": bits(state) if isinstance(state, torch.Tensor) else state}
    pairs = state.items() if isinstance(state, dict) else enumerate(state)
    return {f"{key}.{rest}": value for key, item in pairs for rest, value in flat(item).items()}


def _is_container(value):
    return isinstance(value, (dict, torch.Tensor))


def prefixed(model):
    """As DDP and torch.compile name parameters; neither is needed for it."""
    return torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"_orig_mod": model})})


@pytest.mark.parametrize(
    ("wrap", "planner", "is_flat"),
    [
        (lambda model: model, DefaultLoadPlanner, False),
        (lambda model: model, SnapshotLoadPlanner, True),
        (prefixed, DefaultLoadPlanner, True),
        (prefixed, SnapshotLoadPlanner, False),
    ],
    ids=["plain", "plain, flat", "wrapped, flat", "wrapped"],
)
def test_get_state_dict_load_set_state_dict_brings_the_training_back(tmp_path, wrap, planner, is_flat):
    saved, saved_optimizer = training(wrap)
    save_training(tmp_path, saved, saved_optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    inner = saved.module._orig_mod if wrap is prefixed else saved
    expected = get_state_dict(inner, saved_optimizer, options=options)
    model, optimizer = training()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    optimizer.param_groups[0]["lr"] = 77.0
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state}

    dcp.load(state, storage_reader=SnapshotReader(str(tmp_path)), planner=planner())

    assert flat(state["model"]) == flat(expected[0])
    assert flat(state["optimizer"]) == flat(expected[1])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    assert flat(optimizer.state_dict()) == flat(saved_optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_a_state_dict_with_wrappers_in_its_names_finds_what_was_saved_without(tmp_path):
    saved, optimizer = training()
    save_training(tmp_path, saved, optimizer)
    target = {"model": blank(dict(prefixed(saved).state_dict()))}
    assert all(key.startswith("module._orig_mod.") for key in target["model"])

    load(tmp_path, target)

    assert flat(target["model"]) == flat(dict(prefixed(saved).state_dict()))


@pytest.mark.parametrize("has_names", [True, False])
def test_the_optimizers_own_form_is_loaded_with_its_integer_keys(tmp_path, has_names):
    saved, saved_optimizer = training()
    saved_optimizer.state[saved[0].bias]["extra"] = 5
    save_training(tmp_path, saved, saved_optimizer, **({} if has_names else {"parameters": None}))
    _, optimizer = training()
    optimizer.state_dict()["state"][3]["extra"] = 0
    state = {"optimizer": optimizer.state_dict()}
    state["optimizer"]["state"][3]["extra"] = 0

    load(tmp_path, state, planner=SnapshotLoadPlanner())

    assert list(state["optimizer"]["state"]) == [0, 1, 2, 3]
    assert flat(state["optimizer"]) == flat(saved_optimizer.state_dict())
    optimizer.load_state_dict(state["optimizer"])
    assert optimizer.state[optimizer.param_groups[1]["params"][1]]["extra"] == 5


def test_lists_of_parameters_take_the_spelling_of_the_state_that_is_loaded(tmp_path):
    class Averaged(torch.nn.Module):
        """A wrapper that ``get_state_dict`` does not know: its ``module`` stays in the names."""

        def __init__(self, model):
            super().__init__()
            self.module = model

    saved, saved_optimizer = training(Averaged)
    save_training(tmp_path, saved, saved_optimizer)
    model, optimizer = training(Averaged)
    _, state = get_state_dict(model, optimizer)
    expected = [list(group["params"]) for group in state["param_groups"]]
    assert expected[0][0] == "module.2.weight"

    load(tmp_path, {"optimizer": state})

    assert [group["params"] for group in state["param_groups"]] == expected


def test_names_that_are_numbers_of_other_parameters_are_not_taken_for_them(tmp_path, caplog):
    saved = torch.nn.ParameterList([torch.nn.Parameter(torch.full((2,), float(n))) for n in range(3)])
    optimizer = torch.optim.SGD(list(saved)[::-1], lr=0.1, momentum=0.9)
    sum((n + 1) * p.sum() for n, p in enumerate(saved)).backward()
    optimizer.step()
    save_training(tmp_path, saved, optimizer)
    state = {"optimizer": blank(optimizer.state_dict())}

    load(tmp_path, state, planner=SnapshotLoadPlanner())

    assert flat(state["optimizer"]) == flat(optimizer.state_dict())
    assert "cannot be told from their numbers" in caplog.text


def test_keys_that_read_the_same_are_told_apart(tmp_path):
    state = {"a": {"b.c": torch.tensor(1), 1: "int", "1": "text"}, "a.b": {"c": torch.tensor(2)}}
    write_all(Snapshot(str(tmp_path), 1), state, lambda name, tensor, rank: (None, tensor))

    found = _load_state_dict_from_keys(storage_reader=SnapshotReader(str(tmp_path)))

    assert found == {"a": {"b.c": torch.tensor(1), "1": "int", "1#2": "text"}, "a.b": {"c#2": torch.tensor(2)}}


def test_a_key_that_is_not_there_is_an_error_that_names_it(tmp_path):
    write_all(Snapshot(str(tmp_path), 1), {"w": torch.ones(2)}, lambda name, tensor, rank: (None, tensor))

    with refused("Missing key", "nothing.of.the.kind"):
        load(tmp_path, {"nothing": {"of": {"the": {"kind": torch.ones(2)}}}})


def test_a_counter_keeps_its_integer_keys(tmp_path):
    state = {"milestones": collections.Counter({30: 1, 80: 2})}
    write_all(Snapshot(str(tmp_path), 1), state, lambda name, tensor, rank: (None, tensor))
    target = {"milestones": collections.Counter({30: 0, 80: 0})}

    load(tmp_path, target, planner=SnapshotLoadPlanner())

    assert target == state


# -------------------------------------------------------------------- without a model


def test_a_load_without_a_model_gives_everything_once_with_optimizers_by_name(tmp_path):
    saved, optimizer = training()
    save_training(tmp_path, saved, optimizer)
    found = {}

    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=SnapshotReader(str(tmp_path)), planner=planner, no_dist=True)

    model_state, optimizer_state = get_state_dict(saved, optimizer)
    assert found["epoch"] == 4
    assert flat(found["model"]) == flat(dict(model_state))
    assert sorted(flat(found["optimizer"])) == sorted(flat(optimizer_state))
    assert flat(found["optimizer"]) == flat(optimizer_state)


def test_a_load_without_a_model_of_some_keys(tmp_path):
    saved, optimizer = training()
    save_training(tmp_path, saved, optimizer)

    found = _load_state_dict_from_keys({"model"}, storage_reader=SnapshotReader(str(tmp_path)))

    assert list(found) == ["model"]
    assert flat(found["model"]) == flat(dict(saved.state_dict()))


def test_the_metadata_lists_values_once_and_can_be_copied(tmp_path):
    saved, optimizer = training()
    save_training(tmp_path, saved, optimizer)

    metadata = SnapshotReader(str(tmp_path)).read_metadata()

    keys = metadata.state_dict_metadata
    assert set(keys) == set(metadata.planner_data)
    assert "optimizer.state.0.exp_avg" not in list(keys)
    assert "optimizer.state.0.exp_avg" in keys
    assert keys.get("optimizer.state.0.exp_avg") == keys["optimizer.state.2.weight.exp_avg"]
    assert keys.get("none of these") is None
    with pytest.raises(KeyError):
        keys["none of these"]
    assert isinstance(keys["epoch"], BytesStorageMetadata)
    assert pickle.loads(pickle.dumps(metadata)).state_dict_metadata == dict(keys)


# -------------------------------------------------------------------- which snapshot


def save_step(url, step, run=RUN, world=2):
    write_all(Snapshot(str(url), world, step=step, run=run), {"w": torch.full((4,), float(step))}, rows(world))


def loaded(url, **settings):
    target = {"w": torch.zeros(4)}
    reader = load(url, target, **settings)
    assert target["w"].tolist() == [reader.step] * 4
    return reader.step


def test_latest_is_the_newest_step_of_the_newest_run(tmp_path):
    for step in (3, 20):
        save_step(tmp_path, step)
    for step in (1, 5):
        save_step(tmp_path, step, OTHER)

    assert loaded(tmp_path) == 5
    assert loaded(tmp_path, step=20) == 20
    assert loaded(tmp_path, step=3) == 3


def test_a_step_that_two_runs_have_is_that_of_the_newer_run_and_world(tmp_path):
    save_step(tmp_path, 3)
    write_all(Snapshot(str(tmp_path), 3, step=3, run=OTHER), {"w": torch.full((4,), 9.0)}, rows(3))
    target = {"w": torch.zeros(4)}

    load(tmp_path, target, step=3)

    assert target["w"].tolist() == [9.0] * 4


def test_the_shards_of_a_snapshot_may_stand_in_two_directories(tmp_path):
    """A rank whose name is taken by an older run goes to the next one."""
    cut = rows(2)
    old, new = (Snapshot(str(tmp_path), 2, step=3, run=run) for run in (RUN, OTHER))
    write_all(old, {"w": torch.full((4,), 1.0)}, lambda name, t, rank: cut(name, t, rank))
    (tmp_path / directory_of(3) / "node-00001-of-00002.json").unlink()
    (tmp_path / directory_of(3) / "node-00001-of-00002.safetensors").unlink()
    write_all(new, {"w": torch.full((4,), 2.0)}, cut)
    assert len(list(tmp_path.iterdir())) == 2
    target = {"w": torch.zeros(4)}

    load(tmp_path, target)

    assert target["w"].tolist() == [2.0] * 4


def test_a_kept_snapshot_is_found_by_its_name(tmp_path):
    for step in (3, 20):
        save_step(tmp_path, step)
    store = open_store(str(tmp_path))
    for entry in store.inventory().entries:
        if entry.step == 3:
            store.keep(entry, "before-anneal")

    assert loaded(tmp_path, step="before-anneal") == 3
    with refused("no complete snapshot", "after-anneal"):
        loaded(tmp_path, step="after-anneal")


def test_a_reader_looks_again_at_every_load(tmp_path):
    save_step(tmp_path, 3)
    reader = SnapshotReader(str(tmp_path))
    dcp.load({"w": torch.zeros(4)}, storage_reader=reader)
    assert reader.step == 3
    save_step(tmp_path, 4)

    dcp.load({"w": torch.zeros(4)}, storage_reader=reader)

    assert reader.step == 4


def test_an_incomplete_snapshot_is_passed_over_and_said(tmp_path, caplog):
    save_step(tmp_path, 3)
    save_step(tmp_path, 4)
    (tmp_path / directory_of(4) / "node-00001-of-00002.json").unlink()

    assert loaded(tmp_path) == 3
    assert "step 4 is not complete" in caplog.text
    assert "no valid manifest there has rank 1; 1 of 2 ranks are missing" in caplog.text
    with refused("step 4 is not complete", "rank 1;"):
        loaded(tmp_path, step=4)


def test_shards_of_two_starts_of_a_training_are_no_snapshot(tmp_path):
    cut = rows(2)
    for start, rank in (("a" * 16, 0), ("b" * 16, 1)):
        snapshot = Snapshot(str(tmp_path), 2, start=start)
        one = torch.full((4,), 1.0)
        offsets, box = cut("w", one, rank)
        write(snapshot, rank, {"w": (box, ((4,), offsets, "shard"))}, {"w": {"$": "tensor", "v": "w"}})

    with refused("not complete"):
        loaded(tmp_path)


def test_nothing_there_is_an_error(tmp_path):
    with refused("no complete snapshot"):
        loaded(tmp_path / "none")


@pytest.mark.parametrize("step", [-1, True, "no/name", "", 1.5])
def test_a_step_that_cannot_be_is_refused(tmp_path, step):
    with pytest.raises(ConfigError, match="step must be"):
        SnapshotReader(str(tmp_path), step=step)


# -------------------------------------------------------------------- where from, and how much


def test_any_fsspec_url_can_be_read():
    url = f"memory://{uuid.uuid4().hex}"
    state = {"model": tensors()}
    write_all(Snapshot(url, 3), state, rows(3))
    target = blank(state)

    load(url, target)

    assert_same(target, state)


def test_what_is_not_asked_for_is_not_read(tmp_path):
    state = {"a": torch.randn(50_000), "b": torch.randn(50_000), "c": torch.randn(3)}
    manifests = write_all(Snapshot(str(tmp_path), 2, block_bytes=4096), state, rows(2))
    target = {"c": torch.zeros(3)}

    few = load(tmp_path, target).bytes_read

    assert target["c"].equal(state["c"])
    # The block of the header and that of the tensor, of each shard.
    assert few <= 4 * 4096
    target = blank(state)
    everything = load(tmp_path, target).bytes_read
    assert_same(target, state)
    assert everything == sum(manifest.size_bytes for manifest in manifests)


def test_a_block_that_many_tensors_share_is_read_once(tmp_path):
    state = {"many": {str(n): torch.randn(7) for n in range(300)}}
    (manifest,) = write_all(Snapshot(str(tmp_path), 1), state, lambda name, tensor, rank: (None, tensor))
    target = blank(state)

    assert load(tmp_path, target).bytes_read == manifest.size_bytes
    assert_same(target, state)


def test_a_snapshot_that_is_deleted_after_it_was_opened_is_read_to_its_end(tmp_path):
    state = {"w": torch.randn(900, 20)}
    write_all(Snapshot(str(tmp_path), 2, block_bytes=4096), state, rows(2))
    target, descriptors = blank(state), len(os.listdir("/proc/self/fd"))

    class Deleting(DefaultLoadPlanner):
        """Deletes the snapshot between the plan and the reads."""

        def create_local_plan(self):
            shutil.rmtree(tmp_path / directory_of(10))
            return super().create_local_plan()

    load(tmp_path, target, planner=Deleting())

    assert_same(target, state)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_tensors_of_inference_mode_are_filled(tmp_path):
    state = {str(n): torch.randn(9, 400) for n in range(40)}
    write_all(Snapshot(str(tmp_path), 2, block_bytes=1000), state, rows(2))
    with torch.inference_mode():
        target = {key: torch.zeros_like(value) for key, value in state.items()}
        load(tmp_path, target)

    assert [bits(value) for value in target.values()] == [bits(value) for value in state.values()]


@pytest.mark.gpu
def test_tensors_on_a_device_are_filled(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    state = {"model": tensors(), "large": torch.randn(3_000_000)}
    write_all(Snapshot(str(tmp_path), 3), state, rows(3))
    target = blank(state)
    target["model"] = {key: value.cuda() for key, value in target["model"].items()}
    target["large"] = target["large"].cuda()

    load(tmp_path, target)

    assert all(value.is_cuda for value in target["model"].values())
    target = {"model": {key: value.cpu() for key, value in target["model"].items()}, "large": target["large"].cpu()}
    assert_same(target, state)
