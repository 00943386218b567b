"""HSDP: the replicas of a shard on one node share it out; each node has a copy of its own, and needs no other one."""

import math
from collections import Counter, defaultdict

import pytest
from safetensors import safe_open
from support.snapshots import key_of

from lazysnap.levels import open_store

RANKS = 4  # replicated over 2, sharded over 2: ranks 0 and 2 hold the same, and 1 and 3


def shares(job):
    """By rank: bytes of its parts of DTensors; by name: bytes in all shards, and in the whole tensor."""
    store = open_store(job.levels[0]["url"])
    by_rank, held, whole = Counter(), Counter(), {}
    for entry in store.inventory().entries:
        manifest = store.read_manifest(entry)
        meta = manifest.of(entry.rank).meta
        with safe_open(f"{store.url}/{store.place(entry).file_path}", "pt") as shard:
            for name, facts in meta.tensors.items():
                if facts.get("scope") == "shard":
                    tensor = shard.get_tensor(key_of(manifest, entry.rank, name))
                    by_rank[entry.rank] += tensor.nbytes
                    held[name] += tensor.nbytes
                    whole[name] = math.prod(facts["global_shape"]) * tensor.itemsize
    return by_rank, held, whole


LEVEL = {"every_n_steps": 1, "keep_last": 2}


@pytest.mark.parametrize(
    ("layout", "shared", "copies"), [("aaaa", None, 1), ("aabb", False, 2), ("aabb", None, 1), ("abab", False, 1)]
)
def test_each_node_holds_what_its_ranks_have_once_in_equal_shares(make_job, tmp_path, layout, shared, copies):
    """And all nodes together, at a level that they all see."""
    nodes = tuple(sorted({f"node-{letter}" for letter in layout}))
    by_rank = {str(rank): {"node": f"node-{letter}"} for rank, letter in enumerate(layout)}
    job = make_job(nodes=nodes, levels=[LEVEL | {"url": str(tmp_path / "level"), "shared": shared}])
    assert set(job.run("hsdp", RANKS, stop_at=1, by_rank=by_rank, wait_durable=True)) == {9}, job.output()

    found, held, whole = shares(job)

    assert held == {name: copies * size for name, size in whole.items()}
    groups = defaultdict(list)
    for rank in range(RANKS):
        groups[layout[rank] if copies == 2 else "", rank % 2].append(found[rank])
    for same in groups.values():
        assert max(same) <= 1.1 * min(same), found


@pytest.mark.parametrize("layout", ["aabb", "aaab"])
@pytest.mark.parametrize("place", ["memory", "storage"])
def test_ranks_resume_from_the_memory_of_their_own_node(make_job, end_keepers, layout, place):
    nodes = tuple(sorted({f"node-{letter}" for letter in layout}))
    by_rank = {str(rank): {"node": f"node-{letter}"} for rank, letter in enumerate(layout)}
    job = make_job(nodes=nodes, **({"levels": []} if place == "memory" else {}))
    codes = job.run("hsdp", RANKS, stop_at=4, by_rank=by_rank, wait_durable=place == "storage")
    assert set(codes) == {9}, job.output()
    stopped = {line[3] for line in job.events("stopped")}
    if place == "storage":
        end_keepers(job)

    assert set(job.run("hsdp", RANKS, look=True, by_rank=by_rank)) == {0}, job.output()

    level = "memory" if place == "memory" else job.levels[0]["url"]
    assert [line[2:4] for line in job.events("resumed")] == [["4", level]] * RANKS, job.output()
    assert {line[4] for line in job.events("resumed")} == stopped
