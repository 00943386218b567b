"""Who captures, and who stores, what several ranks hold: each node a copy, all nodes together one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysnap.capture.plan import key_of
from lazysnap.ranks.partition import STORERS, Partition
from lazysnap.ranks.world import agree
from lazysnap.state.walk import walk

SHAPES = [(), (7,), (3, 5), (0, 4), (1,), (40, 2), ()]


@pytest.fixture(scope="module")
def state():
    return {f"t{number}": torch.ones(shape) for number, shape in enumerate(SHAPES)} | {"own": torch.ones(4)}


def partitions(state, nodes):
    walked = walk(state)
    replicated = {key_of(tensor) for name, tensor in state.items() if name != "own"}
    return [Partition(walked, replicated, rank, nodes) for rank in range(len(nodes))]


def captured(partition, state, name, *, shared=False):
    """The rows of a tensor that a rank captures, or stores at levels that all nodes see."""
    rows = state[name].shape[0] if state[name].dim() else 1
    facts = partition.facts[name]
    parts = dict(zip(partition.apply(walk(state)).names, partition.apply(walk(state)).tensors, strict=True))
    count = parts[name].shape[0] if parts[name].dim() else 1
    start = facts["offsets"][0] if facts["offsets"] else 0
    first, last = partition.shared_rows.get(name, (0, count)) if shared else (0, count)
    assert 0 <= first <= last <= count <= rows
    return list(range(start + first, start + last))


@pytest.mark.slow
@settings(max_examples=60)
@given(nodes=st.lists(st.sampled_from("abc"), min_size=1, max_size=7))
def test_each_node_captures_every_row_once_and_all_nodes_together_store_it_once(state, nodes):
    ranks = partitions(state, nodes)

    for name in (name for name in state if name != "own"):
        rows = range(state[name].shape[0] if state[name].dim() else 1)
        for node in set(nodes):
            node_ranks = [one for one, where in zip(ranks, nodes, strict=True) if where == node and name in one.facts]
            assert sorted(row for one in node_ranks for row in captured(one, state, name)) == [*rows]
        stored = [row for one in ranks if name in one.facts for row in captured(one, state, name, shared=True)]
        assert sorted(stored) == [*rows]
    assert all("own" in one.apply(walk(state)).names and "own" not in one.shared_rows for one in ranks)


def test_nodes_store_equal_shares():
    state = {"a": torch.ones(60, 10), "b": torch.ones(100)}

    for nodes in ("ab", "aabb", "aabbcc", "aab"):
        ranks = partitions(state, nodes)
        held = dict.fromkeys(nodes, 0)
        for one, node in zip(ranks, nodes, strict=True):
            for name in one.facts:
                width = state[name][0].numel()
                held[node] += len(captured(one, state, name, shared=True)) * width
        assert max(held.values()) - min(held.values()) <= 20, (nodes, held)


def test_of_many_nodes_a_few_store_it_and_each_rank_knows_which():
    state = {"a": torch.ones(60, 10), "own": torch.ones(2)}
    nodes = [str(number // 2) for number in range(2 * (STORERS + 3))]
    ranks = partitions(state, nodes)

    stored = {rank: captured(one, state, "a", shared=True) for rank, one in enumerate(ranks) if "a" in one.facts}
    assert sorted(row for rows in stored.values() for row in rows) == [*range(60)]
    assert {nodes[rank] for rank, rows in stored.items() if rows} == {str(number) for number in range(STORERS)}
    assert {tuple(one.replicas) for one in ranks} == {tuple(range(2 * STORERS))}
    assert partitions(state, ["x", "x"])[0].replicas == []


def test_nodes_that_hold_other_tensors_each_store_their_own():
    same = [partitions({"a": torch.ones(6), "own": torch.ones(2)}, "aabb")[rank].common for rank in range(4)]
    other = partitions({"b": torch.ones(6), "own": torch.ones(2)}, "aabb")
    crews = ([0, 1], [2, 3])

    assert [agree(told(same), node_ranks) for node_ranks in crews] == [(True, True)] * 2
    mixed = [*same[:2], *(one.common for one in other[2:])]
    assert [agree(told(mixed), node_ranks) for node_ranks in crews] == [(True, False)] * 2
    torn = [*same[:3], other[3].common]
    assert [agree(told(torn), node_ranks) for node_ranks in crews] == [(True, False), (False, False)]
    fewer = [*same[:3], []]
    assert [agree(told(fewer), node_ranks) for node_ranks in crews] == [(True, False), (False, False)]


def told(commons):
    """As it comes over the wire."""
    return [[list(common) for common in one] for one in commons]


def test_each_rank_tells_the_memory_order_of_the_whole_tensor_of_which_it_captures_rows():
    state = {"columns": torch.ones(40, 6).T, "images": torch.ones(8, 3, 4, 4).to(memory_format=torch.channels_last)}
    ranks = partitions(state | {"rows": torch.ones(6, 40), "own": torch.ones(2)}, "aabb")

    told = [{name: facts.get("order") for name, facts in one.facts.items()} for one in ranks]
    assert {name: order for one in told for name, order in one.items()} == {
        "columns": [1, 0],
        "images": [0, 2, 3, 1],
        "rows": None,
    }
