"""A keeper is killed, and its trainer soon after. What is left depends on the start of the next keeper."""

import os
import signal

import pytest
from keeper_jobs import until
from support.catalogue import inventory_of

from lazysnap.levels import open_store

DEADLINE_S = 60


def killed(job, fault, **settings):
    """A trainer that captured two steps, whose keeper was killed, and that died itself at ``fault``."""
    trainer = job.trainer(environment={"LAZYSNAP_FAULT": fault}, **settings)
    trainer.capture(step=1, must=True)
    if settings:
        assert trainer.wait_durable(step=1, timeout_s=DEADLINE_S)
    trainer.capture(step=2)
    os.kill(job.keeper_pid(), signal.SIGKILL)
    assert trainer.process.wait(DEADLINE_S) == -signal.SIGKILL


@pytest.mark.parametrize("linger_s", [100.0, 0.5])
def test_a_trainer_that_dies_before_the_next_keeper_runs_has_left_it_everything(job, linger_s):
    killed(job, "client.handed_over:2:kill", linger_s=linger_s, levels=[job.level(every_n_steps=1000)])

    if linger_s > 1:
        # Another trainer that comes before it listens starts one of its own, and both may not have the memory.
        assert until(job.keeper_pid)
        second = job.trainer(reserve=0)
        assert [entry[:3] for entry in second.inventory()] == [[1, "ab" * 8, True], [2, "ab" * 8, True]]
    else:
        store = open_store(job.level()["url"])
        assert until(lambda: 2 in [entry.step for entry in inventory_of(store).entries])
        assert until(job.is_gone)


def test_a_trainer_that_dies_before_it_starts_the_next_keeper_leaves_what_is_on_storage(job):
    level = job.level(every_n_steps=1000)
    killed(job, "client.start_keeper:2:kill", levels=[level])

    assert until(job.is_gone)
    assert job.trainer(reserve=0, levels=[level]).inventory() == []
    assert [entry.step for entry in inventory_of(open_store(level["url"])).entries] == [1]
