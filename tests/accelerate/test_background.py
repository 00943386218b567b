"""Whatever dies or fails: a checkpoint directory is complete or unfinished, and training is told once."""

import contextlib
import functools
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import uuid
import zipfile
from pathlib import Path

import pytest
import torch
from fillers import TIMEOUT_S, stopped_in
from support.listing import files_below
from support.waiting import until

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.exports import background
from lazysnap.exports.accelerate_folders import delete_superseded, newest_complete, problem
from lazysnap.exports.background import BackgroundCheckpoints
from lazysnap.exports.folder import UNFINISHED, begin, filled, is_unfinished

pytestmark = pytest.mark.usefixtures("quick_exports")

until = functools.partial(until, timeout_s=TIMEOUT_S)
PYTHON = sys.executable
"""Not the one of ``quick_exports``."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A level with steps 1 to 3, called a, b and c; and the weights at each."""
    level = PersistentLevel(str(tmp_path_factory.mktemp("trained") / "level"), every_n_steps=1)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    config = SnapshotConfig(levels=(level,), job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=5))
    facts = {"step": 0, "iteration": 0}
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer, "accelerate": facts})
    weights = {}
    assert engine._wait_ready(TIMEOUT_S)
    for step, name in enumerate("abc", 1):
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        facts["step"] = step
        assert engine.boundary(step)
        engine.keep(name)
        assert engine.wait(step, timeout_s=TIMEOUT_S)
        weights[name] = model.weight.detach().clone()
    assert engine.close()
    directory = Path(level.url)
    until(lambda: len(list(directory.glob("*/keep-*"))) == 3 and not list(directory.rglob(".*")))  # names come last
    return directory, weights


class Training:
    """Has checkpoints made, and notes the names that are released."""

    def __init__(self, url: Path, **settings) -> None:
        self.released: list[str] = []
        self.checkpoints = BackgroundCheckpoints(PersistentLevel(str(url)), self.released.append, **settings)

    def save(self, directory: Path, name: str) -> None:
        begin(str(directory))
        self.checkpoints.save(str(directory), name)


@pytest.fixture(autouse=True)
def _normal_priority(monkeypatch):
    """On a busy machine a process of low priority takes minutes to import torch."""
    monkeypatch.setattr(background, "_NICE", 0)


