"""One rank of several has no memory for captures: training goes on, and that rank says what it means."""

import pathlib

import pytest
from rank_keepers import keeper_of
from support.stored import snapshots_at
from support.waiting import stop

NO_MEMORY = {"max_bytes": 1 << 16, "spill_dir": ""}


@pytest.mark.parametrize(("kind", "lacking"), [("ddp", ("1",)), ("fsdp", ("0", "1"))], ids=["one", "all"])
def test_ranks_train_on_where_some_have_no_memory_and_those_say_so(make_job, kind, lacking):
    job = make_job()

    codes = job.run(kind, 2, by_rank={rank: NO_MEMORY for rank in lacking}, steps=8)

    assert codes == [0, 0], job.output()
    assert {int(line[2]) for line in job.events("trained")} == set(range(1, 9))
    assert [line[-1] for line in job.events("closed")] == ["False", "False"], job.output()
    assert not snapshots_at(job.levels[0]["url"])
    assert all("NOT protected in memory" in output(job, rank) for rank in lacking)


def test_a_rank_whose_slots_are_files_resumes_exactly_beside_one_whose_slots_are_memory(make_job):
    job = make_job()
    by_rank = {"1": {"max_bytes": 1 << 16}}
    assert job.run("fsdp", 2, by_rank=by_rank, steps=8, stop_at=6) == [9, 9], job.output()
    stopped, own = job.stopped(), job.own("stopped")

    assert job.run("fsdp", 2, by_rank=by_rank, steps=8) == [0, 0], job.output()

    assert job.resumed() == 6
    assert {line[2] for line in job.origins()} == stopped
    assert {line[1] for line in job.origins()} == {"memory"}
    assert job.own("resumed") == own
    assert "captures go into files in" in output(job, 1)
    assert [line[-1] for line in job.events("closed")] == ["True", "True"], job.output()


def test_what_is_due_and_named_is_the_same_on_each_rank_also_where_one_cannot_capture(make_job):
    """Collecting the state may need all ranks: a rank that collected it at another step would wait for ever."""
    job = make_job()

    codes = job.run("ddp", 2, by_rank={"1": NO_MEMORY}, every=4, gathers=True, keep_at=4, steps=9)

    assert codes == [0, 0], job.output()
    assert job.begun(0) == {1, 4, 8}, job.output()
    assert job.begun(1) == set()
    assert [line[2] for line in job.events("named")] == ["4", "4"]


def output(job, rank):
    return (pathlib.Path(job.place) / f"output.{rank}").read_text()


def test_all_ranks_end_together_where_one_lacks_what_is_required(make_job):
    job = make_job()

    codes = job.run("ddp", 2, by_rank={"1": NO_MEMORY}, require_memory=True, spare=True)

    assert codes == [1, 1], job.output()
    for rank in (0, 1):
        text = output(job, rank)
        assert "MemoryBoundExceeded: rank 1: " in text
        assert "max_bytes" in text


def test_a_keeper_that_is_silent_while_engines_are_made_joins_when_it_answers(make_job):
    """It costs what was trained meanwhile, and neither durability nor protection of the rest of the run."""
    job = make_job(nodes=("node-a", "node-b"))
    by_rank = {"0": {"node": "node-a"}, "1": {"node": "node-b"}}
    assert set(job.run("ddp", 2, by_rank=by_rank, stop_at=4, wait_durable=True)) == {9}, job.output()
    pid = keeper_of(job, "node-a")
    stop(pid)

    settings = {"by_rank": by_rank, "io_timeout_s": 1.0, "thaw": pid, "steps": 10_000, "lag_s": 0.02}
    codes = job.run("ddp", 2, until_stored_after=5, wait_protected=True, wait_durable=True, **settings)

    assert set(codes) == {9}, job.output()
    for word in ("protected", "durable"):
        assert [line[3] for line in job.events(word)] == ["True", "True"], job.output()
    assert "the keeper of node-a does not answer yet" in job.output()
    assert "pip install" not in job.output()


def test_a_rank_without_memory_for_parity_captures_each_step_and_says_what_is_not_protected(make_job):
    """Of three slots none may be held: two are the newest captures, and the next step needs the third."""
    job = make_job(levels=[], nodes=("node-a", "node-b"))
    by_rank = {"0": {"node": "node-a"}, "1": {"node": "node-b", "max_bytes": 7_500_000, "spill_dir": ""}}

    for _ in range(2):  # the second start finds the three slots of the first
        codes = job.run("ddp", 2, by_rank=by_rank, stop_at=12, lag_s=0.1, steps=100, fresh=True)

        assert set(codes) == {9}, job.output()
        assert job.begun(1) == set(range(1, 13)), job.output()
        assert "NOT protected against the loss of a node, there is too little memory" in output(job, 1)
        assert "too little memory" not in output(job, 0)


def test_whether_a_resumed_step_is_protected_is_known_at_once(make_job):
    job = make_job(levels=[], nodes=("node-a", "node-b"))
    settings = {"by_rank": {"0": {"node": "node-a"}, "1": {"node": "node-b"}}}
    assert set(job.run("ddp", 2, stop_at=4, wait_protected=True, **settings)) == {9}, job.output()

    codes = job.run("ddp", 2, resumes_protected=True, look=True, **settings)

    assert codes == [0, 0], job.output()
    assert [line[2] for line in job.events("protected")[-2:]] == ["4", "4"]
