"""The first boundary is captured on all ranks; what one rank refuses ends the restore of all."""


def check_only_second_may_be_left_out(job):
    """The first boundary waits for one slot; the next one finds no other while that is being made."""
    assert job.begun(0) >= {1, 3}
    assert job.begun(1) >= {1, 3}
    assert {line[2] for line in job.events("skipped")} <= {"2"}


def test_after_wait_ready_no_boundary_is_left_out(make_job):
    job = make_job(levels=[])

    assert set(job.run("tp", 4, stop_at=3)) == {9}, job.output()

    assert {line[2] for line in job.events("ready")} == {"True"}
    assert job.events("skipped") == []
    assert [line[2] for line in job.events("begun")] == ["1", "2", "3"] * 4


def test_without_any_waiting_before_it_the_first_boundary_is_captured_on_all_ranks(make_job):
    job = make_job(levels=[])

    assert set(job.run("ddp", 2, stop_at=3, unready=True)) == {9}, job.output()

    check_only_second_may_be_left_out(job)


def test_memory_that_was_estimated_too_small_is_waited_for_at_the_first_boundary(make_job):
    job = make_job(levels=[])

    assert set(job.run("plain", 2, stop_at=3, by_rank={"1": {"hoard": 30}})) == {9}, job.output()

    check_only_second_may_be_left_out(job)


REFUSALS = {
    "sparse": "StateError: rank 1: model.odd: a tensor with layout",
    "swapped": "StateError: rank 1: optimizer: parameter 0 is",
    "unloadable": "StateError: rank 1: RuntimeError: not today",
}


def test_what_one_rank_refuses_ends_the_restore_of_all_at_once_and_costs_nothing(make_job):
    job = make_job(levels=[])
    assert set(job.run("plain", 2, stop_at=3)) == {9}, job.output()

    for odd, text in REFUSALS.items():
        codes = job.run("plain", 2, spare=True, collective_timeout_s=1000.0, by_rank={"1": {"odd": odd}})

        assert codes == [1, 1], job.output()
        assert job.output().count(text) >= 2, job.output()
        assert job.events("resumed") == []
    assert set(job.run("plain", 2, look=True)) == {0}, job.output()
    assert job.resumed() == 3


def test_ranks_that_have_nothing_left_to_train_leave_the_only_copy_in_memory(make_job):
    job = make_job()
    job.root.mkdir()
    (job.root / "level").touch()  # where a directory has to be: memory alone has what is captured
    assert set(job.run("fsdp", 2, stop_at=4)) == {9}, job.output()
    for _ in range(2):
        assert job.run("fsdp", 2, steps=4) == [0, 0], job.output()
        assert job.resumed() == 4, job.output()
        assert [line[2:] for line in job.events("closed")] == [["False"]] * 2, job.output()
