"""The nodes that other tests stand on are apart, really go away, and have the network that they were given."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from support.nodes import why_not
from support.waiting import until

pytestmark = pytest.mark.always
WIRE = (sys.executable, str(pathlib.Path(__file__).with_name("wire.py")))
CLUSTER = """
import pathlib, sys, time
from support.nodes import Cluster
cluster = Cluster(pathlib.Path(sys.argv[1]))
cluster.nodes[1].shape(delay_s=0.001)
cluster.nodes[0].start(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
while len(cluster.nodes[0].processes()) < 3:
    time.sleep(0.01)
print("up", flush=True)
time.sleep(1000)
"""


def serve(node):
    server = node.start([*WIRE, "serve"])
    until(lambda: server.output, lambda: "the server does not start")


def ask(node, other, count=5):
    """Median of the seconds to an answer, and the share of answers that did not come."""
    median_s, answers = node.run(*WIRE, "ask", other.name, str(count)).split()
    return float(median_s), 1 - int(answers) / count


def hears(node, other):
    return ask(node, other)[1] < 1


def pour(node, other, size):
    """Bytes per second."""
    return float(node.run(*WIRE, "pour", other.name, str(size)))


def parents():
    """Of all processes here."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    return found


def networks(pids):
    """The network namespaces of processes."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found


def test_each_node_has_processes_memory_a_name_and_an_address_of_its_own(cluster):
    one, other = cluster.nodes
    one.run("sh", "-c", f"echo mine | tee /dev/shm/x > /tmp/x; echo ours > {cluster.shared}/x")
    sleeper = one.start(["sleep", "1000"], env={"SLEEPS": "soundly"})
    until(lambda: "sleep 1000" in one.processes().values())

    [number] = one.processes()
    assert "SLEEPS=soundly" in one.run("cat", f"/proc/{number}/environ")
    assert sleeper.code is None
    assert other.processes() == {}
    assert other.run("ls", "/dev/shm") == ""
    assert "x" not in other.run("ls", "/tmp").split()
    assert other.run("cat", str(cluster.shared / "x")) == "ours\n"
    assert [node.run("hostname").strip() for node in cluster.nodes] == ["node0", "node1"]
    assert other.address in other.run("ip", "address", "show", "eth0")
    with pytest.raises(AssertionError, match="still running"):
        sleeper.wait(0.1)


@pytest.mark.parametrize("silent", [True, False])
def test_a_killed_node_takes_all_its_processes_along_and_its_peers_hear_of_it_or_not(cluster, silent):
    one, other = cluster.nodes
    serve(other)
    detached = other.start(["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & wait"])
    until(lambda: list(other.processes().values()).count("sleep 1000") == 2)
    held = one.start([*WIRE, "hold", other.name])
    until(lambda: held.output)

    other.kill(silent=silent)

    assert detached.code == -signal.SIGKILL
    assert not hears(one, other)
    if silent:
        assert held.code is None
    else:
        assert held.wait() == 0
        assert held.output.split()[1] in ("closed", "reset")


def test_a_spare_node_has_another_address_and_hears_the_others(cluster):
    one, other = cluster.nodes
    other.kill()

    spare = cluster.add()

    assert spare.address not in (one.address, other.address)
    serve(one)
    assert hears(spare, one)


def test_a_cut_parts_two_nodes_and_no_others(make_cluster):
    one, other, third = make_cluster(3).nodes
    for node in (one, other):
        serve(node)
    assert hears(one, other)

    one.cut(other)

    assert (hears(one, other), hears(other, one)) == (False, False)
    assert (hears(third, one), hears(third, other)) == (True, True)
    one.mend(other)
    assert (hears(one, other), hears(other, one)) == (True, True)
    one.unplug()
    assert (hears(third, one), hears(third, other)) == (False, True)
    one.plug()
    assert hears(third, one)


def test_a_cable_is_as_slow_as_it_was_made(cluster):
    one, other = cluster.nodes
    serve(other)
    size = 2 << 20
    assert ask(one, other)[0] < 0.008
    assert pour(one, other, size) > 20e6

    other.shape(rate="100mbit", delay_s=0.005)
    assert 0.010 <= ask(one, other)[0] < 0.03, "both directions"
    assert 3e6 < pour(one, other, size) < 13e6
    other.shape(loss=0.01)
    assert 0.005 < ask(one, other, 1000)[1] < 0.05
    other.shape()
    assert ask(one, other)[0] < 0.008
    assert pour(one, other, size) > 20e6


def test_two_clusters_have_the_same_names_and_do_not_meet(make_cluster):
    first, second = make_cluster(), make_cluster()
    serve(first.nodes[1])

    assert first.nodes[1].address == second.nodes[1].address
    assert hears(first.nodes[0], first.nodes[1])
    assert not hears(second.nodes[0], second.nodes[1])


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_tests_that_die(tmp_path, number):
    process = subprocess.Popen([sys.executable, "-c", CLUSTER, str(tmp_path / "cluster")], stdout=subprocess.PIPE)
    with process:
        assert process.stdout.readline() == b"up\n"
        below, all_parents = {process.pid}, parents()
        while new := {pid for pid, parent in all_parents.items() if parent in below} - below:
            below |= new
        own = networks(below) - networks([process.pid])
        assert len(own) == 3, "of two nodes and what is between them"
        process.send_signal(number)
    until(lambda: not own & networks(parents()), lambda: "something still runs")
