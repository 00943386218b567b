"""Saved by one world under one strategy, loaded by another world under another: the same bits."""

import pytest
import torch
from saving import OTHER, Snapshot, rows, write_all
from support.damage import flip

PAIRS = [
    # saved by, loaded by
    (("ddp", 2), ("fsdp", 2)),
    (("ddp", 2), ("plain", 1)),
    (("fsdp", 4), ("fsdp", 3)),
    (("fsdp", 4), ("tp", 4)),
    (("fsdp", 2), ("hsdp", 4)),
    (("tp", 4), ("fsdp", 2)),
    (("hsdp", 4), ("fsdp", 3)),
    (("plain", 1), ("tp", 4)),
    (("compiled", 1), ("ddp", 2)),
]


@pytest.fixture(scope="module")
def saved(worlds, tmp_path_factory):
    """Snapshots by who saved them, each written once."""
    places = {}

    def place(strategy, size):
        if (strategy, size) not in places:
            root = tmp_path_factory.mktemp("saved")
            facts = {"url": str(root / "level"), "reference": str(root / "reference.pt")}
            worlds.run(size, "save", strategy=strategy, **facts)
            places[strategy, size] = facts
        return places[strategy, size]

    return place


@pytest.mark.sampled
@pytest.mark.parametrize(("origin", "target"), PAIRS, ids=lambda value: f"{value[0]}x{value[1]}")
def test_weights_and_optimizer_are_the_same_bits(worlds, saved, origin, target):
    number = PAIRS.index((origin, target))

    # Every other pair by the other form and planner.
    options = {"flattened": number % 2 == 1, "planner": "snapshot" if number % 3 == 0 else "default"}
    found = worlds.run(target[1], "load", strategy=target[0], **saved(*origin), **options)

    assert {rank["step"] for rank in found} == {10}
    # What belongs to a rank alone is its own again if as many load as saved, else that of rank 0.
    same = origin[1] == target[1]
    expected = [rank if same else 0 for rank in range(target[1])]
    assert [rank["own"] for rank in found] == [[own, [float(own)] * 2] for own in expected]


def save_step(url, step, run=OTHER):
    write_all(Snapshot(url, 2, step=step, run=run), {"w": torch.full((4,), float(step))}, rows(2))


@pytest.mark.parametrize("planner", ["default", "snapshot"])
def test_ranks_that_looked_at_different_moments_read_one_snapshot(worlds, tmp_path, planner):
    """The oldest of what they found: others may not see yet what one of them saw later."""
    url = str(tmp_path)
    for step in (3, 8):
        save_step(url, step)

    for steps in ([3, 8], [8, 3]):
        found = worlds.run(2, "load_bare", url=url, steps=steps, planner=planner)

        assert found == [{"step": 3, "w": [3.0] * 4}] * 2


def test_every_rank_hears_of_a_lost_shard_and_none_waits_for_ever(worlds, tmp_path):
    save_step(str(tmp_path), 3)
    (shard,) = tmp_path.glob("*/node-00001-of-00002.safetensors")
    shard.unlink()

    found = worlds.run(3, "fail", url=str(tmp_path))

    assert [("the shard of rank 1 is lost" in rank["error"]) for rank in found] == [True] * 3


def test_every_rank_hears_of_a_damaged_block_that_only_one_reads(worlds, tmp_path):
    save_step(str(tmp_path), 3)
    (shard,) = tmp_path.glob("*/node-00001-of-00002.safetensors")
    flip(shard)

    found = worlds.run(2, "fail", url=str(tmp_path), own_rows=True)

    assert [shard.name in rank["error"] for rank in found] == [True] * 2
    assert all("dict_keys([1])" in rank["error"] for rank in found)


def test_each_rank_reads_the_shards_that_it_needs_and_no_others(worlds, tmp_path):
    state = {"w": torch.arange(40_000.0).view(400, 100)}
    manifests = write_all(Snapshot(str(tmp_path), 4, block_bytes=4096), state, rows(4))

    found = worlds.run(4, "load_rows", url=str(tmp_path))

    assert [rank["good"] for rank in found] == [True] * 4
    assert [rank["bytes"] for rank in found] == [manifest.size_bytes for manifest in manifests]


def test_what_a_planner_has_to_keep_is_missed(worlds, tmp_path):
    save_step(str(tmp_path), 3)

    found = worlds.run(2, "fail", url=str(tmp_path), forgetful=True)

    assert all("dropped LoadPlan.storage_data" in rank["error"] for rank in found)
