"""A level is listed by names: little to tell, and every manifest falls to exactly one of those who look."""

import dataclasses
import json

import pytest
from snapshots import Image, meta

from lazysnap.levels import open_store
from lazysnap.levels.listing import Directory, Listing

WORLD = 5


@pytest.fixture
def store(tmp_path):
    store = open_store(str(tmp_path / "run"))
    for step in (1, 2):
        for rank in range(WORLD):
            store.write(dataclasses.replace(meta(step), rank=rank, world_size=WORLD, generation="0" * 16), Image(step))
    return store


def test_ranks_in_a_row_are_told_as_one(store):
    store.storage.delete(f"step-00000002/rank-00002-of-0000{WORLD}.json")

    assert [directory.ranges for directory in store.listing().directories] == [
        (("rank", 5, 0, 4),),
        (("rank", 5, 0, 1), ("rank", 5, 3, 4)),
    ]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_together_the_shares_are_the_whole(store, parts):
    store.keep(store.inventory().entries[0], "named")
    listing = Listing.from_fields(json.loads(json.dumps(store.listing().to_fields())))

    found = [store.inventory(listing, (part, parts)).entries for part in range(parts)]

    key = lambda entry: (entry.step, entry.rank)  # noqa: E731
    together = sorted((entry for entries in found for entry in entries), key=key)
    assert together == sorted(store.inventory().entries, key=key)
    assert max(map(len, found)) <= 2 * -(-WORLD // parts)


def test_a_manifest_of_an_odd_name_is_looked_at_by_one(store, tmp_path):
    (tmp_path / "run" / "step-00000001" / "rank-000001-of-00005.json").write_text("{}")
    listing = store.listing()

    assert listing.directories[0].odd == ("rank-000001-of-00005.json",)
    problems = [store.inventory(listing, (part, 2)).problems for part in range(2)]
    assert sorted(map(len, problems)) == [0, 1]


def test_what_went_between_listing_and_looking_is_said(store):
    listing = store.listing()
    store.storage.delete("step-00000001/rank-00000-of-00005.safetensors")

    inventory = store.inventory(listing)

    assert len(inventory.entries) == 2 * WORLD - 1
    assert "without its shard" in inventory.problems[0]


def test_a_directory_of_two_worlds_names_all():
    directory = Directory("step-00000001", (("rank", 2, 0, 1), ("node", 4, 1, 3)))

    names = ["rank-00001-of-00002.json", "node-00001-of-00004.json", "node-00003-of-00004.json"]
    assert list(directory.manifests((1, 2))) == names
