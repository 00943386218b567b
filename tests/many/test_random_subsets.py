"""The trainers of two ranks and their keeper die at any moment, again and again: it ends as if nothing had happened.

A rank, or the keeper, dies at a random passage of a random fault point, or when the training has come to a random
event. What is drawn follows from the seed, which a failure tells; which process is faster does not.
"""

import contextlib
import itertools
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_keepers import keepers, kill_keepers
from support.catalogue import inventory_of
from support.waiting import until

from lazysnap.levels.store import open_storage
from lazysnap.resolver import candidates

STEPS = 100
DEATHS = 8
LAST = 4
"""Starts without a new death. A keeper that was just being started has the fault of the start before it."""
ACTIONS = ("kill", "kill-peer", "kill-both")
ALL = ("rank 0", "rank 1", "keeper")
SUBSETS = [victims for count in range(1, 4) for victims in itertools.combinations(ALL, count)]


@pytest.fixture(scope="module")
def undisturbed(make_shared_job):
    """What each rank ends with if nothing happens, and the points that it and its keeper pass."""
    job = make_shared_job("undisturbed")
    assert set(job.run("ddp", 2, steps=STEPS, log=True)) == {0}, job.output()
    return job.results(), [sorted(job.passed(rank)) for rank in (0, 1)]


def end(job, victims):
    ranks = {f"rank {line[0]}": int(line[2]) for line in job.events("pid")}
    others = dict(zip(["keeper"], keepers(job), strict=False))
    for victim in victims:
        with contextlib.suppress(KeyError, ProcessLookupError):  # it is dead, or not there yet
            os.kill((ranks | others)[victim], signal.SIGKILL)


def lines(job, number):
    """How much the start with that number has written down."""
    journal = job.root / f"run{number}" / "journal"
    return len(journal.read_text().splitlines()) if journal.exists() else 0


def run_to_death(job, draw, points):
    """What was to happen, and the exit codes."""
    faults = {
        rank: f"{draw.choice(points[rank])}:{draw.randint(1, 8)}:{draw.choice(ACTIONS)}"
        for rank in (0, 1)
        if draw.random() < 0.5
    }
    plan = []
    while not plan or not {"rank 0", "rank 1"} & set(plan[-1][1]):
        plan.append((draw.randint(1, 60), draw.choice(SUBSETS)))
    number, is_over = job.runs + 1, threading.Event()

    def end_some():
        for further, victims in plan:
            wanted = lines(job, number) + further
            until(lambda wanted=wanted: is_over.is_set() or lines(job, number) >= wanted, lambda: str(plan))
            if is_over.is_set():
                return
            end(job, victims)

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end_some)
        try:
            codes = job.run("ddp", 2, steps=STEPS, faults=faults)
        finally:
            is_over.set()
        ending.result()
    return (faults, plan), codes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_dies_both_ranks_end_as_if_nothing_had_happened(make_job, undisturbed):
    wanted, points = undisturbed
    draw = random.Random(0)
    job = make_job()
    story = []
    codes = []

    for _ in range(DEATHS):
        plans = candidates([inventory_of(open_storage(level["url"])) for level in job.levels])
        held = max((plan.step for plan in plans), default=0)
        way, codes = run_to_death(job, draw, points)
        resumed = {int(line[2]) for line in job.events("resumed")}
        story.append(" ".join(map(str, [way, codes, resumed, held])))
        assert -9 in codes or set(codes) == {0}, "\n".join([*story, job.output()])
        assert len(resumed) <= 1, "\n".join([*story, job.output()])
        assert all(step >= held for step in resumed), "\n".join([*story, job.output()])
        if set(codes) == {0}:  # it came to its end
            break

    for _ in range(LAST):
        if set(codes) == {0}:
            break
        kill_keepers(job)
        codes = job.run("ddp", 2, steps=STEPS)
    assert set(codes) == {0}, "\n".join([*story, job.output()])
    assert job.results() == wanted, "\n".join(story)
