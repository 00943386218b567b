"""Nodes that protect each other: some are lost, others take their place, and training goes on exactly from memory."""

import json
import pathlib
import random
import sys

import pytest
from support.waiting import until
from trainings import START_S, STEPS, Training, connections, keepers, ranks, state

# Up to four ranks start three times each, beside whatever other tests run.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAZYSNAP = str(pathlib.Path(sys.executable).with_name("lazysnap"))
SLOW = {"rate": "100mbit", "delay_s": 0.0025, "loss": 0.005}
"""At both ends of a cable: 5 ms, 1 % of the frames."""


def resumed(training):
    """From which step and level, by rank."""
    return {int(rank): (int(step), level) for rank, _, step, level in training.lines(word="resumed")}


def assert_exact(training, trace):
    first = min(step for step, _ in resumed(training).values())
    assert set(training.lines()) == {line for line in trace if int(line[1]) > first}


def lose_and_replace(training, *victims, **cable):
    """Kill these nodes, end all else, and start anew with others in their place. ``cable``: theirs, as of ``shape``."""
    nodes = list(training.cluster.nodes)
    for victim in victims:
        training.lose(nodes[victim])
    training.end()
    for victim in victims:
        nodes[victim] = training.cluster.add()
        nodes[victim].shape(**cable)
    training.start(nodes)
    training.wait(2 * START_S)


