"""Which shards of lost nodes a restart can compute, told from what memory and parity there is."""

import itertools
from types import SimpleNamespace

from lazysnap.keeper.questions import HeldMember, HeldParity
from lazysnap.ranks.discovery import Discovery
from lazysnap.ranks.world import places
from lazysnap.resolver import PARITY, Entry, Inventory, candidates
from lazysnap.restore.lost_parts import lost_parts
from lazysnap.restore.offers import pack_parity
from lazysnap.restore.peer_memory import PeerMemory
from lazysnap.restore.search import Search

RUN, START, LATER = "ab" * 8, "01" * 8, "02" * 8
SIZES = [1000, 900, 800, 1100]


def entry(rank, node, step=7, start=START):
    return Entry("memory", RUN, start, step, rank, 8, (rank % 2, step), node=node)


def parity(position, *, step=7, start=START, lost=2):
    members = [HeldMember([2 * node, 2 * node + 1], size) for node, size in enumerate(SIZES)]
    return HeldParity(RUN, start, step, 8, members, lost, lost, 1 << 16, position)


def of_nodes(nodes, **which):
    nodes = list(nodes)
    entries = [entry(2 * node + local, f"n{node}", **which) for node in nodes for local in range(2)]
    return entries, [(f"n{node}", parity(node, **which)) for node in nodes]


def test_memory_comes_first_and_every_shard_can_be_computed_if_it_is_damaged():
    entries, held = of_nodes(range(4))
    parts, found, problems = lost_parts(entries, held)
    [plan] = candidates([Inventory("memory", tuple(entries)), Inventory(PARITY, tuple(found))])
    assert [[one.level for one in offers] for offers in plan.sources] == [["memory", PARITY]] * 8
    assert not any(part.position in part.parts for part in parts)
    assert not problems


def test_where_all_parity_is_needed_for_what_is_lost_there_is_none_for_what_is_damaged():
    parts, *_ = lost_parts(*of_nodes([0, 3]))
    assert [part.position for part in parts] == [1, 2]


def test_any_two_nodes_of_four_may_be_lost():
    for lost in [*itertools.combinations(range(4), 1), *itertools.combinations(range(4), 2)]:
        entries, held = of_nodes(node for node in range(4) if node not in lost)
        parts, found, _ = lost_parts(entries, held)
        assert {part.position for part in parts} >= {*lost}
        assert {one.rank for one in found} >= {rank for node in lost for rank in (2 * node, 2 * node + 1)}
        assert {one.level for one in found} == {PARITY}
        [plan] = candidates([Inventory("memory", tuple(entries)), Inventory(PARITY, tuple(found))])
        assert plan.step == 7


def test_three_nodes_of_four_are_too_many():
    parts, found, [problem] = lost_parts(*of_nodes([2]))
    assert (parts, found) == ([], [])
    assert problem.startswith("step 7 in memory: 3 of 4 nodes of a group are lost or out of reach, parity replaces 2")


def test_parity_of_another_start_of_the_same_step_is_no_help():
    entries, _ = of_nodes([0, 1])
    _, held = of_nodes([0, 1], start=LATER)
    assert lost_parts(entries, held)[:2] == ([], [])


def test_a_node_of_which_one_rank_is_missing_counts_as_lost():
    entries, held = of_nodes(range(4))
    parts, found, _ = lost_parts([one for one in entries if one.rank != 3], held)
    [part] = [part for part in parts if part.position == 1]
    assert {one.rank for one in found} >= {2, 3}
    assert 1 not in part.parts
    assert 1 in part.parities
    assert all(1 not in part.parts for part in parts)


def test_ranks_of_one_node_whose_memory_is_on_two_nodes_are_no_part():
    """What a keeper serves is all that its node captured then."""
    entries, held = of_nodes(range(4))
    moved = [one if one.rank != 3 else entry(3, "n9") for one in entries]
    parts, *_ = lost_parts(moved, held)
    assert 1 in {part.position for part in parts}
    assert all(1 not in part.parts for part in parts)


def test_a_node_that_no_other_reaches_counts_as_lost():
    """Its keeper found no port: parts are computed from the captures and the parity of the other nodes alone."""
    memories, reports = [], []
    for node in range(4):
        entries, [(_, held)] = of_nodes([node])
        memories.append(Inventory("memory", tuple(entries)))
        reports.append(pack_parity([held]))
    search = SimpleNamespace(
        _restart=SimpleNamespace(client=None),
        _world=SimpleNamespace(rank=0, places=places([f"n{node}" for node in range(4)])),
        _peers=PeerMemory(Discovery(reads={node: ("10.0.0.1", 1) for node in ("n0", "n2", "n3")})),
        _parity=SimpleNamespace(),
    )
    inventory = Search._computed(search, memories, reports)

    assert {2, 3} <= {entry.rank for entry in inventory.entries}
    assert all(1 not in part.parts and 1 not in part.parities for part in search._parity.lost)


def test_each_step_is_looked_at_by_itself():
    older = of_nodes([0, 2, 3], step=5)
    newer = of_nodes([0], step=7)
    parts, found, _ = lost_parts([*older[0], *newer[0]], [*older[1], *newer[1]])
    assert {part.step for part in parts} == {5}
    assert {one.step for one in found} == {5}