@pytest.fixture
def training(trained, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lazysnap.accelerate")
    level = tmp_path / "level"
    shutil.copytree(trained[0], level)
    training = Training(level)
    yield training
    training.checkpoints.close(TIMEOUT_S)


def weight_in(directory: Path) -> torch.Tensor:
    return pytest.importorskip("safetensors.torch").load_file(directory / "model.safetensors")["weight"]


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_directory_is_unfinished_until_its_checkpoint_is_complete(training, trained, tmp_path):
    out, aside = tmp_path / "out", tmp_path / "aside"
    [name] = (tmp_path / "level").glob("*/keep-a")
    name.rename(aside)  # the snapshot is not stored yet
    training.save(out, "a")
    assert is_unfinished(str(out))
    assert problem(str(out)) == "it is not finished"
    aside.rename(name)
    assert training.checkpoints.wait(TIMEOUT_S, str(out))
    assert not is_unfinished(str(out))
    assert problem(str(out)) is None
    assert torch.equal(weight_in(out), trained[1]["a"])
    assert UNFINISHED not in names_in(out)
    assert training.released == ["a"]
    assert not list((tmp_path / "level").glob("*/keep-a"))


def test_a_newer_save_into_a_directory_replaces_an_older_one_that_is_not_complete(training, trained, tmp_path, caplog):
    out, aside = tmp_path / "out", tmp_path / "aside"
    [name] = (tmp_path / "level").glob("*/keep-a")
    name.rename(aside)
    training.save(out, "a")
    training.save(out, "b")
    assert training.checkpoints.pending() == [str(out)] * 2
    aside.rename(name)
    assert training.checkpoints.wait(TIMEOUT_S, str(out))
    assert torch.equal(weight_in(out), trained[1]["b"])
    assert problem(str(out)) is None
    assert sorted(training.released) == ["a", "b"]
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("point", ["export.accelerate.file:2", "export.folder.moved:2"])
@pytest.mark.parametrize("before", ["nothing", "a checkpoint"])
def test_a_killed_process_leaves_the_earlier_checkpoint_or_an_unfinished_one(
    training, trained, tmp_path, caplog, monkeypatch, point, before
):
    out = tmp_path / "out"
    if before != "nothing":
        training.save(out, "a")
        assert training.checkpoints.wait(TIMEOUT_S)
    monkeypatch.setenv("LAZYSNAP_FAULT", f"{point}:kill")
    training.save(out, "b")
    assert not training.checkpoints.wait(TIMEOUT_S)
    monkeypatch.delenv("LAZYSNAP_FAULT")
    [said] = warnings_in(caplog)
    assert "signal 9" in said
    assert "lazysnap export" in said

    if "moved" in point:
        assert is_unfinished(str(out)), "it may hold files of two checkpoints"
    elif before == "nothing":
        assert not out.exists()
    else:
        assert problem(str(out)) is None
        assert torch.equal(weight_in(out), trained[1]["a"])

    training.save(out, "c")
    assert training.checkpoints.wait(TIMEOUT_S)
    assert problem(str(out)) is None
    assert torch.equal(weight_in(out), trained[1]["c"])


FILLER = """
import sys, zipfile
from lazysnap.exports.folder import filled
with filled(sys.argv[1], {}) as inner:
    for name in ("optimizer.bin", "scheduler.bin"):
        with zipfile.ZipFile(f"{inner}/{name}", "w") as archive:
            archive.writestr("content", sys.argv[2])
"""
DELETER = """
import sys
from lazysnap.exports.folder import discard
discard(sys.argv[1])
"""


def run(program: str, *arguments: Path | str, fault: str = "") -> int:
    """Run a program that may be killed at a fault point; its exit code."""
    environment = {**os.environ, "LAZYSNAP_FAULT": fault}
    return subprocess.run([PYTHON, "-c", program, *map(str, arguments)], env=environment, check=False).returncode


@pytest.mark.parametrize("before", ["nothing", "a checkpoint and other files"])
@pytest.mark.parametrize("point", ["begun:1", "whole:1", "moved:1", "moved:2", "named:1"])
def test_a_directory_whose_writer_died_is_complete_or_unfinished(tmp_path, caplog, point, before):
    """Nobody is left to tidy up. The next save into the directory completes it."""
    older, place, words = tmp_path / "checkpoint_1", tmp_path / "checkpoint_2", tmp_path / "checkpoint_2" / "words.txt"
    assert run(FILLER, older, "older") == 0
    if before != "nothing":
        assert run(FILLER, place, "before") == 0
        words.write_text("mine")
    assert run(FILLER, place, "new", fault=f"export.folder.{point}:kill") == -signal.SIGKILL

    earlier = "before" if before != "nothing" and "moved" not in point else None
    content = "new" if point == "named:1" else earlier
    if content is None:
        assert is_unfinished(str(place))
        assert newest_complete(str(tmp_path)) == str(older)
        assert warnings_in(caplog) == [f"{place} is passed over, it is not complete: it is not finished"]
    else:
        assert contents_of(place) == {content}
        assert newest_complete(str(tmp_path)) == str(place)

    assert run(FILLER, place, "last") == 0
    assert contents_of(place) == {"last"}
    assert newest_complete(str(tmp_path)) == str(place)
    assert UNFINISHED not in names_in(place)
    assert before == "nothing" or words.read_text() == "mine"


def contents_of(directory: Path) -> set[str]:
    """What the files of ``FILLER`` hold."""
    return {zipfile.ZipFile(directory / f"{kind}.bin").read("content").decode() for kind in ("optimizer", "scheduler")}


def test_a_writer_that_was_replaced_by_a_newer_one_changes_nothing(tmp_path):
    """It is stopped before its last act, as on a busy machine, and goes on when the newer one is complete."""
    place = tmp_path / "checkpoint_1"
    older = subprocess.Popen(
        [PYTHON, "-c", FILLER, str(place), "older"],
        env={**os.environ, "LAZYSNAP_FAULT": "export.folder.whole:1:stop"},
        stderr=subprocess.PIPE,
    )
    with older:
        os.waitid(os.P_PID, older.pid, os.WSTOPPED | os.WNOWAIT)
        assert run(FILLER, place, "newer") == 0
        older.send_signal(signal.SIGCONT)
        assert b"FileNotFoundError" in older.stderr.read()
    assert contents_of(place) == {"newer"}
    assert newest_complete(str(tmp_path)) == str(place)


def test_a_half_deleted_checkpoint_is_unfinished_and_takes_no_place_of_a_complete_one(tmp_path):
    places = [tmp_path / f"checkpoint_{number}" for number in range(3)]
    for place in places:
        assert run(FILLER, place, "content") == 0
    assert run(DELETER, places[0], fault="export.folder.discarded:1:kill") == -signal.SIGKILL
    assert is_unfinished(str(places[0]))
    assert delete_superseded(str(tmp_path), 2) == []
    assert delete_superseded(str(tmp_path), 1) == [str(places[1])]
    assert newest_complete(str(tmp_path)) == str(places[2])


def test_other_files_in_the_directory_stay(training, tmp_path):
    """Also what save hooks wrote there before."""
    out = tmp_path / "out"
    begin(str(out))
    (out / "unet").mkdir()
    (out / "unet" / "config.json").write_text("{}")
    for name in "ab":
        training.save(out, name)
        assert training.checkpoints.wait(TIMEOUT_S)
        assert (out / "unet" / "config.json").read_text() == "{}"
    assert not is_unfinished(str(out))


def test_files_of_an_earlier_checkpoint_go(tmp_path):
    out = tmp_path / "out"
    for name in ("optimizer.bin", "scheduler.bin"):
        with filled(str(out), {}) as inner:
            Path(inner, name).write_text("new")
        assert names_in(out) == {"lazysnap-export.json", name}


def test_a_failed_save_leaves_the_earlier_checkpoint_as_it_was(tmp_path):
    out = tmp_path / "out"
    with filled(str(out), {}) as inner:
        Path(inner, "optimizer.bin").write_text("old")
    with contextlib.suppress(ZeroDivisionError), filled(str(out), {}) as inner:
        Path(inner, "optimizer.bin").write_text("new")
        _ = 1 / 0
    assert names_in(out) == {"lazysnap-export.json", "optimizer.bin"}
    assert (out / "optimizer.bin").read_text() == "old"


def test_the_checkpoint_of_a_lost_snapshot_is_not_made_and_the_next_one_is(training, trained, tmp_path, caplog):
    """Its process would wait for an hour."""
    for directory, name in (("lost", "never"), ("out", "b")):
        training.save(tmp_path / directory, name)
    training.checkpoints.give_up({"never": "the snapshot of step 7 was dropped"})
    assert training.checkpoints.wait(TIMEOUT_S, str(tmp_path / "out"))
    assert torch.equal(weight_in(tmp_path / "out"), trained[1]["b"])
    assert not training.checkpoints.wait(TIMEOUT_S)
    assert not (tmp_path / "lost").exists()
    assert warnings_in(caplog) == [
        f"save_state({str(tmp_path / 'lost')!r}): no checkpoint was made: the snapshot of step 7 was dropped"
    ]
    assert not training.checkpoints.close(TIMEOUT_S)


@pytest.mark.parametrize("point", ["export.folder.whole:1", "export.accelerate.file:2"])
def test_a_program_may_delete_a_directory_while_it_is_being_filled(training, tmp_path, caplog, monkeypatch, point):
    """The process that fills it stops, and nothing is said."""
    root = tmp_path / "run"
    monkeypatch.setenv("LAZYSNAP_FAULT", f"{point}:stop")
    training.save(root / "out", "a")
    process = stopped_in(root / "out")
    shutil.rmtree(root)
    os.kill(process, signal.SIGCONT)
    assert training.checkpoints.wait(TIMEOUT_S)
    assert training.checkpoints.close(TIMEOUT_S)
    assert not root.exists()
    assert warnings_in(caplog) == []
    assert training.released == ["a"], "the level need not keep the snapshot any longer"


def test_a_process_stops_when_its_directory_and_the_level_are_deleted_before_the_snapshot_is_stored(
    training, tmp_path, caplog
):
    training.save(tmp_path / "out", "never")
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "level")
    assert training.checkpoints.wait(TIMEOUT_S)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("moved", ["at once", "while it is being filled"])
