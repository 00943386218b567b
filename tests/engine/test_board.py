"""Whatever is wrong with the store, who asks it hears so, in time."""

import datetime
import os
import select
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from lazysnap.engine.board import Board, BoardUnavailable

HOST = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
TIMEOUT_S = 1.0


@pytest.fixture
def host():
    """A store in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def connected(host):
    assert select.select([host.stdout], [], [], 120)[0], "the store did not come up"
    port = int(host.stdout.readline())
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))


def test_a_store_that_takes_questions_and_does_not_answer_is_given_up_at_the_deadline(host):
    store = connected(host)
    board = Board(store, TIMEOUT_S)
    assert board.add("number") == 1

    os.kill(host.pid, signal.SIGSTOP)
    os.waitpid(host.pid, os.WUNTRACED)  # until it stands still: it may answer one more question before

    for ask in (lambda: board.add("number"), lambda: board.swap("word", "", "x"), lambda: Board(store, TIMEOUT_S)):
        with pytest.raises(BoardUnavailable, match="not within 1 s"):
            ask()


def test_a_store_that_cannot_be_cloned_is_unavailable_and_nothing_worse():
    with pytest.raises(BoardUnavailable, match="clone"):
        Board(object(), TIMEOUT_S)
