"""What several nodes hold is stored once where all nodes see the level, and once per node where they do not."""

import math
import pathlib
from collections import Counter

import pytest

from lazysnap.levels import open_store

BY_RANK = {str(rank): {"node": f"node-{'ab'[rank // 2]}"} for rank in range(4)}
NODES = ("node-a", "node-b")


def held(*urls):
    """Of what all ranks hold: how many elements all shards of the newest snapshot have, beside those of the whole."""
    found, whole = Counter(), {}
    for store in map(open_store, urls):
        entries = store.inventory().entries
        newest = max(entry.step for entry in entries)
        for entry in (entry for entry in entries if entry.step == newest):
            manifest = store.read_manifest(entry)
            meta = manifest.of(entry.rank).meta
            shard = store.place(entry)
            specs = _shapes(f"{store.url}/{shard.file_path}", manifest.of(entry.rank))
            for name, facts in meta.tensors.items():
                found[name] += math.prod(specs[name])
                whole[name] = math.prod(facts["global_shape"])
    assert whole
    return {name: found[name] / count for name, count in whole.items()}


def _shapes(path, shard):
    with open(path, "rb") as file:
        file.seek(shard.offset)
        layout = shard.layout(file.read(shard.header_bytes), path)
    return {spec.name: spec.shape for spec in layout.specs}


def level(path, **settings):
    return {"url": str(path), "every_n_steps": 1, "keep_last": 2, **settings}


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_all_nodes_together_store_it_once_and_each_resumes_from_what_all_stored(make_job, end_keepers, kind):
    job = make_job(nodes=NODES)
    codes = job.run(kind, 4, stop_at=4, by_rank=BY_RANK, wait_durable=True)
    assert set(codes) == {9}, job.output()
    stopped, own = job.stopped(), job.own("stopped")
    end_keepers(job)

    assert set(held(job.levels[0]["url"]).values()) == {1}
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

    assert set(held(str(tmp_path / "node-a")).values()) == {1}
    assert set(held(str(tmp_path / "node-b")).values()) == {1}
    assert set(held(shared["url"]).values()) == {1}
    results = job.results()
    only = {rank: {**place, "levels": [shared]} for rank, place in BY_RANK.items()}
    assert set(job.run("ddp", 4, steps=30, by_rank=only)) == {0}, job.output()
    assert job.resumed() == 30
    assert job.results() == results


@pytest.mark.parametrize("shared", [True, False])
def test_what_the_user_says_of_a_level_counts(make_job, end_keepers, tmp_path, shared):
    by_rank = {rank: {**place, "levels": [level(tmp_path / "level", shared=shared)]} for rank, place in BY_RANK.items()}
    job = make_job(nodes=NODES, levels=[])
    assert set(job.run("ddp", 4, stop_at=2, by_rank=by_rank, wait_durable=True)) == {9}, job.output()
    end_keepers(job)

    assert set(held(str(tmp_path / "level")).values()) == {1 if shared else 2}
