"""Frozen tensors with several ranks: once per run at a level, called by their content, whoever wrote them."""

import os
import pathlib

import pytest
import torch
from rank import WIDTH, Net
from rank_keepers import neighbours
from support.catalogue import inventory_of

from lazysnap import load_weights
from lazysnap.levels import open_store

BASE_BYTES = 50_000 * (WIDTH + 1) * 4
HEADERS = 4 * 4096


def stored(job):
    """What the level of a job holds: entries of the snapshots, sizes of their shards, bytes of frozen tensors."""
    store = open_store(job.levels[0]["url"])
    inventory = inventory_of(store)
    assert inventory.problems == ()
    # Each file of frozen tensors is referred to.
    assert {entry.frozen for entry in inventory.entries} == {frozen.digest for frozen in inventory.frozen}
    shards = max(store.read_manifest(entry).of(entry.rank).size_bytes for entry in inventory.entries)
    return inventory, shards, sum(store.verify(store.place(frozen)).size_bytes for frozen in inventory.frozen)


@pytest.mark.parametrize(
    ("kind", "world", "files", "place"),
    [
        ("ddp", 2, 1, "storage"),
        # FSDP2: the base is a DTensor; each rank's shard of it is one file, which its replicas share.
        ("fsdp", 2, 2, "memory"),
        ("hsdp", 4, 2, "storage"),
        ("tp", 4, 2, "memory"),
    ],
)
def test_ranks_store_the_same_base_once_and_resume_bit_for_bit(job, end_keepers, kind, world, files, place):
    assert set(job.run(kind, world, base=True, stop_at=4, wait_durable=True)) == {9}, job.output()
    stopped = job.stopped()
    with neighbours(job) as found:  # equal ones share a slot
        held = {
            os.fstat(slot.fd).st_ino for neighbour in found.values() for slot in neighbour.inventory.frozen.values()
        }
    assert len(found) == world
    assert len(held) == files
    if place == "storage":
        end_keepers(job)
    inventory, largest_shard, frozen_bytes = stored(job)
    assert len(inventory.frozen) == files
    assert largest_shard < 150_000
    assert BASE_BYTES <= frozen_bytes <= BASE_BYTES + files * HEADERS

    assert set(job.run(kind, world, base=True, look=True)) == {0}, job.output()

    assert job.resumed() == 4
    assert {level == "memory" for _, level, _ in job.origins()} == {place == "memory"}
    assert {digest for *_, digest in job.origins()} == stopped


@pytest.mark.parametrize(
    ("kind", "world", "who"), [("ddp", 2, "all ranks"), ("ddp", 2, "one rank"), ("hsdp", 4, "one rank")]
)
def test_a_base_that_is_changed_all_the_same_comes_back_as_it_was_on_each_rank(job, kind, world, who):
    """Also where the ranks do not change it alike."""
    changing = {"averaged": True} if who == "all ranks" else {"by_rank": {"1": {"averaged": True}}}
    assert set(job.run(kind, world, base=True, stop_at=6, wait_durable=True, **changing)) == {9}, job.output()
    stopped = {rank: digest for rank, _, _, digest, *_ in job.events("stopped")}

    assert set(job.run(kind, world, base=True, look=True)) == {0}, job.output()

    assert job.resumed() == 6
    assert {rank: digest for rank, _, _, _, digest, *_ in job.events("resumed")} == stopped


def test_weights_of_a_sharded_base_are_read_whole(job):
    assert set(job.run("fsdp", 2, base=True, stop_at=4, wait_durable=True)) == {9}, job.output()
    torch.manual_seed(0)
    wanted = Net(base=True).base

    found = load_weights(pathlib.Path(job.levels[0]["url"]))

    assert found["base.weight"].equal(wanted.weight)
    assert found["base.bias"].equal(wanted.bias)


@pytest.mark.parametrize(
    ("first", "others"), [(("ddp", 2), [("fsdp", 2), ("ddp", 4)]), (("fsdp", 4), [("plain", 1), ("hsdp", 4)])]
)
def test_a_base_goes_with_the_world_that_changes(job, first, others):
    assert set(job.run(*first, base=True, stop_at=4)) == {9}, job.output()
    stopped = job.stopped()

    for kind, world in others:
        assert set(job.run(kind, world, base=True, look=True)) == {0}, job.output()
        assert set(map(tuple, job.origins())) == {("4", "memory", *stopped)}