def test_a_program_may_move_a_directory_before_it_is_complete(training, trained, tmp_path, monkeypatch, moved):
    """Scripts save beside the place and rename. The next save takes the same way."""
    tmp, final, aside = tmp_path / "tmp", tmp_path / "final", tmp_path / "aside"
    [name] = (tmp_path / "level").glob("*/keep-a")
    if moved == "at once":
        name.rename(aside)  # the snapshot is not stored yet
        training.save(tmp, "a")
    else:
        monkeypatch.setenv("LAZYSNAP_FAULT", "export.folder.whole:1:stop")
        training.save(tmp, "a")
        monkeypatch.delenv("LAZYSNAP_FAULT")
        process = stopped_in(tmp)
    tmp.rename(final)
    assert training.checkpoints.pending() == [str(final)]
    training.save(tmp, "b")
    tmp.rename(tmp_path / "next")
    assert not training.checkpoints.wait(0, str(final))
    if moved == "at once":
        aside.rename(name)
    else:
        os.kill(process, signal.SIGCONT)
    assert training.checkpoints.wait(TIMEOUT_S)
    assert torch.equal(weight_in(final), trained[1]["a"])
    assert torch.equal(weight_in(tmp_path / "next"), trained[1]["b"])
    assert not is_unfinished(str(final))
    assert not tmp.exists()


