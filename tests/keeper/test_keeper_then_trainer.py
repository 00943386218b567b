"""A keeper is killed, and its trainer soon after. What is left depends on the start of the next keeper."""

import concurrent.futures
import os
import signal

import pytest
from keeper_jobs import until
from support.stored import steps_at

DEADLINE_S = 60


SLOW_START = """\
import os, sys, time

while "lazysnap.keeper" in sys.orig_argv and os.path.exists({gate!r}):
    time.sleep(0.01)
"""


def killed(job, fault, environment=None, gate=None, **settings):
    """A trainer that captured two steps, whose keeper was killed, and that died itself at ``fault``. ``gate`` is made
    just before."""
    trainer = job.trainer(environment={"LAZYSNAP_FAULT": fault, **(environment or {})}, **settings)
    trainer.capture(step=1, must=True)
    if settings.get("levels"):
        assert trainer.wait_durable(step=1, timeout_s=DEADLINE_S)
    trainer.capture(step=2)
    if gate is not None:
        gate.touch()
    os.kill(job.keeper_pid(), signal.SIGKILL)
    assert trainer.process.wait(DEADLINE_S) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("linger_s", [100.0, 0.5])
def test_a_trainer_that_dies_before_the_next_keeper_runs_has_left_it_everything(job, linger_s):
    killed(job, "client.handed_over:2:kill", linger_s=linger_s, levels=[job.level(every_n_steps=1000)])

    if linger_s > 1:
        second = job.trainer(reserve=0)
        assert [entry[:3] for entry in second.inventory()] == [[1, "ab" * 8, True], [2, "ab" * 8, True]]
    else:
        assert until(lambda: 2 in steps_at(job.level()["url"]))
        assert until(job.is_gone)


@pytest.mark.slow
def test_a_trainer_that_comes_while_the_next_keeper_starts_waits_for_it_and_finds_what_it_was_left(job, tmp_path):
    """Did it start a keeper of its own, one of the two would have to end, and memory with it."""
    gate, log = tmp_path / "gate", tmp_path / "points"
    (tmp_path / "sitecustomize.py").write_text(SLOW_START.format(gate=str(gate)))
    slow = {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))}
    killed(job, "client.handed_over:2:kill", slow, gate, linger_s=100.0, levels=[])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.submit(job.trainer, reserve=0, environment={"LAZYSNAP_FAULT_LOG": str(log), **slow})
        assert until(lambda: log.exists() and "client.start_keeper" in log.read_text())
        gate.unlink()

    assert [entry[0] for entry in second.result(DEADLINE_S).inventory()] == [1, 2]


@pytest.mark.slow
def test_a_trainer_that_dies_before_it_starts_the_next_keeper_leaves_what_is_on_storage(job):
    level = job.level(every_n_steps=1000)
    killed(job, "client.start_keeper:2:kill", levels=[level])

    assert until(job.is_dead)
    assert job.trainer(reserve=0, levels=[level]).inventory() == []
    assert steps_at(level["url"]) == [1]
