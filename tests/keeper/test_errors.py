"""An error in any thread of a keeper: it goes on, trainers hear of it, and nothing is left behind for ever."""

import logging
import os
import pathlib
import tempfile
import time

import pytest
from support.waiting import until

from lazysnap.keeper.trouble import Trouble
from lazysnap.shard.names import events_file_name

HOUR_S = 3600


@pytest.fixture
def temporary(monkeypatch):
    """A runtime directory of its own, here and in what is started."""
    with tempfile.TemporaryDirectory(prefix="lazysnap-", dir="/tmp") as directory:
        monkeypatch.setenv("LAZYSNAP_RUNTIME_DIR", directory)
        yield pathlib.Path(directory)


def failures(trainer):
    return [text for about, text in trainer.alerts() if about == "keeper"]


@pytest.mark.slow
def test_an_error_in_a_storage_thread_is_told(temporary, job):
    """In that which computes checksums of memory at rest."""
    first = job.trainer(environment={"LAZYSNAP_FAULT": "keeper.persist.checksum:1:raise"})
    first.capture(step=1)
    first.kill()
    until(lambda: list(temporary.glob("keeper-*.log")))

    second = job.trainer(reserve=0)

    [text] = until(lambda: failures(second))
    assert "OSError" in text


@pytest.mark.slow
def test_a_keeper_removes_log_files_that_nobody_wrote_to_for_a_week_and_makes_none_without_an_error(temporary, job):
    old, new = (temporary / f"keeper-{name}.log" for name in ("0123456789abcdef", "0123456789abcde0"))
    events = temporary / events_file_name("0123456789abcdef", 0)
    foreign = temporary / "events.jsonl"
    for path, hours in ((old, 200), (events, 200), (foreign, 200), (new, 100)):
        path.touch()
        os.utime(path, (time.time() - hours * HOUR_S,) * 2)

    job.trainer()

    assert until(lambda: not old.exists() and not events.exists())
    assert list(temporary.glob("*.log")) == [new]
    assert foreign.exists()


def test_the_log_of_a_keeper_stays_small_and_the_same_error_is_told_once(temporary):
    trouble = Trouble(temporary / "keeper.log")
    logger = logging.Logger("errors")
    logger.addHandler(trouble)

    for _ in range(100):
        logger.error("%s", 100_000 * "x")

    [log] = temporary.iterdir()
    assert 100_000 < log.stat().st_size < 2_000_000
    assert trouble.texts.qsize() == 1


def test_a_log_that_cannot_be_written_is_said_and_the_error_is_told(temporary):
    trouble = Trouble(temporary / "gone" / "keeper.log")

    trouble.emit(logging.makeLogRecord({"msg": "failed"}))

    assert "no log could be written" in trouble.texts.get()
