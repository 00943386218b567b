"""The coordinator and the nodes of a job as processes, over links on loopback: deaths of each, and what stays."""

import contextlib
import pathlib
import queue
import subprocess
import sys
import threading

import pytest
from support.listing import files_below
from support.waiting import TIMEOUT_S, until

from lazysnap.links.secret import draw_secret

NUM_NODES = 3


class Process:
    """A node, see ``grant_node``."""

    def __init__(self, number, port, directory, secret):
        self.number, self.directory, self.lines = number, directory, queue.Queue()
        script = str(pathlib.Path(__file__).parent / "grant_node.py")
        arguments = [sys.executable, script, *map(str, (number, NUM_NODES, port, directory))]
        self.popen = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False)
        self.write(secret.hex.encode() + b"\n")
        self.complete = set()
        self.is_broken = False
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.popen.stdout:
            kind, *rest = line.decode().split()
            if kind == "complete":
                self.complete |= set(map(int, rest))
            elif kind == "broken":
                self.is_broken = True
            else:
                self.lines.put((kind, *map(int, rest)))

    def write(self, data):
        self.popen.stdin.write(data)
        self.popen.stdin.flush()

    def tell(self, *words):
        self.write(" ".join(map(str, words)).encode() + b"\n")

    def kill(self):
        self.popen.kill()
        self.popen.wait()
        self.reader.join()
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        self.popen.stdout.close()


class Job:
    def __init__(self, directory):
        self.directory, self.secret, self.step = directory, draw_secret(), -5
        first = Process(0, 0, directory, self.secret)
        self.port = first.lines.get(timeout=TIMEOUT_S)[1]
        self.nodes = [first] + [Process(number, self.port, directory, self.secret) for number in (1, 2)]

    def replace(self, number):
        """Its keeper is killed and another takes its place; memory is lost, files stay."""
        self.nodes[number].kill()
        self.nodes[number] = Process(number, self.port, self.directory, self.secret)

    def train(self):
        """All ranks capture the next step."""
        self.step += 5
        for node in self.nodes:
            node.tell("capture", self.step)
        for node in self.nodes:
            while node.lines.get(timeout=TIMEOUT_S) != ("captured", self.step):
                pass

    def train_until(self, condition):
        """Captures go on; none waits for storage."""

        def is_so():
            self.train()
            return condition()

        until(is_so)

    def newest(self):
        return min(max(node.complete, default=-1) for node in self.nodes)

    def check(self):
        """What was published is there: on all nodes, whole."""
        step = self.newest()
        for node in range(NUM_NODES):
            path = self.directory / f"step-{step}" / f"node-{node}"
            assert path.read_text() == f"step {step} of node {node}"


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    for node in job.nodes:
        node.kill()


@pytest.mark.slow
def test_all_nodes_store_the_same_steps_and_old_ones_go(job):
    job.train_until(lambda: len(job.nodes[2].complete) >= 4)
    job.check()

    newest = job.newest()
    assert newest % 10 == 0
    until(lambda: len(files_below(job.directory, "node-1")) <= 3)  # two that are kept, one being written


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_after_the_death_of_a_keeper_snapshots_become_complete_again(job, number):
    """Node 0's is the coordinator: the new one counts what all nodes have."""
    job.train_until(lambda: job.newest() >= 20)
    before = job.newest()

    job.replace(number)
    until(lambda: max(job.nodes[number].complete, default=-1) >= before)
    job.check()
    job.train_until(lambda: job.newest() >= before + 20)

    job.check()


@pytest.mark.slow
@pytest.mark.parametrize("action", ["releasestalepins", "pin", "begin"])
def test_an_action_that_fails_once_costs_at_most_a_step(job, action):
    """What the core has decided is carried out, or the write has failed and another one follows."""
    node = job.nodes[1]
    job.train_until(lambda: job.newest() >= 10)
    node.tell("break", action)
    job.train_until(lambda: node.is_broken)
    before = job.newest()

    job.train_until(lambda: job.newest() >= before + 20)
    job.check()


@pytest.mark.slow
def test_a_flush_stores_the_newest_step_while_training_waits(job):
    """A step that is not due; the next granted one would never be begun."""
    job.train_until(lambda: job.newest() >= 10 and job.step % 10 == 5)
    for node in job.nodes:
        node.tell("require", job.step)

    until(lambda: all(job.step in node.complete for node in job.nodes))
    job.check()
    job.train_until(lambda: job.newest() % 10 == 0)


@pytest.mark.slow
def test_when_all_trainers_die_the_newest_step_becomes_complete(job):
    job.train_until(lambda: job.newest() >= 10)
    job.train()
    for node in job.nodes:
        node.tell("die")

    until(lambda: job.newest() == job.step)
    job.check()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_when_all_trainers_die_and_a_node_is_lost_the_others_store_what_they_hold(job, lost):
    """Also node 0, and a node that has a link to node 0."""
    job.train_until(lambda: job.newest() >= 10)
    job.train_until(lambda: job.step % 10 == 5)  # not due: no grant stores it
    job.nodes[lost].kill()
    left = [node for node in job.nodes if node.number != lost]
    for node in left:
        node.tell("die")

    for node in left:
        path = job.directory / f"step-{job.step}" / f"node-{node.number}"
        assert until(path.exists, node)


@pytest.mark.slow
def test_when_all_trainers_die_and_links_are_down_the_newest_step_is_stored_by_each_node(job):
    """Node 0 keeps its memory, but nobody reaches it."""
    job.train_until(lambda: job.newest() >= 10)
    job.train_until(lambda: job.step % 10 == 5)
    for node in job.nodes[1:]:
        node.tell("part")
    for node in job.nodes:
        node.tell("die")

    for node in job.nodes:
        path = job.directory / f"step-{job.step}" / f"node-{node.number}"
        assert until(path.exists, node)
