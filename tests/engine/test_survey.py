"""Which ranks look at one place together, which snapshots they look at first, and what they tell each other."""

import json
from dataclasses import replace

import pytest
from support.names import directory_of

from lazysnap.keeper.questions import HeldMember, HeldParity
from lazysnap.levels.listing import Directory, Listing
from lazysnap.ranks.world import places
from lazysnap.resolver import Entry, Inventory, candidates
from lazysnap.restore.offers import (
    numbers_in,
    pack_files,
    pack_memory,
    pack_parity,
    ranges_of,
    unpack_files,
    unpack_memory,
    unpack_parity,
)
from lazysnap.restore.survey import NEWEST, Selection, Site, digest_of, first_with, merged, sites_of
from lazysnap.shard.names import NodeName, SnapshotName

NODES = places(["a", "a", "b", "b"])
URL, PATH = "s3://bucket/run", "/scratch/run"
RUN, START = "ab" * 8, "01" * 8


def listing(mark):
    return Listing((Directory(directory_of(1), ((4, 0, 3),), stamp=mark),))


def sites(url, first, second):
    digests = [{url: str(first)}, {}, {url: str(second)} if second else {}, {}]
    listings = {(url, str(mark)): listing(mark) for mark in (first, second)}
    return sites_of(digests, listings, NODES)


def members(found):
    return [(site.members, site.label is None) for site in found]


def test_a_path_that_all_nodes_see_alike_is_one_place():
    assert members(sites(PATH, [1, 2], [1, 2])) == [((0, 1, 2, 3), True)]


def test_disks_of_different_nodes_are_different_places():
    found = sites(PATH, [1, 2], [1, 3])

    assert members(found) == [((0, 1), False), ((2, 3), False)]
    assert len({site.label for site in found}) == 2
    assert [site.listing.directories[0].stamp for site in found] == [[1, 2], [1, 3]]


def test_a_url_is_one_place_whoever_listed_it():
    assert members(sites(URL, 1, None)) == [((0, 1, 2, 3), True)]


def test_of_equal_listings_the_first_rank_sends_its_own():
    digests = [{PATH: "x"}, {}, {PATH: "y"}, {PATH: "x"}]

    assert [first_with(digests, PATH, digest) for digest in "xy"] == [0, 2]


def test_what_is_found_at_one_level_is_one_inventory():
    found = merged([Inventory("x", problems=("a",)), Inventory("y"), Inventory("x", problems=("b",))])

    assert found == [Inventory("x", problems=("a", "b")), Inventory("y")]


# Which snapshots come first


def site_with(steps, run_id=RUN, names=()):
    found = [Directory(SnapshotName(run_id, step, START).directory, ((1, 0, 0),), names=names) for step in steps]
    return Site(URL, None, Listing(tuple(found)), (0,))


def steps_in(directories):
    return sorted(SnapshotName.parse(directory).step for directory in directories)


def test_the_newest_snapshots_of_all_places_come_first():
    selection = Selection.of([site_with(range(0, 40, 2)), site_with(range(1, 40, 2))], None, NEWEST)

    assert steps_in(selection.first) == list(range(40 - NEWEST, 40))
    assert steps_in(selection.rest) == list(range(40 - NEWEST))


def test_a_snapshot_that_is_wanted_comes_first_too():
    def is_wanted(name, names):
        return name.step == 3

    selection = Selection.of([site_with(range(40))], is_wanted, NEWEST)

    assert steps_in(selection.first) == [3, *range(40 - NEWEST, 40)]
    assert {name.step for name in selection.newest} == set(range(40 - NEWEST, 40))


def test_of_each_run_that_is_wanted_one_snapshot_comes_first():
    """So a run whose first digits are those of another one is not overlooked."""
    older = site_with(range(3), run_id="aa" * 8)

    selection = Selection.of([site_with(range(40)), older], lambda name, names: name.run_id.startswith("a"), NEWEST)

    assert SnapshotName("aa" * 8, 2, START).directory in selection.first


def test_a_directory_without_manifest_is_never_read():
    place = site_with([1])
    bare = Directory(directory_of(9), (), bare="node-00000-of-00001.safetensors")
    place = Site(URL, None, Listing((*place.listing.directories, bare)), (0,))

    selection = Selection.of([place], None, NEWEST)

    assert bare.name not in selection.first | selection.rest


# What ranks tell each other


@pytest.mark.parametrize("numbers", [[], [4], [0, 1, 2], [7, 3, 4, 9, 8]])
def test_ranges_hold_the_numbers_that_they_are_of(numbers):
    assert list(numbers_in(ranges_of(numbers))) == sorted(numbers)


def test_memory_is_told_without_loss():
    entries = [Entry("memory", RUN, START, step, 5, 8, (1, step + 100), node="b") for step in (7, 8)]
    entries.append(Entry("memory", "cd" * 8, START, 7, 9, 16, (12, 3), node="b"))
    entries = [replace(entry, is_repeatable=known) for entry, known in zip(entries, (True, False, None), strict=True)]

    packed = through_json(pack_memory([Inventory("x", tuple(entries[:2])), Inventory("y", tuple(entries[2:]))]))

    assert unpack_memory(packed, "b").entries == tuple(entries)


