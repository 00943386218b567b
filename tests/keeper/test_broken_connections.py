"""The connection between a trainer and a keeper that both live ends: no capture is lost for that."""

import contextlib
import os
import struct

import pytest
from keeper_jobs import until

from lazysnap.core.messages import PROTOCOL
from lazysnap.errors import KeeperError
from lazysnap.keeper.asking import ask
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.questions import Question

DEADLINE_S = 60


def reconnected(trainer):
    """Break the connection, and wait until there is another one with all slots."""
    assert trainer.cut()
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


@pytest.mark.slow
def test_a_program_of_another_version_ends_no_trainer_that_lost_its_connection(job):
    first = job.trainer()
    keeper = job.keeper_pid()
    first.disconnect()
    with contextlib.closing(try_connect(job.identity)) as stranger:
        os.write(stranger.fileno(), struct.pack("<IHH", 2, PROTOCOL + 1, 0) + b"{}")
        with contextlib.suppress(ConnectionError, KeeperError):
            while stranger.receive() is not None:
                stranger.wait(DEADLINE_S)

    # The keeper of a trainer that lives stays, whatever it holds; that of a dead one would leave: it holds nothing.
    with contextlib.closing(try_connect(job.identity)) as channel:
        answer = ask(channel, Question(about="stop"), DEADLINE_S)
    assert "its training runs" in answer.text
    assert job.keeper_pid() == keeper
