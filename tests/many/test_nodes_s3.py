"""One object for all ranks of a node, on a real S3 server: the same bits back, in the same world and in others."""

import pytest

from lazysnap.levels import open_store
from lazysnap.resolver import candidates


@pytest.fixture
def level(s3_server, s3_url):
    settings = {"every_n_steps": 1, "keep_last": 2, "storage_options": s3_server.options()}
    return {"url": s3_url, "aggregate": "node", **settings}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world", "others"), [("fsdp", 4, [("fsdp", 2), ("plain", 1)]), ("ddp", 2, [])])
def test_ranks_go_on_from_the_object_of_their_node(make_job, level, end_keepers, kind, world, others):
    whole, broken = make_job("whole", levels=[]), make_job("broken", levels=[level])
    assert set(whole.run(kind, world, steps=6)) == {0}, whole.output()
    assert set(broken.run(kind, world, steps=6, stop_at=3, wait_durable=True)) == {9}, broken.output()
    assert [line[2:] for line in broken.events("durable")] == [["3", "True"]] * world, broken.output()
    [stopped] = broken.stopped()
    owned = broken.own("stopped")
    end_keepers(broken)

    for other, ranks in others:
        assert set(broken.run(other, ranks, look=True)) == {0}, broken.output()
        assert broken.origins() == [["3", level["url"], stopped]] * ranks, broken.output()
        end_keepers(broken)
    assert set(broken.run(kind, world, steps=6)) == {0}, broken.output()

    assert broken.origins() == [["3", level["url"], stopped]] * world, broken.output()
    assert broken.own("resumed") == owned
    assert broken.results() == whole.results()
    store = open_store(level["url"], options=level["storage_options"])
    plans = candidates([store.inventory()])
    assert [plan.step for plan in plans] == [6, 5]
    for plan in plans:
        store.verify_entry(plan.sources[0][0])
        stem = "node-00000-of-00001"
        assert sorted(store.storage.list(f"step-{plan.step:08d}")) == [f"{stem}.json", f"{stem}.safetensors"]
