"""What several nodes hold is stored once where all nodes see the level, and once per node where they do not."""

import pathlib
from collections import defaultdict

import pytest
from shards import copies_at, of_scope, pieces_of

BY_RANK = {str(rank): {"node": f"node-{'ab'[rank // 2]}"} for rank in range(4)}
NODES = ("node-a", "node-b")


def level(path, **settings):
    return {"url": str(path), "every_n_steps": 1, "keep_last": 2, **settings}


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_all_nodes_together_store_it_once_and_each_resumes_from_what_all_stored(make_job, end_keepers, kind):
    job = make_job(nodes=NODES)
    codes = job.run(kind, 4, stop_at=4, by_rank=BY_RANK, wait_durable=True)
    assert set(codes) == {9}, job.output()
    stopped, own = job.stopped(), job.own("stopped")
    end_keepers(job)

    assert set(copies_at(job.levels[0]["url"]).values()) == {1}
    assert not list(pathlib.Path(job.levels[0]["url"]).glob(".*")), "a file of the first try is left"
    assert set(job.run(kind, 4, look=True, by_rank=BY_RANK)) == {0}, job.output()
    assert job.resumed() == 4
    assert {line[2] for line in job.origins()} == stopped
    assert job.own("resumed") == own
    one = {str(rank): {} for rank in range(2)}
    assert set(job.run(kind if kind == "ddp" else "fsdp", 2, look=True, by_rank=one)) == {0}, job.output()
    assert {line[2] for line in job.origins()} == stopped, "another world reads it as well"


def test_a_disk_of_each_node_has_all_that_the_node_holds_and_what_is_copied_from_there_is_stored_once(
    make_job, end_keepers, tmp_path
):
    """The second level is so slow that it is granted what memory has no more."""
    shared = level(tmp_path / "shared", max_bytes_per_s=100_000)
    by_rank = {rank: {**place, "levels": [level(tmp_path / place["node"]), shared]} for rank, place in BY_RANK.items()}
    job = make_job(nodes=NODES, levels=[])
    codes = job.run("ddp", 4, steps=30, lag_s=0.05, by_rank=by_rank)
    assert set(codes) == {0}, job.output()
    end_keepers(job)

    assert set(copies_at(tmp_path / "node-a").values()) == {1}
    assert set(copies_at(tmp_path / "node-b").values()) == {1}
    assert set(copies_at(shared["url"]).values()) == {1}
    results = job.results()
    only = {rank: {**place, "levels": [shared]} for rank, place in BY_RANK.items()}
    assert set(job.run("ddp", 4, steps=30, by_rank=only)) == {0}, job.output()
    assert job.resumed() == 30
    assert job.results() == results


def test_replicas_share_a_level_equally(make_job, tmp_path):
    """HSDP over 2 x 2: ranks 0 and 2 hold the same, and 1 and 3. Here both replicas are on both nodes."""
    by_rank = {str(rank): {"node": f"node-{letter}"} for rank, letter in enumerate("abab")}
    job = make_job(nodes=NODES, levels=[level(tmp_path / "level")])
    assert set(job.run("hsdp", 4, stop_at=1, by_rank=by_rank, wait_durable=True)) == {9}, job.output()

    found = {rank: of_scope("shard", pieces) for rank, pieces in pieces_of(tmp_path / "level").items()}

    assert set(copies_at(tmp_path / "level", "shard").values()) == {1}
    alike = defaultdict(list)
    for rank, pieces in found.items():
        alike[rank % 2].append(sum(piece.size for piece in pieces))
    for sizes in alike.values():
        assert max(sizes) <= 1.1 * min(sizes), sizes
