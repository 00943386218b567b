"""The connection between a trainer and a keeper that both live ends: no capture is lost for that."""

import contextlib
import os
import socket
import struct
import threading

import pytest
from keeper_jobs import until
from test_strange_answers import keeper_at

from lazysnap.config import MemoryLevel, SnapshotConfig
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.protocol import PROTOCOL, Done, Drain, Hello, Run, Stop, Welcome, encode
from lazysnap.topology import Team

DEADLINE_S = 60


def reconnected(trainer):
    """Break the connection, and wait until there is another one with all slots."""
    trainer.take_events()
    trainer.cut()
    assert until(lambda: "KeeperReady" in [name for name, _ in trainer.take_events()])
    assert until(lambda: trainer.slots() == 3)


@pytest.mark.slow
def test_a_capture_that_is_being_copied_when_the_connection_breaks_is_whole_in_the_end(job):
    first = job.trainer()
    first.capture(step=1)
    first.begin(step=2)
    keeper = job.keeper_pid()
    reconnected(first)
    first.commit()

    assert [entry[:3] for entry in first.inventory()] == [[1, "ab" * 8, True], [2, "ab" * 8, True]]
    assert job.keeper_pid() == keeper


@pytest.mark.slow
def test_the_first_capture_of_all_is_not_given_up_either(job):
    first = job.trainer()
    first.begin(step=1)
    keeper = job.keeper_pid()
    reconnected(first)
    first.commit()

    assert [entry[:3] for entry in first.inventory()] == [[1, "ab" * 8, True]]
    assert job.keeper_pid() == keeper


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_a_trainer_that_dies_without_a_connection_is_settled_as_any_other(job, whole):
    """Its keeper waits for a restart with what is whole, drops what is not, and leaves if that was all."""
    first = job.trainer(linger_s=100)
    if whole:
        first.capture(step=1)
    first.begin(step=2)
    keeper = job.keeper_pid()
    first.disconnect()
    first.kill()

    if whole:
        second = job.trainer(reserve=0)
        assert [entry[0] for entry in second.inventory()] == [1]
        assert job.keeper_pid() == keeper
    else:
        assert until(job.is_gone)


def asked(job, data):
    """What the keeper answers to a connection that is not its trainer's; ``None``, if it ends it."""
    with contextlib.closing(try_connect(job.identity)) as connection:
        connection.sock.sendall(data)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(DEADLINE_S), 0))
        received = connection.receive()
    return received[0][0] if received else None


@pytest.mark.slow
def test_a_program_of_another_version_ends_no_trainer_that_lost_its_connection(job):
    first = job.trainer()
    keeper = job.keeper_pid()
    first.disconnect()
    body = encode(Hello((), MemoryLevel(), Team()))

    assert isinstance(asked(job, struct.pack("<IHH", len(body), PROTOCOL + 1, 0) + body), Done)

    # The keeper of a trainer that lives stays, whatever it holds; that of a dead one would leave: it holds nothing.
    body = encode(Stop())
    answer = asked(job, struct.pack("<IHH", len(body), PROTOCOL, 0) + body)
    assert isinstance(answer, Done)
    assert "its training runs" in answer.text
    assert job.keeper_pid() == keeper


def test_a_keeper_knows_the_run_before_anything_is_asked(tmp_path):
    """Else it does nothing for captures of a run that it has not heard of, and says that they are not durable."""
    config = SnapshotConfig(job_id=str(tmp_path))
    identity, heard, answers = JobIdentity.from_config(config), [], []

    def answer(message):
        heard.append(type(message))
        if isinstance(message, Hello):
            return [(Welcome(os.getpid()), ())]
        return [(Done(id=message.id, ok=True), ())] if isinstance(message, Drain) else []

    with keeper_at(identity, answer):
        client = KeeperClient(identity, config)
        client.adopt_run(Run("ab" * 8, "1" * 16, 0, 0, 1, 1, {}, [], None, is_new=True))

        def ask_at_once():
            until(lambda: client.keeper_pid is not None)
            answers.append(client.drain(1, DEADLINE_S))

        threading.Thread(target=ask_at_once, daemon=True).start()
        client.connect(DEADLINE_S)
        assert until(lambda: answers) == [True]
        client.abandon()

    assert heard.index(Run) < heard.index(Drain)
