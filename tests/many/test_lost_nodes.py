"""Nodes that protect each other, on one machine: what a lost one held comes from the others, whatever was going on."""

import socket

import pytest
from rank_keepers import end_nodes, neighbours
from support.damage import flip_memory

NODES = ("node-a", "node-b", "node-c", "node-d")
STEP = 4


@pytest.fixture
def train(make_job):
    """Starts ranks, one on each node in turn if not said otherwise. Memory is all there is."""
    job = make_job(nodes=NODES, levels=[])

    def run(kind, world, nodes=NODES, **settings):
        by_rank = {str(rank): {"node": nodes[rank]} for rank in range(world)}
        return set(job.run(kind, world, by_rank=by_rank, **settings)), job

    def protect(kind, world, **settings):
        """Train until a step is protected; the state of all ranks there."""
        codes, _ = run(kind, world, stop_at=STEP, wait_protected=True, **settings)
        assert codes == {9}, job.output()
        assert [line[2:] for line in job.events("protected")] == [[str(STEP), "True"]] * world, job.output()
        [digest] = job.stopped()
        return digest

    def look(kind, world, **settings):
        """Resume, and do nothing else; the levels and the state of the ranks."""
        codes, _ = run(kind, world, look=True, **settings)
        assert codes == {0}, job.output()
        assert job.resumed() == STEP, job.output()
        [digest] = {digest for *_, digest in job.origins()}
        return [level for _, level, _ in job.origins()], digest

    def damage(node):
        """One byte of the last capture in the memory of that node."""
        with neighbours(job, node) as found:
            [item] = [item for item in found[0].inventory.entries if item.step == STEP]
            flip_memory(item.slot, item.slot.view().image_bytes - 1)

    run.protect, run.look, run.lose, run.damage = protect, look, lambda *nodes: end_nodes(job, *nodes), damage
    return run


def test_a_frozen_base_comes_back_with_the_rest(train):
    nodes = ("node-a", "node-a", "node-b", "node-b")
    digest = train.protect("hsdp", 4, nodes=nodes, base=True)
    train.lose("node-b")
    levels, found = train.look("hsdp", 4, nodes=nodes, base=True)
    assert found == digest
    assert levels == ["memory", "memory", "parity", "parity"]


def test_damaged_memory_of_a_node_is_computed_from_what_the_others_hold(train):
    digest = train.protect("fsdp", 2)
    train.damage("node-b")
    assert train.look("fsdp", 2) == (["memory", "parity"], digest)


def test_nodes_protect_each_other_over_ipv6(train, monkeypatch):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("MASTER_ADDR", "::1")
    digest = train.protect("fsdp", 2)
    train.lose("node-b")
    assert train.look("fsdp", 2) == (["memory", "parity"], digest)


def test_an_evaluation_takes_no_protection_away(train):
    """A start that captures nothing."""
    digest = train.protect("fsdp", 2)
    assert train.look("fsdp", 2) == (["memory", "memory"], digest)
    train.lose("node-a")
    assert train.look("fsdp", 2) == (["parity", "memory"], digest)


def test_fewer_nodes_with_fewer_ranks_go_on_from_what_the_others_held(train):
    """All that is not met again is lost to them, whether it lives or not."""
    digest = train.protect("fsdp", 4, parity=2)
    train.lose("node-d")
    for kind, world in (("fsdp", 3), ("ddp", 2)):
        levels, found = train.look(kind, world)
        assert found == digest
        assert "parity" in levels
