"""Several ranks that die together and start again with the same world: all resume the same step, bit for bit."""

import pytest
from safetensors import safe_open

from lazysnap.levels import open_store


@pytest.mark.parametrize(("kind", "place"), [("ddp", "memory"), ("ddp", "storage"), ("fsdp", "storage")])
def test_ranks_resume_as_if_nothing_had_happened(make_job, end_keepers, kind, place):
    whole, broken = make_job("whole", levels=[]), make_job("broken")
    assert set(whole.run(kind, 2)) == {0}, whole.output()

    assert set(broken.run(kind, 2, stop_at=4, wait_durable=True)) == {9}, broken.output()
    [stopped], owned = broken.stopped(), broken.own("stopped")
    if place == "storage":
        end_keepers(broken)
    assert set(broken.run(kind, 2)) == {0}, broken.output()

    level = "memory" if place == "memory" else broken.levels[0]["url"]
    assert broken.origins() == [["4", level, stopped]] * 2, broken.output()
    assert broken.own("resumed") == owned
    assert len({tuple(mine) for mine in owned}) == 2
    assert broken.results() == whole.results()


@pytest.mark.parametrize("kind", ["hsdp", "tp"])
def test_ranks_of_a_mesh_find_their_own_state_random_numbers_included(make_job, kind):
    job = make_job(levels=[])
    assert set(job.run(kind, 4, stop_at=4)) == {9}, job.output()
    [stopped], owned = job.stopped(), job.own("stopped")

    assert set(job.run(kind, 4, look=True)) == {0}, job.output()

    assert job.origins() == [["4", "memory", stopped]] * 4
    assert job.own("resumed") == owned
    assert len({draws for *_, draws in owned}) == 4
    assert "not continued" not in job.output()


def test_snapshots_need_no_collective(job):
    """None on the group of this package, and none of its own on that of the training: it does not know that one."""
    assert set(job.run("ddp", 2)) == {0}, job.output()

    for rank in ("0", "1"):
        counts = [int(line[2]) for line in job.events("collectives") if line[0] == rank]
        assert len(counts) == 8
        # The first boundary plans together; from then on nothing is exchanged.
        assert len(set(counts)) == 1, counts


def test_each_rank_captures_its_share(job):
    """Replicated state stands once in the shards of a node, whatever the number of its ranks, in equal shares."""
    job.run("ddp", 2, stop_at=1, wait_durable=True)

    store = open_store(job.levels[0]["url"])
    shared = []
    for entry in store.inventory().entries:
        meta = store.read_manifest(entry).meta
        common = {name for name, facts in meta.tensors.items() if facts.get("scope") == "full"}
        with safe_open(job.root / "level" / store.place(entry).shard_path, "pt") as shard:
            shared.append(sum(shard.get_tensor(name).nbytes for name in common))
    parameters = 37 * 24 + 2 * 24 + (24 + 1) * 96 + (96 + 1) * 24 + 24 * 37 + 3
    assert len(shared) == 2
    assert sum(shared) == 3 * 4 * parameters  # and two moments of each, in float32
    assert max(shared) < 1.05 * min(shared)


@pytest.mark.parametrize("place", ["memory", "storage"])
def test_sharded_ranks_of_two_nodes_resume_without_each_others_keepers(make_job, end_keepers, place):
    nodes = ("node-a", "node-b")
    by_rank = {str(rank): {"node": nodes[rank // 2]} for rank in range(4)}
    job = make_job(nodes=nodes, **({"levels": []} if place == "memory" else {}))
    assert set(job.run("fsdp", 4, stop_at=3, by_rank=by_rank, wait_durable=place == "storage")) == {9}, job.output()
    [stopped], owned = job.stopped(), job.own("stopped")
    if place == "storage":
        end_keepers(job)

    assert set(job.run("fsdp", 4, look=True, by_rank=by_rank)) == {0}, job.output()

    level = "memory" if place == "memory" else job.levels[0]["url"]
    assert job.origins() == [["3", level, stopped]] * 4, job.output()
    assert job.own("resumed") == owned