def assert_from_memory(training, victims, local, at_least):
    """Ranks of lost nodes came from parity, all others from their own memory, all of the same step."""
    found = resumed(training)
    [step] = {step for step, _ in found.values()}
    assert step >= at_least
    lost = {rank for rank in found if rank // local in victims}
    assert {found[rank][1] for rank in lost} == {"parity"}
    assert {found[rank][1] for rank in found.keys() - lost} == {"memory"}


@pytest.mark.parametrize(("kind", "victim", "cable"), [("ddp", 0, {}), ("hsdp", 1, SLOW)], ids=["", "a slow network"])
def test_one_of_two_nodes_is_lost_and_its_ranks_go_on_exactly_on_another(cluster, undisturbed, kind, victim, cable):
    for node in cluster.nodes:
        node.shape(**cable)
    training = Training(cluster, kind, has_level=False, redundancy="auto")
    training.start(cluster.nodes, hold_at=7, protected_at=6)
    training.wait_held()
    lose_and_replace(training, victim, **cable)
    assert_from_memory(training, [victim], 2, at_least=6)
    assert_exact(training, undisturbed(kind))


@pytest.mark.parametrize(("seed", "comes_back"), [(0, False), (2, True)])
def test_a_node_lost_or_parted_at_any_moment_costs_no_exactness(cluster, undisturbed, seed, comes_back):
    """It may be in the middle of a capture, of an encoding, or between the reports of two nodes."""
    draw = random.Random(seed)
    kind, victim, moment = draw.choice(["ddp", "fsdp"]), draw.randrange(2), draw.randrange(4, 4 * STEPS - 8)
    training = Training(cluster, kind, has_level=False, redundancy="auto")
    training.start(cluster.nodes, pause_s=0.05)
    until(lambda: len(training.lines()) > moment, training.output, timeout_s=START_S)
    if comes_back:
        cluster.nodes[victim].unplug()
        training.end()
        cluster.nodes[victim].plug()
        training.start(cluster.nodes)
        training.wait()
    else:
        lose_and_replace(training, victim)
    found = resumed(training)
    assert len({step for step, _ in found.values()}) == 1
    assert {level for _, level in found.values()} <= {"memory", "parity", "nothing"}
    assert_exact(training, undisturbed(kind))


def test_two_of_four_nodes_are_lost_at_once(make_cluster, undisturbed):
    cluster = make_cluster(4)
    training = Training(cluster, "fsdp", local=1, has_level=False, redundancy="auto")
    training.start(cluster.nodes, hold_at=7, protected_at=6)
    training.wait_held()
    lose_and_replace(training, 0, 2)
    assert_from_memory(training, [0, 2], 1, at_least=6)
    assert_exact(training, undisturbed("fsdp"))


def test_one_of_four_nodes_is_lost_and_then_another_before_anything_new_is_protected(make_cluster, undisturbed):
    cluster = make_cluster(4)
    training = Training(cluster, "fsdp", local=1, has_level=False, redundancy="auto")
    training.start(cluster.nodes, hold_at=7, protected_at=6)
    training.wait_held()
    nodes = list(cluster.nodes)
    training.lose(nodes[3])
    training.end()
    nodes[3] = cluster.add()
    training.start(nodes, hold_at=8)  # right after the start: what was protected stays until something newer is
    until(lambda: training.lines(word="resumed"), training.output, timeout_s=2 * START_S)
    training.lose(nodes[1])
    training.end()
    nodes[1] = cluster.add()
    training.start(nodes)
    training.wait(2 * START_S)
    assert {level for _, level in resumed(training).values()} == {"memory", "parity"}, training.output()
    assert min(step for step, _ in resumed(training).values()) >= 6
    assert_exact(training, undisturbed("fsdp"))


def test_a_node_lost_right_after_a_restart_of_all_trainers_costs_what_was_not_protected(cluster, undisturbed):
    """The restart resumes the newest step, from memory. The one before is protected, and stays."""
    training = Training(cluster, "fsdp", has_level=False, redundancy="auto")
    rarely = {"protects_every": 100}
    training.start(cluster.nodes, protected_at=4, hold_at=7, **rarely)
    training.wait_held()
    training.end()
    training.start(cluster.nodes, hold_at=8, **rarely)
    until(lambda: len(training.lines(word="held")) == 4, training.output, timeout_s=2 * START_S)
    assert {step for step, _ in resumed(training).values()} == {7}
    one, lost = cluster.nodes
    training.lose(lost)
    training.end()
    training.start([one, cluster.add()], hold_at=12)
    until(lambda: len(training.lines(word="held")) == 4, training.output, timeout_s=2 * START_S)
    assert_from_memory(training, [1], 2, at_least=4)
    assert {step for step, _ in resumed(training).values()} == {4}
    assert_exact(training, [line for line in undisturbed("fsdp") if int(line[1]) <= 12])


def parity_bytes(node):
    """Memory of a node that protects the others."""
    status = json.loads(node.run(LAZYSNAP, "status", "--json"))
    return sum(job["parity_bytes"] for job in status["jobs"])


def test_a_restart_keeps_what_is_protected_beside_a_newer_step_whose_protection_is_unfinished(
    make_cluster, undisturbed
):
    """Three of four keepers have parity of step 7, which the restart resumes; the protected one is step 4."""
    cluster = make_cluster(4)
    training = Training(cluster, "fsdp", local=1, has_level=False, redundancy="auto")
    nodes = list(cluster.nodes)
    training.faults[nodes[3]] = "keeper.parity.begin:2:hang"
    training.start(nodes, protected_at=4, hold_at=7, protects_every=7)
    training.wait_held()
    for node in nodes[:3]:
        until(lambda node=node: parity_bytes(node) == 2 * parity_bytes(nodes[3]), timeout_s=START_S)
    training.lose(nodes[3])
    training.end()
    nodes[3] = cluster.add()
    training.start(nodes, hold_at=8, protects_every=7)
    until(lambda: len(training.lines(word="held")) == 4, training.output, timeout_s=2 * START_S)
    assert {step for step, _ in resumed(training).values()} == {7}, training.output()
    training.lose(nodes[1])
    training.end()
    nodes[1] = cluster.add()
    training.start(nodes)
    training.wait(2 * START_S)
    found = resumed(training)
    assert {level for _, level in found.values()} == {"memory", "parity"}, training.output()
    assert min(step for step, _ in found.values()) >= 4
    assert_exact(training, undisturbed("fsdp"))


def test_a_node_behind_a_partition_is_not_asked_cannot_serve_and_is_not_believed_when_it_is_back(cluster, undisturbed):
    """It lives, with its keeper and its memory; the process group went on without it."""
    training = Training(cluster, "fsdp", has_level=False, redundancy="auto")
    training.start(cluster.nodes, hold_at=7, protected_at=6)
    training.wait_held()
    one, other = cluster.nodes
    other.unplug()
    left = training.launchers.pop(other)
    training.end()
    training.start([one, cluster.add()], hold_at=10, protected_at=10)
    training.wait_held()
    assert {level for _, level in resumed(training).values()} == {"memory", "parity"}, training.output()
    assert_exact(training, [line for line in undisturbed("fsdp") if int(line[1]) <= 10])

    training.launchers[other] = left
    other.plug()  # its keeper tries to reach the others, with the secret of the start before
    until(lambda: connections(other, "01") == [], lambda: "it is listened to")
    training.lose(cluster.nodes[2])
    training.end()
    training.start([one, other])
    training.wait()
    assert_from_memory(training, [1], 2, at_least=10)
    assert_exact(training, undisturbed("fsdp"))


def test_memory_that_goes_while_a_restart_computes_from_it_costs_the_steps_since_storage(make_cluster, undisturbed):
    cluster = make_cluster(3)
    training = Training(cluster, "fsdp", local=1, redundancy="auto")
    training.start(cluster.nodes, hold_at=9, durable_at=4, protected_at=8)
    training.wait_held()
    one, other, lost = cluster.nodes
    training.lose(lost)
    training.end()
    spare = cluster.add()
    training.faults[spare] = "restore.compute:2:stop"
    training.start([one, other, spare])
    until(lambda: [state(spare, number) for number in ranks(spare)] == ["T"], training.output, timeout_s=START_S)
    other.run("kill", "-9", str(keepers(other)[0]))
    spare.run("kill", "-CONT", str(ranks(spare)[0]))
    training.wait()
    assert {step for step, _ in resumed(training).values()} <= {4, 6, 8}
    assert resumed(training)[2][1] == str(training.level)
    # By rank 2 of its shard, or by all of the step: that depends on what was read when the memory went.
    lines = [line for line in training.output().splitlines() if "not enough of its group is left" in line]
    assert lines, training.output()
    assert all("at parity" in line and f"{other.address}:" in line for line in lines)
    assert_exact(training, undisturbed("fsdp", 3))


def test_more_nodes_lost_than_parity_replaces_cost_the_steps_since_storage(make_cluster, undisturbed):
    cluster = make_cluster(3)
    training = Training(cluster, "fsdp", local=1, redundancy="auto")
    training.start(cluster.nodes, hold_at=9, durable_at=4, protected_at=8)
    training.wait_held()
    lose_and_replace(training, 0, 2)
    [step] = {step for step, _ in resumed(training).values()}
    assert 4 <= step < 9
    assert str(training.level) in {level for _, level in resumed(training).values()}
    assert "2 of 3 nodes of a group are lost or out of reach, parity replaces 1" in training.output()
    assert_exact(training, undisturbed("fsdp", 3))


def test_the_one_node_that_is_left_goes_on_alone_with_all_ranks(cluster, undisturbed):
    """What it needs of the other one is in its own keeper."""
    training = Training(cluster, "fsdp", local=1, has_level=False, redundancy="auto")
    training.start(cluster.nodes, hold_at=7, protected_at=6)
    training.wait_held()
    training.lose(cluster.nodes[1])
    training.end()
    training.local = 2
    training.start(cluster.nodes[:1])
    training.wait(2 * START_S)
    assert [level for _, level in resumed(training).values()] == ["memory", "parity"], training.output()
    assert_exact(training, undisturbed("fsdp", 2))


def test_a_spare_node_joins_a_running_torchrun_which_goes_on_from_memory(cluster, undisturbed):
    training = Training(cluster, "fsdp", has_level=False, redundancy="auto")
    training.start(cluster.nodes, rendezvous="c10d", restarts=3, hold_at=7, protected_at=6)
    training.wait_held()

    training.lose(cluster.nodes[1])
    training.let_go()
    training.join(cluster.add())
    training.wait()

    assert_from_memory(training, [1], 2, at_least=6)
    assert set(training.lines()) == set(undisturbed("fsdp"))
