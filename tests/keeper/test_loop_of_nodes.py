"""Two keeper processes of one job, each for a node with one rank; the trainers of both are this process."""

import contextlib
import os
import signal
import tempfile
import time
from functools import partial

import pytest
from msgspec import structs
from support.hand_trainer import JOB, WISH, HandTrainer
from support.ports import free_port
from support.waiting import TIMEOUT_S, until

from lazysnap.core.messages import LevelSettings, PeerAddress, PeerSettings, RedundancySettings, StepKey
from lazysnap.peers.secret import draw_secret

START = 9


@pytest.fixture(autouse=True)
def runtime_directory(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="lazysnap-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        monkeypatch.setenv("LAZYSNAP_RUNTIME_DIR", directory)
        yield directory


@pytest.fixture
def nodes():
    """The trainers of two nodes, with slots."""
    trainers = [HandTrainer("nodes", node=node, memory=structs.replace(WISH, num_slots=4)) for node in range(2)]
    yield trainers
    for trainer in trainers:
        trainer.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(trainer.keeper.pid, signal.SIGKILL)


def begin(trainers, start=START, **settings):
    """Begin one start on all nodes."""
    addresses = tuple(PeerAddress("127.0.0.1", free_port()) for _ in range(2))
    secret = draw_secret()
    for node, trainer in enumerate(trainers):
        trainer.until_state(lambda state: len(state.slots) == 4)
        job = structs.replace(JOB, ranks=(node,), world_size=2, node=node, num_nodes=2, **settings)
        trainer.change(start=start, step=0, job=job, peers=PeerSettings("nodes", node, secret, addresses))


def test_a_step_is_complete_once_all_nodes_stored_it(nodes, tmp_path):
    begin(nodes, levels=(LevelSettings(str(tmp_path), every_n_steps=1),))
    nodes[0].until_state(lambda state: state.serves_at)
    for trainer in nodes:
        trainer.change(required=(1,))

    nodes[1].capture(1)
    nodes[1].read(timeout_s=0.5)
    assert nodes[1].keeper.levels[0].complete == ()
    nodes[0].capture(1)

    for trainer in nodes:
        state = trainer.until_state(lambda state: state.levels[0].complete)
        assert state.levels[0].complete == (StepKey(START, 1),)


def test_captures_are_protected_by_the_other_node(nodes):
    protect(nodes)

    def holds_what_is_protected(trainer):
        answer, _ = trainer.ask(about="memory")
        return trainer.keeper.protected.step in {parity.step for parity in answer.memory.parity}

    for trainer in nodes:  # an answer may be older than the state that came before it
        until(partial(holds_what_is_protected, trainer))


def test_parity_goes_once_a_start_without_redundancy_has_captures_of_its_own(nodes):
    protect(nodes)

    begin(nodes, start=START + 1)

    def holds_parity(trainer):
        answer, _ = trainer.ask(about="status")
        return answer.status.parity_bytes > 0

    assert all(holds_parity(trainer) for trainer in nodes)
    for step in range(1, 5):
        for trainer in nodes:
            trainer.capture_free(step)
    for trainer in nodes:
        until(lambda trainer=trainer: not holds_parity(trainer))


def protect(nodes):
    """Capture steps until one is protected."""
    begin(nodes, redundancy=RedundancySettings(every_n_steps=1, members=(0, 1)))
    step = 0
    deadline = time.monotonic() + TIMEOUT_S
    while any(trainer.keeper.protected is None for trainer in nodes):
        step += 1
        assert time.monotonic() < deadline, nodes[0].keeper
        for trainer in nodes:
            trainer.capture_free(step)
            trainer.read(timeout_s=0.05)
