"""A level is listed by names: little to tell, and every manifest falls to exactly one of those who look."""

import dataclasses
import json

import msgspec
import pytest
from snapshots import Image, meta
from support.catalogue import inventory_of
from support.image import write_shard
from support.names import START, directory_of

from lazysnap.levels.listing import Directory, Listing, list_names
from lazysnap.levels.store import keep, open_storage
from lazysnap.shard.names import NodeName
from lazysnap.snapshots.catalogue import Catalogue

pytestmark = pytest.mark.slow

WORLD = 5


@pytest.fixture
def storage(tmp_path):
    storage = open_storage(str(tmp_path / "run"))
    for step in (1, 2):
        for rank in range(WORLD):
            write_shard(storage, dataclasses.replace(meta(step), rank=rank, world_size=WORLD, start=START), Image(step))
    return storage


def test_ranks_in_a_row_are_told_as_one(storage):
    storage.delete(f"{directory_of(2)}/node-00002-of-0000{WORLD}.json")

    assert [directory.ranges for directory in list_names(storage).directories] == [
        ((5, 0, 4),),
        ((5, 0, 1), (5, 3, 4)),
    ]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_together_the_shares_are_the_whole(storage, parts):
    keep(storage, inventory_of(storage).entries[0].snapshot, "named")
    listing = msgspec.json.decode(json.dumps(msgspec.to_builtins(list_names(storage))), type=Listing)

    found = [Catalogue(storage, listing).inventory((part, parts)).entries for part in range(parts)]

    key = lambda entry: (entry.step, entry.rank)  # noqa: E731
    together = sorted((entry for entries in found for entry in entries), key=key)
    assert together == sorted(inventory_of(storage).entries, key=key)
    assert max(map(len, found)) <= 2 * -(-WORLD // parts)


@pytest.mark.parametrize(
    "name", ["node-000001-of-00005.json", "node-00005-of-00005.json", "node-00000-of-9999999999.json", "notes.json"]
)
def test_a_manifest_of_another_name_is_not_looked_at(storage, tmp_path, name):
    before = list_names(storage)
    (tmp_path / "run" / directory_of(1) / name).write_text("{}")

    assert list_names(storage) == before
    assert inventory_of(storage).problems == ()


@pytest.mark.parametrize("suffix", ["base", "safetensors"])
def test_what_has_no_manifest_is_named(tmp_path, suffix):
    file = f"node-00000-of-00001.{suffix}"
    (tmp_path / directory_of(3)).mkdir()
    (tmp_path / directory_of(3) / file).write_text("")

    [(_, message)] = Catalogue(open_storage(str(tmp_path))).contents().without_manifest

    assert f"{directory_of(3)}/{file} has no manifest" in message


def test_what_went_between_listing_and_looking_is_said(storage):
    listing = list_names(storage)
    storage.delete(f"{directory_of(1)}/node-00000-of-00005.safetensors")

    inventory = Catalogue(storage, listing).inventory()

    assert len(inventory.entries) == 2 * WORLD - 1
    assert "without its file" in inventory.problems[0]


def test_a_directory_of_two_worlds_names_all():
    directory = Directory(directory_of(1), ((2, 0, 1), (4, 1, 3)))

    nodes = [NodeName(1, 2), NodeName(1, 4), NodeName(3, 4)]
    assert list(directory.nodes((1, 2))) == nodes


def test_nodes_with_different_numbers_of_ranks_make_one_whole_directory(tmp_path):
    (tmp_path / directory_of(1)).mkdir()
    for node in (0, 1):
        (tmp_path / directory_of(1) / NodeName(node, 2).manifest).write_text("{}")

    [directory] = list_names(open_storage(str(tmp_path))).directories

    assert directory.is_whole
    assert list(directory.nodes()) == [NodeName(0, 2), NodeName(1, 2)]
