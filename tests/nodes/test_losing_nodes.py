"""Trainings on two nodes: their keepers find each other, a node is lost or replaced, ranks move; resumes are exact."""

import pytest
from support.waiting import until
from trainings import START_S, STEPS, Training, connections, keepers, ranks

pytestmark = pytest.mark.timeout(4 * START_S)


def resumed(training):
    """From which step and level, by rank, in the order of the starts of the ranks."""
    return [(int(rank), int(step), level) for rank, _, step, level in training.lines(word="resumed")]


def assert_exact(training, wanted):
    """Every step that was trained behind the first one from which the ranks went on is right to the last bit."""
    first = min(step for _, step, _ in resumed(training))
    assert set(training.lines()) == {line for line in wanted if int(line[1]) > first}


def test_a_node_is_lost_and_a_spare_one_goes_on_exactly_from_storage(cluster, undisturbed):
    training = Training(cluster, "fsdp")
    training.start(cluster.nodes, hold_at=7, durable_at=4)
    training.wait_held()
    assert training.lines() == [line for line in undisturbed("fsdp") if int(line[1]) <= 7]

    lost, other = cluster.nodes
    training.lose(lost)
    training.end()
    newest = training.complete()[0]
    training.start([cluster.add(), other])
    training.wait()

    assert 4 <= newest < 7
    assert {step for _, step, _ in resumed(training)} == {newest}
    assert {level for rank, _, level in resumed(training) if rank < 2} == {str(training.level)}
    assert_exact(training, undisturbed("fsdp"))


def test_ranks_that_move_to_other_nodes_go_on_exactly(cluster, undisturbed):
    """Memory holds step 7 of all of them, but not where they are now."""
    training = Training(cluster, "fsdp")
    training.start(cluster.nodes, hold_at=7, durable_at=4)
    training.wait_held()

    training.end()
    training.start(cluster.nodes[::-1])
    training.wait()

    assert {step for _, step, _ in resumed(training)} <= {4, 6, 7}
    assert_exact(training, undisturbed("fsdp"))


def test_a_killed_worker_costs_two_nodes_no_step_and_each_finds_its_own_memory(cluster, undisturbed):
    """torchrun on both nodes starts all ranks again. Keepers of two nodes meet at their own addresses."""
    one, other = cluster.nodes
    training = Training(cluster, "hsdp")
    training.start(cluster.nodes, rendezvous="c10d", restarts=2, hold_at=6, durable_at=4)
    training.wait_held()
    before = [keepers(node) for node in cluster.nodes]
    assert set(connections(one, "0A")) == {(one.address, "0.0.0.0")}
    assert set(connections(one, "01")) == {(one.address, other.address)}
    assert set(connections(other, "01")) == {(other.address, one.address)}

    other.run("kill", "-9", str(ranks(other)[1]))
    until(lambda: len(resumed(training)) == 8, training.output, timeout_s=START_S)
    assert [keepers(node) for node in cluster.nodes] == before
    assert [len(numbers) for numbers in before] == [1, 1]
    training.wait()

    assert [(step, level) for _, step, level in resumed(training)] == [(0, "nothing"), (6, "memory")] * 4
    assert_exact(training, undisturbed("hsdp"))
    assert training.complete()[0] == STEPS
    until(lambda: [keepers(node) for node in cluster.nodes] == [[], []], lambda: "a keeper is left")


def test_keepers_that_were_parted_for_long_meet_again_protect_and_store(cluster):
    one, other = cluster.nodes
    training = Training(cluster, "ddp", redundancy="auto")
    training.start(cluster.nodes, hold_at=6, durable_at=4, protected_at=10)
    training.wait_held()

    one.cut(other)
    until(lambda: training.output().count("no link to the keeper of") >= 2, training.output)
    one.mend(other)
    training.let_go()
    training.wait()

    assert training.complete()[0] == STEPS
    assert [line[2] for line in training.lines(word="protected")] == ["True"] * 4
