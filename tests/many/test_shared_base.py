"""Immutable tensors with several ranks: once per run at a level, called by their content, whoever wrote them."""

import pytest

from lazysnap.levels import open_store


@pytest.mark.parametrize("place", ["memory", "storage"])
def test_ranks_with_the_same_base_store_it_once_and_resume_bit_for_bit(job, end_keepers, place):
    assert set(job.run("ddp", 2, base=True, stop_at=4, wait_durable=True)) == {9}, job.output()
    stopped = job.stopped()
    if place == "storage":
        end_keepers(job)
    inventory = open_store(job.levels[0]["url"]).inventory()
    assert len(inventory.frozen) == 1
    assert {entry.frozen for entry in inventory.entries} == {inventory.frozen[0].digest}
    store = open_store(job.levels[0]["url"])
    assert max(store.read_manifest(entry).size_bytes for entry in inventory.entries) < 150_000

    assert set(job.run("ddp", 2, base=True, look=True)) == {0}, job.output()

    assert job.resumed() == 4
    assert {level == "memory" for _, level, _ in job.origins()} == {place == "memory"}
    assert {digest for *_, digest in job.origins()} == stopped


def test_a_base_goes_with_the_world_that_changes(job):
    assert set(job.run("ddp", 2, base=True, stop_at=4)) == {9}, job.output()
    stopped = job.stopped()

    for kind, world in (("ddp", 4), ("plain", 1), ("fsdp", 2)):
        assert set(job.run(kind, world, base=True, look=True)) == {0}, job.output()
        assert set(map(tuple, job.origins())) == {("4", "memory", *stopped)}
