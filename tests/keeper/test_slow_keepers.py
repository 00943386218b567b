"""A keeper that runs, and is slow to answer, is waited for."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from test_strange_answers import keeper_at

from lazysnap.config import SnapshotConfig
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.protocol import AskInventory, Hello, Inventory, Welcome

TIMEOUT_S = 1.0
TICK_S = 0.05
"""A keeper looks around so often, also if it has no time to answer."""


@pytest.mark.slow
def test_a_keeper_that_answers_slowly_is_waited_for_as_long_as_it_runs(tmp_path):
    """The greeting and the question each take three times as long as a keeper has that does not run."""
    config = SnapshotConfig(job_id=str(tmp_path), io_timeout_s=TIMEOUT_S)
    identity = JobIdentity.from_config(config)
    is_over = threading.Event()

    def answer(message):
        if isinstance(message, Hello):
            is_over.wait(3 * TIMEOUT_S)
            return [(Welcome(os.getpid()), ())]
        if isinstance(message, AskInventory):
            is_over.wait(3 * TIMEOUT_S)
            return [(Inventory(id=message.id, entries=[], frozen=[], end=None, local_ranks=[3]), ())]
        return []

    client = KeeperClient(identity, config)

    def ask():
        client.connect(TIMEOUT_S)
        return client.inventory(TIMEOUT_S)

    with keeper_at(identity, answer), ThreadPoolExecutor(1) as trainer:
        asked = trainer.submit(ask)
        with contextlib.ExitStack() as stack:
            stack.callback(client.abandon)
            stack.callback(is_over.set)
            while not asked.done():
                wait([asked], TICK_S)

            assert asked.result().local_ranks == (3,)