def test_parity_is_told_without_loss():
    parity = HeldParity(
        RUN,
        START,
        7,
        8,
        [HeldMember([0, 1, 2], 10), HeldMember([3, 5], 20)],
        parity=1,
        most_lost=2,
        block_bytes=1 << 20,
        position=1,
    )

    assert unpack_parity(through_json(pack_parity([parity]))) == [parity]


@pytest.mark.parametrize("label", [None, "/scratch of rank 2"])
def test_files_of_a_level_are_told_without_loss(label):
    directories = [Directory(SnapshotName(RUN, step, START).directory, (), names=("best",)) for step in (3, 4)]
    entries = []
    for rank in (0, 1, 2, 5):
        of_file = NodeName(1, 2).text
        entry = Entry(URL, RUN, START, 4, rank, 8, node=label, names=("best",), file=of_file, distance=2)
        entries.append(entry)
    inventory = Inventory(URL, tuple(entries), ("damaged",))

    packed = through_json(pack_files(inventory, directories))
    found = unpack_files(packed, directories, URL, 2, label)

    assert {*found.entries} == {*entries}
    assert found.problems == ("damaged",)


def through_json(value):
    return json.loads(encoded(value))


def encoded(value):
    """As ``World.exchange`` sends it."""
    return json.dumps(value, separators=(",", ":")).encode()


WORLD_SIZE = 4096
RANKS_PER_NODE = 8
KEPT = 200
GROUP = 8
"""Nodes of a group that hold parity of each other."""
MOST_BYTES = 1_000_000
EXCHANGES = 4
HEAD_BYTES = 8
"""Of each rank in each exchange: see ``World.exchange``."""


def test_a_restart_of_4096_ranks_sends_each_of_them_a_megabyte_at_most():
    """Three captures in the memory of each rank, parity of two steps on each node, 200 snapshots at a shared path."""
    num_nodes = WORLD_SIZE // RANKS_PER_NODE
    world = places([f"node{rank // RANKS_PER_NODE}" for rank in range(WORLD_SIZE)])
    ranges = ((num_nodes, 0, num_nodes - 1),)
    steps = range(100_000, 100_000 + 1000 * KEPT, 1000)
    names = [SnapshotName(RUN, step, START).directory for step in steps]
    shared = Listing(tuple(Directory(name, ranges, stamp=[1 << 40, 1 << 60]) for name in names))
    [site] = sites_of([{PATH: "x"} if place.local_rank == 0 else {} for place in world], {(PATH, "x"): shared}, world)
    site = site.only(Selection.of([site], None, NEWEST).first)
    told = []

    for place in world:
        is_first = place.local_rank == 0
        told.append(["", pack_memory([memory_of(place)]), pack_parity(parity_of(place)) if is_first else []])
        told.append([{PATH: digest_of("x")} if is_first else {}, []])
        told.append({PATH: encoded([vars(one) for one in shared.directories]).decode()} if place.rank == 0 else {})
        packed = pack_files(share_of(site, place), site.listing.directories)
        told.append([[[0, 2, packed]] if any(packed) else [], []])

    assert len(site.listing.directories) == NEWEST
    assert sum(HEAD_BYTES + len(encoded(value)) for value in told) <= MOST_BYTES
    assert len(told) == EXCHANGES * WORLD_SIZE
    newest = merged(
        unpack_files(share[0][0][2], site.listing.directories, PATH, 2, None)
        for share in told[EXCHANGES - 1 :: EXCHANGES]
        if share[0]
    )
    assert [plan.step for plan in candidates(newest)] == sorted(steps, reverse=True)[:NEWEST]


def memory_of(place):
    steps = (999_998, 999_999, 1_000_000)
    entries = [
        Entry("memory", RUN, START, step, place.rank, WORLD_SIZE, (place.local_rank, step), node=place.node)
        for step in steps
    ]
    return Inventory("memory", tuple(entries))


def parity_of(place):
    node = place.rank // RANKS_PER_NODE
    first = node - node % GROUP
    members = []
    for member in range(first, first + GROUP):
        ranks = list(range(member * RANKS_PER_NODE, (member + 1) * RANKS_PER_NODE))
        members.append(HeldMember(ranks, 80_000_000_000 + member))
    steps = (999_990, 1_000_000)
    return [HeldParity(RUN, START, step, WORLD_SIZE, members, 1, 1, 1 << 20, node - first) for step in steps]


def share_of(site, place):
    """What a rank finds when it reads its share of the manifests."""
    entries = []
    for directory in site.listing.directories:
        name = SnapshotName.parse(directory.name)
        for file in directory.nodes((place.rank, WORLD_SIZE)):
            for rank in range(file.node * RANKS_PER_NODE, (file.node + 1) * RANKS_PER_NODE):
                entry = Entry(PATH, RUN, START, name.step, rank, WORLD_SIZE, file=file.text, distance=2)
                entries.append(entry)
    return Inventory(PATH, tuple(entries))
