"""After a restart with fewer ranks, the memory of the others stays as long as it is needed, and no longer."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from jobs import until
from rank_keepers import local_ranks

LINGER_S = 1000


def four_ranks(job):
    assert set(job.run("ddp", 4, stop_at=3, linger_s=LINGER_S)) == {9}, job.output()
    assert local_ranks(job) == [0, 1, 2, 3]


def test_they_are_there_until_two_ranks_have_snapshots_of_their_own_and_gone_in_the_end(make_job):
    job = make_job(levels=[])
    four_ranks(job)
    while_needed = []

    with job.held(lambda: while_needed.append(local_ranks(job))):
        assert set(job.run("ddp", 2, hold_at=4, steps=8, linger_s=LINGER_S)) == {0}, job.output()

    assert job.resumed() == 3
    assert while_needed == [[0, 1, 2, 3]]
    until(lambda: local_ranks(job) == [], job.output)


@pytest.mark.parametrize(
    ("settings", "kind", "ranks"), [({"levels": []}, "ddp", 2), ({}, "plain", 1)], ids=["memory", "storage"]
)
def test_they_leave_while_fewer_ranks_train_and_nothing_is_lost_by_that(make_job, settings, kind, ranks):
    job = make_job(**settings)
    four_ranks(job)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(job.run, kind, ranks, steps=1_000_000, lag_s=0.02, linger_s=LINGER_S)
        until(lambda: job.runs == 2 and len(job.events("gated")) >= ranks, job.output)
        until(lambda: local_ranks(job) == list(range(ranks)), job.output)
        trained = min(len([line for line in job.events("gated") if line[0] == str(rank)]) for rank in range(ranks))
        for _, _, pid in job.events("pid"):
            os.kill(int(pid), signal.SIGKILL)
        assert set(training.result()) == {-signal.SIGKILL}

    assert set(job.run(kind, ranks, look=True)) == {0}, job.output()

    # The README's figures: one step of a lone rank, two of several, whose captures are whole at different moments.
    assert job.resumed() >= 3 + trained - (1 if ranks == 1 else 2)
    assert {level for _, level, _ in job.origins()} == {"memory"}
