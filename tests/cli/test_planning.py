"""``lazysnap plan``: what is said before a training is what the training then takes."""

import pytest
import torch
from cli_level import run, run_json

from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine


def test_what_is_planned_is_what_a_training_takes(capsys, tmp_path):
    model = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    config = SnapshotConfig(levels=(PersistentLevel(str(tmp_path), every_n_steps=1),))
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    model(torch.ones(2, 1000)).sum().backward()
    optimizer.step()
    assert engine.wait_ready(60)
    assert engine.boundary(1)
    assert engine.wait(1, until="captured", timeout_s=60)

    code, planned = run_json(capsys, "plan", "--params", "1m", "--optimizer", "adamw")

    assert code == 0
    assert planned["captured_bytes"] == pytest.approx(engine.statistics().shard_bytes, rel=0.01)
    assert planned["slots_per_rank"] == len(engine._client.slots())
    assert engine.close()


def test_ranks_of_a_node_share_one_copy_and_sharded_ones_split_it_between_nodes(capsys):
    _, ddp = run_json(capsys, "plan", "--params", "7b", "--ranks", "16", "--nodes", "2")
    _, fsdp = run_json(capsys, "plan", "--params", "7b", "--ranks", "16", "--nodes", "2", "--sharding", "fsdp")

    assert ddp["captured_bytes"] == fsdp["captured_bytes"] == 84e9
    # Two slots more for what the other node protects, and of what each node has alone the mirror of two steps.
    assert ddp["memory_per_node_bytes"] == 7 * 84e9
    assert (fsdp["memory_per_node_bytes"], fsdp["parity_per_node_bytes"]) == ((7 + 2) * 42e9, 2 * 42e9)
    for sharding, held in (("ddp", 84e9), ("fsdp", 42e9)):
        words = ["--params", "7b", "--ranks", "16", "--nodes", "2", "--sharding", sharding, "--no-redundancy"]
        assert run_json(capsys, "plan", *words)[1]["memory_per_node_bytes"] == 5 * held
        assert run_json(capsys, "plan", *words, "--cpu")[1]["memory_per_node_bytes"] == 4 * held
    assert ddp["stored_per_snapshot_bytes"] == fsdp["stored_per_snapshot_bytes"] == 84e9


def test_a_frozen_base_is_not_captured_at_each_step(capsys):
    _, planned = run_json(capsys, "plan", "--params", "1b", "--trainable", "10m", "--dtype", "bf16")

    assert planned["captured_bytes"] == 10e6 * 2 * 3
    assert planned["frozen_bytes"] == 990e6 * 2
    assert planned["memory_per_node_bytes"] == planned["slots_per_rank"] * 60e6 + 990e6 * 2

    words = [
        "--params",
        "1b",
        "--trainable",
        "10m",
        "--dtype",
        "bf16",
        "--ranks",
        "4",
        "--nodes",
        "2",
        "--no-redundancy",
    ]
    _, ddp = run_json(capsys, "plan", *words)
    _, fsdp = run_json(capsys, "plan", *words, "--sharding", "fsdp")
    assert ddp["memory_per_node_bytes"] == ddp["slots_per_rank"] * 60e6 + 990e6 * 2
    assert fsdp["memory_per_node_bytes"] == ddp["memory_per_node_bytes"] / 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--params", "seven"], "such as 7b"),
        (["--params", "7b", "--rate", "fast"], "such as 2GB/s"),
        (["--params", "7b", "--ranks", "7", "--nodes", "2"], "as many on every node"),
        (["--params", "1m", "--trainable", "2m"], "is more than --params"),
    ],
)
def test_numbers_that_make_no_sense_are_one_clear_error(capsys, words, said):
    try:
        code = run("plan", *words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err
