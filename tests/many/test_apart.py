"""Ranks that train apart agree, beside training, on snapshots that all have; a restart finds what was agreed on."""

import socket

import pytest

POINTS = [
    "engine.agreement.join",
    "engine.agreement.joined",
    "engine.agreement.agree",
    "engine.agreement.learn",
    "engine.begun",
    "capture.commit",
]
ENDLESS = 1_000_000
"""More steps than are trained before the fault comes."""
APART = {"period": "never", "by_rank": {"1": {"behind": [0, 5]}}}


def agreed(job):
    """The newest step that any rank knew to be whole on all."""
    return max((int(line[2]) for line in job.events("agreed")), default=-1)


def faulty(point, victims, count=3):
    at = 60 * count if not point.startswith("engine.agreement") else 4 * count if "learn" in point else count
    return dict.fromkeys(victims, f"{point}:{at}:kill")


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1, 2)])
def test_what_was_agreed_on_survives_death_at_every_point(make_job, victims):
    """Three ranks of different speed that never wait for each other; one training that dies at one point after
    another.
    """
    job = make_job(levels=[])
    reached = 0
    for point in POINTS:
        # Who counts the last one is not known before.
        who = range(3) if point == "engine.agreement.agree" else victims
        codes = job.run("plain", 3, faults=faulty(point, who), steps=ENDLESS, **APART)
        assert -9 in codes, (point, codes, job.output())
        assert job.resumed() >= reached, (point, job.output())
        assert agreed(job) > reached, (point, job.output())
        reached = agreed(job)

    assert set(job.run("plain", 3, look=True, **APART)) == {0}, job.output()

    assert job.resumed() >= reached


def test_a_candidate_that_a_rank_heard_of_too_late_is_given_up_for_a_later_one(make_job):
    job = make_job(levels=[])
    codes = job.run("plain", 2, faults=faulty("engine.agreement.raise", (0, 1), 2), steps=ENDLESS, **APART)
    assert -9 in codes, job.output()
    reached = agreed(job)

    job.run("plain", 2, faults=faulty("engine.agreement.joined", (0,), 4), steps=ENDLESS, **APART)

    assert job.resumed() >= max(reached, 0)
    assert agreed(job) > reached


def test_with_averagings_far_apart_three_slots_are_enough_and_the_end_is_the_same(make_job, make_shared_job):
    job = make_job(levels=[])
    settings = {"period": 100, "by_rank": {"0": {"behind": [1, -1]}}}
    codes = job.run("local", 2, faults=faulty("engine.agreement.joined", (1,), 3), steps=ENDLESS, **settings)
    assert -9 in codes, job.output()
    assert {line[3] for line in job.events("agreed")} == {"3"}
    reached = agreed(job)

    assert set(job.run("local", 2, steps=reached + 150, **settings)) == {0}, job.output()

    assert job.resumed() >= reached
    whole = make_shared_job("whole", levels=[])
    assert set(whole.run("local", 2, steps=reached + 150, silent=True, period=100)) == {0}, whole.output()
    assert job.results() == whole.results()


def test_with_storage_it_is_one_slot_more(job):
    assert set(job.run("plain", 2, period="never", steps=30, stop_at=30)) == {9}, job.output()

    assert {line[3] for line in job.events("agreed")} == {"4"}


def test_where_the_rank_that_holds_the_store_dies_the_others_train_on_and_what_was_agreed_on_stays(make_job):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = "ranks agree on no newer snapshot in memory"
    job = make_job(levels=[])

    codes = job.run(
        "plain",
        3,
        faults={0: "engine.agreement.joined:4:kill"},
        spare=True,
        steps=ENDLESS,
        stop_at=1500,
        await_log=text,
        init=f"tcp://127.0.0.1:{port}",
        period="never",
    )

    assert codes == [-9, 9, 9], job.output()
    assert job.output().count(text) == 2
    assert {line[2] for line in job.events("awaited")} == {"True"}
    reached = agreed(job)
    assert reached > 0
    assert set(job.run("plain", 3, look=True, **APART)) == {0}, job.output()
    assert job.resumed() >= reached


@pytest.mark.parametrize(("period", "text"), [(4, "each keeps the 4 newest ones"), ("never", "no step in common")])
def test_where_one_rank_cannot_ask_the_store_all_fall_back_to_counting_and_say_so_once(make_job, period, text):
    job = make_job(levels=[])

    codes = job.run("plain", 2, by_rank={"1": {"no_board": True}}, period=period, stop_at=8)

    assert codes == [9, 9], job.output()
    assert job.output().count("the process group's store cannot be asked by all ranks") == 2
    assert job.output().count(text) == 2
    assert job.events("agreed") == []
    assert set(job.run("plain", 2, look=True)) == {0}, job.output()
    assert job.resumed() > 0