def test_a_directory_that_was_moved_and_cannot_be_filled_is_named_where_it_is(training, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("LAZYSNAP_FAULT", "export.folder.whole:1:stop")
    training.save(tmp_path / "tmp", "a")
    process = stopped_in(tmp_path / "tmp")
    (tmp_path / "tmp").rename(tmp_path / "final")
    os.kill(process, signal.SIGKILL)
    assert not training.checkpoints.wait(TIMEOUT_S)
    [said] = warnings_in(caplog)
    assert f"save_state({str(tmp_path / 'tmp')!r})" in said
    assert f"--to {tmp_path / 'final'} " in said
    assert list((tmp_path / "level").glob("*/keep-a")), "the snapshot stays for an export by hand"
    assert names_in(tmp_path) == {"level"}


def test_a_checkpoint_in_the_current_directory_leaves_that_directory_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    number = tmp_path.stat().st_ino
    with filled(".", {}) as inner:
        Path(inner, "optimizer.bin").write_text("new")
    assert sorted(os.listdir()) == ["lazysnap-export.json", "optimizer.bin"]
    assert tmp_path.stat().st_ino == number


def test_a_failure_is_said_once_and_by_close(training, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("LAZYSNAP_FAULT", "export.accelerate.file:1:kill")
    training.save(tmp_path / "out", "a")
    assert not training.checkpoints.wait(TIMEOUT_S)
    [said] = warnings_in(caplog)
    assert f"{tmp_path}/out" in said
    assert not (tmp_path / "out").exists()
    assert training.released == [], "the snapshot stays for an export by hand"
    assert list((tmp_path / "level").glob("*/keep-a"))
    assert not training.checkpoints.close(1.0)
    assert len(warnings_in(caplog)) == 2


def test_a_full_disk_is_said_once_and_leaves_the_earlier_checkpoint(training, trained, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "executable", PYTHON)  # which inherits the limit
    out = tmp_path / "out"
    training.save(out, "a")
    assert training.checkpoints.wait(TIMEOUT_S)
    before = names_in(out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _ignoring(signal.SIGXFSZ):  # inherited: the write fails instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
        try:
            training.save(out, "b")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not training.checkpoints.wait(TIMEOUT_S)
    [said] = warnings_in(caplog)
    assert "File too large" in said
    assert torch.equal(weight_in(out), trained[1]["a"])
    assert names_in(out) == before


@contextlib.contextmanager
def _ignoring(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_of_failures_only_the_newest_keeps_its_snapshot(training, tmp_path, monkeypatch):
    monkeypatch.setenv("LAZYSNAP_FAULT", "export.accelerate.file:1:kill")
    for name in "ab":
        training.save(tmp_path / name, name)
        assert not training.checkpoints.wait(TIMEOUT_S)
    assert training.released == ["a"]


def test_a_snapshot_that_is_never_stored_is_named(trained, tmp_path, caplog):
    training = Training(trained[0], stored_within_s=0.5)
    training.save(tmp_path / "out", "never")
    assert not training.checkpoints.wait(TIMEOUT_S)
    [said] = warnings_in(caplog)
    assert "'never'" in said
    assert "complete are the steps 1, 2, 3" in said
    training.checkpoints.close(1.0)


def test_an_end_that_waits_for_checkpoints_says_so(trained, tmp_path, caplog):
    """Else a program that has told how its training ended is silent for minutes."""
    caplog.set_level(logging.INFO, "lazysnap")
    training = Training(trained[0])
    training.save(tmp_path / "out", "never")
    assert not training.checkpoints.close(1.0)
    said = f"save_state(directory): waiting for {str(tmp_path / 'out')!r}"
    assert any(record.getMessage().startswith(said) for record in caplog.records)
    training.checkpoints.give_up({"never": "this is the end of a test"})
    assert not training.checkpoints.wait(TIMEOUT_S, str(tmp_path / "out"))


TRAINER = """
import sys
from lazysnap import PersistentLevel
from lazysnap.exports.background import BackgroundCheckpoints
from lazysnap.exports.folder import begin
checkpoints = BackgroundCheckpoints(PersistentLevel(sys.argv[1]), lambda name: None)
for directory, name in zip(sys.argv[2::2], sys.argv[3::2]):
    begin(directory)
    checkpoints.save(directory, name)
print("asked", flush=True)
sys.stdin.read()
"""


def test_checkpoints_that_were_asked_for_outlive_the_training(training, trained, tmp_path):
    targets = {name: tmp_path / "out" / name for name in "ab"}
    arguments = [str(text) for name, target in targets.items() for text in (target, name)]
    process = subprocess.Popen(
        [PYTHON, "-c", TRAINER, str(tmp_path / "level"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "LAZYSNAP_FAULT": "export.folder.whole:1:stop"},
    )
    with process:
        assert process.stdout.readline() == b"asked\n"
        fillers = {target: stopped_in(target) for target in targets.values()}
        process.kill()
    for name, target in targets.items():
        assert is_unfinished(str(target))
        os.kill(fillers[target], signal.SIGCONT)
        until(lambda at=target: not is_unfinished(str(at)))
        assert torch.equal(weight_in(target), trained[1][name])
    until(lambda: not files_below(tmp_path / "level", "keep-[ab]"))
