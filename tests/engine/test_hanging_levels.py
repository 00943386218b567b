"""A level that hangs is passed over by a restart, and keeps no process from ending."""

import dataclasses
import subprocess
import sys
import textwrap
import threading
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from small_training import TIMEOUT_S, Training, damage_newest_at_rest
from support.ports import silent_server
from support.waiting import until

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def dead():
    with silent_server() as url:
        yield url


def config(job, *levels):
    return SnapshotConfig(job_id=job.job_id, levels=levels, memory=job.config().memory, io_timeout_s=TIMEOUT_S)


def test_a_level_that_does_not_answer_is_passed_over_and_named(job, tmp_path, dead):
    good = tmp_path / "good"
    training = job.start(good)
    training.run(1, 2)
    assert training.engine.close()

    second = Training(config(job, PersistentLevel(dead, timeout_s=0.5), PersistentLevel(str(good))))
    job.trainings.append(second)
    snapshot = second.engine._fetch("latest")

    assert (snapshot.step, snapshot.level) == (2, str(good))
    assert any(dead in problem and "did not move" in problem for problem in snapshot.skipped)


def test_the_end_of_a_training_says_which_level_it_waits_for_and_how_long(job, dead, caplog):
    caplog.set_level("INFO", "lazysnap")
    training = Training(dataclasses.replace(config(job, PersistentLevel(dead, timeout_s=600)), drain_timeout_s=5))
    job.trainings.append(training)
    training.run(1, 1)

    assert not training.engine.close()

    assert [text for text in caplog.messages if text.startswith("waiting for ")] == [
        f"waiting for {dead} to store step 1, at most 5 s (drain_timeout_s)"
    ]


@pytest.mark.timeout(150)
def test_who_waits_for_the_first_level_does_not_wait_for_one_that_hangs(job, tmp_path, dead):
    """With a deadline that is longer than this test may take."""
    training = Training(config(job, PersistentLevel(str(tmp_path)), PersistentLevel(dead, timeout_s=3600)))
    job.trainings.append(training)
    training.run(1, 1)
    assert training.engine.wait(1, timeout_s=3600)


class Late(MemoryFileSystem):
    """A level that lists nothing until it is let go. The keeper, another process, has the real driver."""

    protocol = "webhdfs"  # a name that every process knows

    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    answers: ClassVar[threading.Event] = threading.Event()
    asked: ClassVar[list[str]] = []

    def ls(self, path, detail=True, **options):
        self.asked.append(path)
        self.answers.wait()
        if "down" in path:
            raise ConnectionError("the server is down")
        return super().ls(path, detail, **options)


@pytest.fixture
def late():
    fsspec.register_implementation("webhdfs", Late, clobber=True)
    Late.answers.clear()
    Late.asked.clear()
    yield Late
    Late.answers.set()
    Late.store.clear()
    fsspec.register_implementation("webhdfs", "fsspec.implementations.webhdfs.WebHDFS", clobber=True)


def upload(directory, place, step):
    """Copy a durable step of a level into the late one. A keeper may still write and delete others."""
    for path in directory.glob(f"step-{step:08d}-*/*.*"):
        Late.store[f"webhdfs://{place}/{path.relative_to(directory)}"] = MemoryFile(Late, "", path.read_bytes())


def trained(job, directory, steps):
    training = job.start(directory, memory=MemoryLevel(linger_s=TIMEOUT_S))
    training.run(1, steps)
    assert training.engine.wait(steps, until="captured", timeout_s=TIMEOUT_S)
    return training


def test_what_memory_has_is_restored_before_a_level_answers_and_what_is_newer_there_is_said_then(
    job, other_job, tmp_path, late, caplog
):
    caplog.set_level("INFO", "lazysnap")
    trained(job, tmp_path / "old", 3).engine.abandon()
    assert trained(other_job, tmp_path / "new", 2).engine.close()
    upload(tmp_path / "new", "run", 2)
    levels = [PersistentLevel(f"webhdfs://{place}", timeout_s=600) for place in ("run", "nothing", "down")]

    second = Training(config(job, *levels))
    job.trainings.append(second)
    snapshot = second.engine.restore("latest")

    assert late.asked
    assert (snapshot.step, snapshot.level) == (3, "memory")
    for level in levels:
        [problem] = [text for text in snapshot.skipped if text.startswith(level.url)]
        assert "is not waited for: memory has a whole snapshot" in problem
    late.answers.set()
    until(lambda: "webhdfs://run answered late and has step 2 (step-00000002-" in caplog.text)
    until(lambda: "webhdfs://nothing answered: it has nothing newer than step 3" in caplog.text)
    until(lambda: "webhdfs://down: whether it has a snapshot newer than step 3" in caplog.text)


def test_a_late_level_is_waited_for_if_what_memory_has_is_damaged(job, tmp_path, late):
    training = trained(job, tmp_path, 2)
    assert training.engine.wait(2, until="durable", timeout_s=TIMEOUT_S)
    upload(tmp_path, "run", 2)
    training.engine.abandon()
    damage_newest_at_rest(job, -1)
    second = Training(config(job, PersistentLevel("webhdfs://run", timeout_s=600)))
    job.trainings.append(second)

    def answer_the_second_question():
        until(lambda: len(late.asked) == 2)
        late.answers.set()

    answering = threading.Thread(target=answer_the_second_question)
    answering.start()
    snapshot = second.engine._fetch("latest")
    answering.join()

    assert (snapshot.step, snapshot.level) == (2, "webhdfs://run")
    assert any(text.startswith("step 2") and "at memory" in text and "xxh3" in text for text in snapshot.skipped)


def test_a_level_that_a_restart_without_memory_waits_for_is_named_before_it_answers(job, late, caplog):
    waiting = Training(config(job, PersistentLevel("webhdfs://run", timeout_s=600)))
    job.trainings.append(waiting)

    def answer_when_it_is_named():
        until(lambda: "webhdfs://run does not answer yet: the restart waits for it, at most 600 s" in caplog.text)
        late.answers.set()

    answering = threading.Thread(target=answer_when_it_is_named)
    answering.start()
    assert waiting.engine.restore("latest") is None
    answering.join()

    assert caplog.text.count("does not answer yet") == 1


SCRIPT = """
    import sys
    import torch
    from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine

    config = SnapshotConfig(levels=(PersistentLevel(sys.argv[1], timeout_s=0.5),), io_timeout_s=60)
    engine = SnapshotEngine(config, {"model": torch.nn.Linear(2, 2)})
    print(engine.restore("latest"))
    engine.close(drain=False)
"""


def test_the_process_ends_all_the_same(dead):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), dead],
        capture_output=True,
        text=True,
        timeout=4 * TIMEOUT_S,  # torch is imported
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
