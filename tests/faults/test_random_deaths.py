"""Any of the processes of a training die at any moment, again and again: it ends as if nothing had happened.

A death is at a random passage of a random fault point, or when the training has come to a random event. What is drawn
follows from the seed, which a failure tells; which of two processes is faster does not.
"""

import contextlib
import os
import random
import signal

import pytest
from one_process import Job
from support.waiting import until

STEPS = 100
DEATHS = 10
LAST = 4
"""Starts without a new death. A keeper that was just being started has the fault of the start before it."""
ACTIONS = ("kill", "kill-peer", "kill-both")
VICTIMS = (("trainer",), ("keeper",), ("trainer", "keeper"), ("keeper", "trainer"))
"""In this order. A trainer that lost its keeper trains on."""


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    """The digest at the end of a training that nothing happens to, and the points that it passes."""
    root = tmp_path_factory.mktemp("undisturbed")
    job = Job(zygote, root / "job", STEPS)
    assert job.run(log=root / "points") == 0, job.output
    return job.result.read_text(), sorted(set((root / "points").read_text().splitlines()))


def run_to_death(job, draw, points):
    """What was to happen, and the exit status. The fault may be met before any of the other deaths, or never."""
    told = [f"{draw.choice(points)}:{draw.randint(1, 8)}:{draw.choice(ACTIONS)}"]
    child = job.start(fault=told[0])
    victims = ()
    while not child.is_over() and "trainer" not in victims:
        lines, victims = len(job.events()) + draw.randint(1, 40), draw.choice(VICTIMS)
        until(lambda lines=lines: child.is_over() or len(job.events()) >= lines, lambda: job.output)
        told.append(f"line {lines}: {' and '.join(victims)}")
        for victim in victims:
            if victim == "trainer":
                child.kill()
            else:
                end_keeper(job)
    return told, child.get()


def end_keeper(job):
    if (keeper := job.keeper()) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGKILL)


@pytest.mark.timeout(600)
def test_whatever_dies_the_training_ends_as_if_nothing_had_happened(zygote, undisturbed, tmp_path):
    wanted, points = undisturbed
    draw = random.Random(0)
    job = Job(zygote, tmp_path / "job", STEPS)
    story = []

    for _ in range(DEATHS):
        durable, before = job.newest("durable"), len(job.events())
        way, status = run_to_death(job, draw, points)
        resumed = [int(line[1]) for line in job.events()[before:] if line[0] == "resumed"]
        story.append(" ".join(map(str, [way, status, resumed, durable])))
        assert status in (0, -9), "\n".join([*story, job.output])
        assert all(step >= durable for step in resumed), "\n".join([*story, job.output])
        if status == 0:  # it came to its end
            break

    for _ in range(LAST):
        if status == 0:
            break
        end_keeper(job)
        status = job.run()
    assert status == 0, "\n".join([*story, job.output])
    assert job.result.read_text() == wanted, "\n".join(story)
