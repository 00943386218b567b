"""What one rank does at a restart, and per snapshot, does not grow with the number of ranks; counted, never timed."""

import contextlib
import re
import uuid

import pytest
import torch
from support.names import START

from benchmarks import simulated
from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.errors import ShardCorrupt
from lazysnap.levels.blocks import MemoryBlocks
from lazysnap.ranks.world import World
from lazysnap.resolver import Entry
from lazysnap.restore.assembly import Assembly
from lazysnap.restore.part import complete, nearest_first
from lazysnap.restore.restart import Restart, fetch
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.reader import OpenShard

RUN = "0" * 16
MANY = 96


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_rank_of_the_same_world_reads_as_much_whatever_their_number(kind):
    for ranks in (16, 64, 160):
        found = simulated.restarts(kind, ranks, ranks)

        assert [one["survey_reads"] for one in found] == [simulated.KEPT, 0, 0]  # a manifest per node, shared out
        assert [one["lists"] for one in found] == [1 + simulated.KEPT, 0, 0]  # one lists for all
        # DDP stores once what all nodes hold: each rank reads its own file and those of a few nodes.
        assert {one["files_opened"] for one in found} <= ({1} if kind == "fsdp" else {min(ranks // 8, 8), 9})


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_rank_of_half_the_world_does_too(kind):
    for ranks in (16, 64, 160):
        found = simulated.restarts(kind, ranks, ranks // 2)

        assert max(one["survey_reads"] for one in found) == simulated.KEPT
        assert max(one["files_opened"] for one in found) <= (4 if kind == "fsdp" else 10)


def test_a_node_asks_a_level_as_little_after_a_snapshot_whatever_their_number():
    asked = [simulated.retention(ranks)["operations"] for ranks in (8, 16, 128)]

    assert asked == [7, 6, 6]


def test_the_coordinator_gets_and_sends_one_message_per_node_and_snapshot():
    assert [simulated.coordinator(ranks)["messages"] for ranks in (8, 128)] == [2, 32]


def test_what_protection_takes_of_a_node_does_not_grow_with_their_number():
    per_node = ("link_messages_per_node", "read_requests_per_node", "read_parts_per_node", "peers_bytes")
    few, more = simulated.protection(8 * 8), simulated.protection(128 * 8)

    for name in per_node:
        assert more[name] == pytest.approx(few[name], rel=0.05), name
    assert few["read_parts_per_node"] == pytest.approx(2, rel=0.1)  # each of two parities is made of a part
    for name, digits in (("parity_bytes", 64), ("link_bytes_per_node", 16)):  # of node numbers and names
        assert more[name] <= few[name] + digits, name


class Listening(World):
    """Notes what this rank tells the others."""

    def __init__(self):
        super().__init__()
        self.said = []

    def exchange_after(self, what, work):
        [answer] = super().exchange_after(what, work)
        self.said.append((what, answer))
        return [answer]


def form(value):
    """Of what is told: its lists, and the names of fields."""
    if isinstance(value, dict):
        return {name: form(item) for name, item in value.items() if name != "mark"}  # of directories, not of URLs
    if isinstance(value, list | tuple):
        forms = [form(item) for item in value]
        return [one for number, one in enumerate(forms) if one not in forms[:number] or one == "value"]
    return "value"


def forms(said):
    return [(re.sub("[0-9]+", "N", what), form(answer)) for what, answer in said]


def test_the_simulated_restart_tells_the_others_what_a_real_one_tells(tmp_path):
    levels = (PersistentLevel(tmp_path, every_n_steps=1),)
    config = SnapshotConfig(levels=levels, job_id=uuid.uuid4().hex, keeper_timeout_s=60)
    with contextlib.closing(SnapshotEngine(config, {"state": {"weight": torch.ones(3)}})) as engine:
        assert engine.wait_ready(60)
        assert engine.boundary(1)
        assert engine.flush(240)
        world = Listening()
        assert fetch("latest", Restart(config, engine._source, engine._client, engine._identity, world)).step == 1

    real = forms(world.said)
    assert [what for what, _ in real] == [
        "what is in memory",
        "what is on storage",
        "what of it is whole",
        "reading step N",
    ]
    for ranks in (8, 16):
        assert forms(simulated.restart("ddp", 16, ranks, 0)["said"]) == real


def test_the_simulated_plan_tells_the_others_what_they_ask_for():
    """The engine and its answers are the real ones: where it sits, when it began, what it shares."""
    said = simulated.plan("ddp", 16)["said"]

    whats = [what for what, _ in said]
    levels = ["trying levels", "looking for what rank 0 wrote"]
    assert whats == [
        "making the engine",
        "making the engine",
        "linking keepers",
        "where keepers are",
        *levels,
        "the first boundary",
    ]


def shard(rank, rows):
    """One rank's part of ``x``, which has a row for each rank, and a tensor of its own."""
    specs = [TensorSpec("x", "F32", (len(rows), 2)), TensorSpec("own", "F32", (1,))]
    layout = Layout.plan(specs)
    facts = {"x": {"scope": "shard", "global_shape": [MANY, 2], "offsets": [rows[0], 0]}}
    meta = CaptureMeta(RUN, START, 1, rank, MANY, 1, tensors=facts)
    return OpenShard(rank, meta, layout, MemoryBlocks(memoryview(b""), None, f"rank {rank}"))


def opened(wanted, rows_of, *, lost=(), near=0, neighbours=()):
    """The ranks whose shards rank 0 opens for some rows of ``x``; ``rows_of`` gives each rank's."""
    chosen = {n: Entry("x", 1, RUN, START, 1, n, MANY, "d") for n in range(MANY) if n not in lost}
    assembly = Assembly(0, lambda name, shape: ((wanted[0], 0), (len(wanted), 2)))
    order = [0]
    assembly.add(shard(0, rows_of(0)))
    assembly.want(["x", "own"])
    left = nearest_first(chosen, near, neighbours)
    left.remove(0)

    def add(rank):
        order.append(rank)
        assembly.add(shard(rank, rows_of(rank)))

    complete(assembly, left, add, "step 1")
    return order


def test_rows_in_the_order_of_the_ranks_are_found_near_the_rank_that_is_most_like_this_one():
    assert sorted(opened(range(50, 53), lambda rank: range(rank, rank + 1), near=51)) == [0, 50, 51, 52]


def test_rows_in_any_other_order_are_found_in_the_end():
    order = opened(range(1, 2), lambda rank: range(-rank % MANY, -rank % MANY + 1))

    assert order[-1] == MANY - 1
    assert len(set(order)) == len(order) <= MANY


def test_ranks_of_the_same_node_are_asked_first():
    def rows_of(rank):
        return range(-rank % MANY, -rank % MANY + 1)

    assert opened(range(1, 2), rows_of, neighbours=(95,)) == [0, 95]


def test_a_row_that_is_nowhere_is_named():
    with pytest.raises(ShardCorrupt, match="step 1: x: a part of it is in no shard within reach"):
        opened(range(50, 53), lambda rank: range(rank, rank + 1), lost=[51])
