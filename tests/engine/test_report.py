"""The lines that tell how a run starts and ends: they say no more than is known."""

import logging

import pytest
from small_training import TIMEOUT_S
from support.stored import steps_at
from support.waiting import until

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.engine import report
from lazysnap.engine.statistics import Statistics
from lazysnap.restore.snapshot import Absence, Snapshot

CONFIG = SnapshotConfig(levels=(PersistentLevel("/a"),), memory=MemoryLevel(linger_s=1800), drain_timeout_s=60)


def test_a_start_that_could_not_look_everywhere_does_not_say_that_there_is_nothing():
    assert "there is no snapshot in memory or at /a" in report.fresh(Absence(("/a",)))
    told = report.fresh(Absence(("/a",), is_partial=True))
    assert "there is no snapshot" not in told
    assert "not all of that could be read" in told


def test_directories_without_a_manifest_are_told():
    told = report.fresh(Absence(("/a", "/b"), uncommitted={"/b": 3}))
    assert "no snapshot in memory or at /a or at /b, but 3 directories without a valid manifest" in told
    assert "`lazysnap ls /b`" in told


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ({}, "stored at /a every 60 s"),
        ({"every_s": 1.5}, "stored at /a every 1.5 s"),
        ({"every_n_steps": 10}, "stored at /a every 10 steps"),
    ],
)
def test_the_interval_of_a_level_is_told_in_its_own_unit(interval, words):
    config = SnapshotConfig(levels=(PersistentLevel("/a", **interval),))
    assert report.intervals(config, (1, 0)) == words


def test_what_is_not_captured_is_told_by_reason_in_words():
    statistics = Statistics(began=65, whole=64, torn=1, shard_bytes=9300)
    statistics.skipped["memory was being prepared"] = 15
    [line, _] = report.summary(statistics, report.EndFacts(report.EndKind.CLOSED, CONFIG))
    assert line == (
        "captured 64 of 80 due steps (9.3 kB each); 15 steps not captured: memory was being prepared; "
        "1 step not captured: the state changed while it was copied; stored 0 at /a; training waited 0 ms in all"
    )


def test_a_training_that_is_known_to_be_finished_is_not_said_to_have_ended_early():
    resumed = report.Resumed(8, in_memory=False, only_in_memory=False)
    end = report.EndFacts(report.EndKind.CLOSED, CONFIG, untrained=resumed, is_finished=True)
    assert report.summary(Statistics(), end) == ["step 8, which was resumed, is the last step of this training"]


def test_what_a_level_has_a_part_of_is_not_said_to_be_durable_there():
    """Memory of one rank and a level together: this rank read its part from the level."""
    resumed = report.Resumed.of(Snapshot({}, 8, "run", "7", level="/a"), has_levels=True)

    assert resumed.durable_at is None
    assert resumed.only_in_memory


def test_that_there_is_no_storage_level_is_told_beside_parity_too():
    line = report.intervals(SnapshotConfig(), (4, 1))
    assert line == "any 1 of 4 nodes may be lost, no storage level: nothing outlives these machines"


