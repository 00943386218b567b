"""What docs/format.md says suffices: a reader that is written from that page alone reads every kind of snapshot."""

import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import format_reader  # noqa: E402

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine  # noqa: E402


def raw(value) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(value).tobytes()


def test_the_golden_snapshot_is_read_value_by_value():
    state = format_reader.newest(ROOT / "golden" / "v1").state()

    weight = np.arange(12, dtype="f4").reshape(3, 4) / 8
    assert np.array_equal(state["state_dict"]["net.weight"], weight)
    assert np.array_equal(state["state_dict"]["head.weight"], weight)
    assert np.array_equal(state["state_dict"]["double_complex"], np.array([1 + 2j, -3.5j]))
    assert state["state_dict"]["empty"].shape == (0, 5)
    assert state["state_dict"]["mask"].tolist() == [True, False, True]
    assert np.array_equal(state["optimizer_states"][0]["state"][0]["exp_avg"], weight * 2)
    assert state["small"] == {
        "none": None,
        "flag": True,
        "text": "Grüße",
        "big": 2**70,
        "infinite": float("inf"),
        "pair": (1, 2),
    }


def test_tied_and_complex_weights_of_the_golden_snapshot_are_read():
    state = format_reader.newest(ROOT / "golden" / "v1").state()

    assert np.array_equal(state["model"]["weight"], np.arange(12.0).reshape(3, 4))
    assert np.array_equal(state["model"]["tied"], state["model"]["weight"])
    assert np.array_equal(state["model"]["wide"], np.array([1 + 2j, -3.5j]))
    assert state["model"]["adapter"].tolist() == [[0.5, -0.25]]


@pytest.mark.slow
def test_what_a_training_stored_is_read(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    level = PersistentLevel(str(tmp_path), every_n_steps=1)
    config = SnapshotConfig(levels=(level,), job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=1))
    with SnapshotEngine(config, {"model": model, "optimizer": optimizer, "counters": {"seen": 3}}) as engine:
        model(torch.randn(8, 6, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        assert engine.boundary(1)

    state = format_reader.newest(tmp_path).state()

    assert {name: raw(value) for name, value in state["model"].items()} == {
        name: raw(value) for name, value in model.state_dict().items()
    }
    held = optimizer.state_dict()["state"]
    assert {number: {name: raw(value) for name, value in facts.items()} for number, facts in held.items()} == {
        int(number): {name: raw(value) for name, value in facts.items()}
        for number, facts in state["optimizer"]["state"].items()
    }
    assert state["counters"] == {"seen": 3}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 4), ("tp", 4)])
def test_tensors_of_which_ranks_hold_boxes_are_read_whole(worlds, tmp_path, strategy, size):
    url, reference = str(tmp_path / "level"), str(tmp_path / "reference.pt")
    worlds.run(size, "save", strategy=strategy, url=url, reference=reference)

    snapshot = format_reader.newest(Path(url))

    expected = torch.load(reference, weights_only=False)["model"]
    for rank in range(size):
        state = snapshot.state(rank)
        for name, value in state["model"].items():
            assert (value.shape, raw(value)) == (tuple(expected[name].shape), raw(expected[name])), name
        assert state["own"]["number"] == rank
        assert state["own"]["noise"].tolist() == [rank, rank]