@pytest.mark.slow
def test_a_start_that_trains_nothing_says_no_more_than_that_it_passed_no_boundary(job, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lazysnap")
    first = job.start(tmp_path)
    first.run(1, 2)
    assert first.engine.close()
    again = job.start(tmp_path, ready=False)
    assert again.engine.restore("latest").step == 2
    assert again.engine.close()
    assert "no step was trained after step 2, which was resumed" in caplog.text
    caplog.clear()

    third = job.start(tmp_path, ready=False)
    assert third.engine.restore("latest").step == 2
    third.run(3, 3)
    assert third.engine.close()
    assert "no step boundary" not in caplog.text


@pytest.mark.slow
def test_a_start_that_trains_nothing_leaves_the_only_copy_of_a_training_where_it_is(job, tmp_path, caplog):
    """What a level did not take is in memory alone: whoever only looks at it must not end its keeper."""
    place = tmp_path / "level"
    place.touch()  # where a directory has to be
    first = job.start(place)
    first.run(1, 3)
    assert not first.engine.close()
    for _ in range(2):
        caplog.clear()
        again = job.start(place, ready=False)
        assert again.engine.restore("latest").step == 3
        assert not again.engine.close()
        assert "NOT DURABLE: step 3, which was resumed from memory, is not at" in caplog.text

    place.unlink()  # mended: the keeper stores it by itself
    assert job.start(place, ready=False).engine.restore("latest").step == 3
    job.trainings[-1].engine.close()
    until(lambda: steps_at(place) == [3])


def test_that_nothing_is_captured_is_said_only_where_storage_has_nothing_either():
    statistics = Statistics(began=8, whole=8)
    end = report.EndFacts(report.EndKind.CLOSED, CONFIG)
    assert report.summary(statistics, end)[-1].startswith("NOTHING OF THIS TRAINING IS CAPTURED")

    statistics.last_durable_step["/a"] = 8  # its keeper was lost since

    assert not any("NOTHING" in line for line in report.summary(statistics, end))


def test_a_rank_that_outlives_another_says_that_memory_has_it_and_warns_of_nothing():
    statistics = Statistics(began=33, whole=33, last_whole_step=33)
    statistics.last_durable_step["/a"] = 30
    end = report.EndFacts(report.EndKind.ABANDONED, CONFIG, ranks=2)
    assert not report.not_durable(statistics, end)
    finds = 'where a restart with "latest" finds the newest step that all ranks have'
    fate = f"it stays in memory for 1800 s (linger_s), {finds}"
    assert report.summary(statistics, end)[-1] == f"step 33: {fate}"
    lingering = report.EndFacts(report.EndKind.LINGERING, CONFIG, ranks=2)
    assert report.not_durable(statistics, lingering) == {
        "what": "step 33, the newest capture, is not at /a after 60 s (drain_timeout_s)",
        "fate": fate,
    }


@pytest.mark.slow
def test_an_exception_in_the_first_step_of_a_restart_is_named_and_so_is_what_is_durable(job, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lazysnap")
    first = job.start(tmp_path)
    first.run(1, 2)
    assert first.engine.close()
    again = job.start(tmp_path, ready=False)
    again.engine.restore("latest")
    with pytest.raises(RuntimeError), again.engine:
        raise RuntimeError("CUDA error:\n an illegal memory access")

    assert (
        "training failed in step 3 (RuntimeError: CUDA error: an illegal memory access); step 2 is durable"
    ) in caplog.text
    assert "as it should be" not in caplog.text


@pytest.mark.slow
def test_an_exception_without_a_storage_level_says_so_beside_what_memory_has(job, caplog):
    caplog.set_level(logging.INFO, logger="lazysnap")
    training = job.start()
    training.run(1, 1)
    with pytest.raises(KeyboardInterrupt), training.engine:
        raise KeyboardInterrupt

    ends = "training was interrupted in step 2 (KeyboardInterrupt); there is no storage level; memory has step 1"
    assert ends in caplog.messages
    assert "step 1: it stays in memory" in caplog.text


@pytest.mark.slow
def test_an_exception_before_storage_has_a_step_names_the_step_that_memory_has(job, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lazysnap")
    place = tmp_path / "level"
    place.touch()  # where a directory has to be: nothing is stored
    training = job.start(place)
    training.run(1, 1)
    with pytest.raises(ValueError, match="boom"), training.engine:
        raise ValueError("boom")
    text = "no step of it is on storage yet; memory has step 1, and the keeper stores it now"
    assert f"training failed in step 2 (ValueError: boom); {text}" in caplog.messages

    place.unlink()  # mended
    until(lambda: steps_at(place) == [1])


@pytest.mark.slow
def test_an_exception_in_the_first_step_says_that_a_restart_begins_fresh(job, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lazysnap")
    training = job.start(tmp_path, ready=False)
    training.engine.restore("latest")
    with pytest.raises(ValueError, match="boom"), training.engine:
        raise ValueError("boom")

    [line] = [text for text in caplog.messages if text.startswith("training failed in step 1")]
    assert line.endswith("; nothing of it is captured yet: a restart begins fresh, as this one did")
    assert job.start(tmp_path, ready=False).engine.restore("latest") is None


@pytest.mark.slow
def test_a_boundary_with_a_lower_step_than_the_last_says_once_what_latest_finds_from_then_on(job, tmp_path, caplog):
    training = job.start(tmp_path)
    training.run(1, 3)
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    training.run(1, 2)
    assert training.engine.close()

    [line] = [record.getMessage() for record in caplog.records if "new start of this run" in record.getMessage()]
    assert line.startswith("boundary(1) after boundary(3): ")
    assert job.start(tmp_path, ready=False).engine.restore("latest").step == 3


@pytest.mark.slow
def test_a_loop_that_begins_again_at_the_step_of_the_last_capture_captures_it(job, tmp_path):
    """That capture is of the start before: to end well, this one needs its own."""
    training = job.start(tmp_path, every_n_steps=10)
    training.run(1, 25)
    training.began.clear()
    training.run(20, 20)

    assert training.began == [True]
    assert training.engine.keep("again") == 20
    training.run(21, 24)
    assert training.engine.close()
    facts = training.facts()
    second = job.start(tmp_path, ready=False)
    assert second.engine.restore("latest").step == 24
    assert second.facts() == facts
    assert second.engine._lost_names() == {}
