"""Whatever dies or fails: the directory of a copy is complete or not there, and training hears of it once."""

import contextlib
import functools
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from support.listing import files_below
from support.waiting import until

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.exports.accelerate_folders import Parts, problem
from lazysnap.exports.copies import Copy, NamedCopies
from lazysnap.exports.folder import in_place_when_whole, is_unfinished, mark_of, mark_unfinished

pytestmark = pytest.mark.sampled("stock checkpoints")

TIMEOUT_S = 250
"""Copies are made by processes of low priority: on a busy machine they get little."""
until = functools.partial(until, timeout_s=TIMEOUT_S)
PARTS = Parts()
POINTS = [
    "export.folder.made:1",
    "export.accelerate.file:1",
    "export.accelerate.file:3",
    "export.folder.whole:1",
    "export.folder.moved:2",
    "export.folder.named:1",
]


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
    assert engine.wait_ready(TIMEOUT_S)
    for step, name in enumerate("abc", 1):
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        facts["step"] = step
        assert engine.boundary(step)
        engine.keep(name)
        assert engine.wait(step, timeout_s=TIMEOUT_S)
        weights[name] = model.weight.detach().clone()
    assert engine.close()
    return Path(level.url), weights


class Training:
    """Has copies made, and notes what it is told."""

    def __init__(self, url: Path, **settings) -> None:
        self.released: list[str] = []
        self.copies = NamedCopies(PersistentLevel(str(url)), self.released.append, **settings)

    def save(self, directory: Path, name: str) -> None:
        mark_unfinished(str(directory))
        self.copies.save(Copy(directory=str(directory), name=name))


@pytest.fixture
def training(trained, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lazysnap.accelerate")
    level = tmp_path / "level"
    shutil.copytree(trained[0], level)
    training = Training(level)
    yield training
    training.copies.close(TIMEOUT_S)


def weight_in(directory: Path) -> torch.Tensor:
    return pytest.importorskip("safetensors.torch").load_file(directory / "model.safetensors")["weight"]


def temporary(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if ".tmp-" in path.name]


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_copies_are_made_in_order_and_the_last_one_stays(training, trained, tmp_path):
    """Also into one directory, and each snapshot loses its name."""
    out, aside = tmp_path / "out", tmp_path / "aside"
    [name_of_first] = (tmp_path / "level").glob("*/keep-a")
    name_of_first.rename(aside)  # the first copy waits for it, the others for the first
    for name in "abc":
        training.save(out, name)
    assert training.copies.pending() == [str(out)] * 3
    aside.rename(name_of_first)
    assert training.copies.wait(TIMEOUT_S, str(out))
    assert torch.equal(weight_in(out), trained[1]["c"])
    assert training.released == ["a", "b", "c"]
    assert not list((tmp_path / "level").glob("*/keep-*"))
    assert temporary(tmp_path) == []


@pytest.mark.parametrize(
    ("point", "before"),
    [("export.folder.whole:1", "nothing"), *((point, "a copy and files of others") for point in POINTS)],
)
@pytest.mark.sampled("named copies")
def test_a_killed_child_leaves_a_complete_copy_or_none(training, trained, tmp_path, caplog, monkeypatch, point, before):
    out = tmp_path / "out"
    if before != "nothing":
        training.save(out, "a")
        assert training.copies.wait(TIMEOUT_S)
    if "others" in before:
        (out / "tokenizer").mkdir()
        (out / "tokenizer" / "words.txt").write_text("mine")
    monkeypatch.setenv("LAZYSNAP_FAULT", f"{point}:kill")
    training.save(out, "b")
    done = training.copies.wait(TIMEOUT_S)
    monkeypatch.delenv("LAZYSNAP_FAULT")

    is_there = mark_of(out) is not None
    is_new = is_there and torch.equal(weight_in(out), trained[1]["b"])
    if done:
        assert is_new
        assert "moved" in point
        return  # nothing was moved one by one
    assert is_new == ("named" in point)
    if is_there:
        assert problem(str(out), PARTS) is None
        assert is_new or torch.equal(weight_in(out), trained[1]["a"])
    else:
        assert not out.exists() or "moved" in point or before == "nothing"
    assert temporary(tmp_path) == [], "what the dead child left is gone"
    [said] = warnings_in(caplog)
    assert "signal 9" in said
    assert "lazysnap export" in said
    if "others" in before:
        assert (out / "tokenizer" / "words.txt").read_text() == "mine"

    training.save(out, "c")
    assert training.copies.wait(TIMEOUT_S)
    assert torch.equal(weight_in(out), trained[1]["c"])
    assert problem(str(out), PARTS) is None
    if "others" in before:
        assert (out / "tokenizer" / "words.txt").read_text() == "mine"


def test_what_lies_in_the_directory_beside_the_copy_stays(training, tmp_path):
    """Also what save hooks wrote there before."""
    out = tmp_path / "out"
    mark_unfinished(str(out))
    (out / "unet").mkdir()
    (out / "unet" / "config.json").write_text("{}")
    for name in "ab":
        training.save(out, name)
        assert training.copies.wait(TIMEOUT_S)
        assert (out / "unet" / "config.json").read_text() == "{}"
    assert not (out / "lazysnap-unfinished.json").exists()


def test_a_copy_of_a_snapshot_that_was_lost_is_given_up_and_the_next_is_made(training, trained, tmp_path, caplog):
    """Its child would wait for an hour, and the next child for it."""
    for directory, name in (("lost", "never"), ("out", "b")):
        training.save(tmp_path / directory, name)
    training.copies.give_up({"never": "the snapshot of step 7 was dropped"})
    assert training.copies.wait(TIMEOUT_S, str(tmp_path / "out"))
    assert torch.equal(weight_in(tmp_path / "out"), trained[1]["b"])
    assert not (tmp_path / "lost").exists()
    assert warnings_in(caplog) == [
        f"save_state({str(tmp_path / 'lost')!r}): no copy was made: the snapshot of step 7 was dropped"
    ]
    assert not training.copies.close(TIMEOUT_S)


def test_a_directory_that_was_asked_for_is_there_at_once_and_marked_until_it_is_complete(training, tmp_path):
    out, aside = tmp_path / "out", tmp_path / "aside"
    [name] = (tmp_path / "level").glob("*/keep-a")
    name.rename(aside)  # the copy waits for it
    training.save(out, "a")
    assert is_unfinished(str(out))
    assert problem(str(out), PARTS) == "it is not finished"
    aside.rename(name)
    assert training.copies.wait(TIMEOUT_S, str(out))
    assert not is_unfinished(str(out))
    assert problem(str(out), PARTS) is None


@pytest.mark.parametrize("point", ["export.folder.whole:1", "export.accelerate.file:2"])
def test_a_program_may_remove_a_directory_while_it_is_being_filled(training, tmp_path, caplog, monkeypatch, point):
    """With all that is beside it. The process that fills it stops, and says nothing."""
    root = tmp_path / "run"
    monkeypatch.setenv("LAZYSNAP_FAULT", f"{point}:stop")
    training.save(root / "out", "a")
    [busy] = until(lambda: temporary(root))
    child = int(busy.name.rpartition("-")[0].rpartition("-")[2])
    until(lambda: _state(child) == "T")
    shutil.rmtree(root)
    os.kill(child, signal.SIGCONT)
    assert training.copies.wait(TIMEOUT_S)
    assert training.copies.close(TIMEOUT_S)
    assert not root.exists()
    assert warnings_in(caplog) == []
    assert not list((tmp_path / "level").glob("*/keep-a")), "the level need not keep the snapshot any longer"


@pytest.mark.parametrize("moved", ["at once", "while it is being filled"])
def test_a_program_may_move_a_directory_before_it_is_complete(training, trained, tmp_path, monkeypatch, moved):
    """Saving beside the place and renaming is how scripts save in one act. The next one takes the same way."""
    tmp, final, aside = tmp_path / "tmp", tmp_path / "final", tmp_path / "aside"
    [name] = (tmp_path / "level").glob("*/keep-a")
    if moved == "at once":
        name.rename(aside)  # the copy waits for it
        training.save(tmp, "a")
        tmp.rename(final)
    else:
        monkeypatch.setenv("LAZYSNAP_FAULT", "export.folder.whole:1:stop")
        training.save(tmp, "a")
        monkeypatch.delenv("LAZYSNAP_FAULT")
        [busy] = until(lambda: temporary(tmp_path))
        child = int(busy.name.rpartition("-")[0].rpartition("-")[2])
        until(lambda: _state(child) == "T")
        tmp.rename(final)
    assert training.copies.pending() == [str(final)]
    training.save(tmp, "b")
    tmp.rename(tmp_path / "next")
    assert not training.copies.wait(0, str(final))
    if moved == "at once":
        aside.rename(name)
    else:
        os.kill(child, signal.SIGCONT)
    assert training.copies.wait(TIMEOUT_S, str(final))
    assert torch.equal(weight_in(final), trained[1]["a"])
    assert not is_unfinished(str(final))
    assert training.copies.wait(TIMEOUT_S)
    assert torch.equal(weight_in(tmp_path / "next"), trained[1]["b"])
    assert not tmp.exists()
    assert temporary(tmp_path) == []


def test_a_directory_that_was_moved_and_cannot_be_filled_is_named_where_it_is(training, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("LAZYSNAP_FAULT", "export.folder.whole:1:stop")
    training.save(tmp_path / "tmp", "a")
    [busy] = until(lambda: temporary(tmp_path))
    child = int(busy.name.rpartition("-")[0].rpartition("-")[2])
    until(lambda: _state(child) == "T")
    (tmp_path / "tmp").rename(tmp_path / "final")
    os.kill(child, signal.SIGKILL)
    assert not training.copies.wait(TIMEOUT_S)
    [said] = warnings_in(caplog)
    assert f"save_state({str(tmp_path / 'tmp')!r})" in said
    assert f"--to {tmp_path / 'final'} " in said
    assert list((tmp_path / "level").glob("*/keep-a")), "the snapshot stays for a copy by hand"
    assert temporary(tmp_path) == []


def test_a_mark_that_lies_deletes_nothing_outside_the_directory(tmp_path):
    out, mine = tmp_path / "out", tmp_path / "thesis.tex"
    out.mkdir()
    mine.write_text("years of work")
    (out / "notes.txt").write_text("mine")
    (out / "away").symlink_to(tmp_path)
    names = ["../thesis.tex", str(mine), "away/thesis.tex", "optimizer.bin"]
    (out / "optimizer.bin").write_text("old")
    (out / "lazysnap-export.json").write_text(json.dumps({"lazysnap": "export", "files": names}))
    with in_place_when_whole(str(out), {}) as temp:
        Path(temp, "model.safetensors").write_text("new")
    assert mine.read_text() == "years of work"
    assert sorted(path.name for path in out.iterdir()) == [
        "away", "lazysnap-export.json", "model.safetensors", "notes.txt"
    ]  # fmt: skip


def test_a_checkpoint_in_the_current_directory_leaves_that_directory_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    number = tmp_path.stat().st_ino
    for name in ("optimizer.bin", "scheduler.bin"):
        with in_place_when_whole(".", {}) as temp:
            Path(temp, name).write_text("new")
        assert sorted(os.listdir()) == ["lazysnap-export.json", name]
    assert tmp_path.stat().st_ino == number


def test_a_copy_that_fails_is_said_once_and_by_close(training, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("LAZYSNAP_FAULT", "export.accelerate.file:1:kill")
    training.save(tmp_path / "out", "a")
    assert not training.copies.wait(TIMEOUT_S)
    [said] = warnings_in(caplog)
    assert f"{tmp_path}/out" in said
    assert not (tmp_path / "out").exists()
    assert training.released == [], "the snapshot stays for a copy by hand"
    assert list((tmp_path / "level").glob("*/keep-a"))
    assert not training.copies.close(1.0)
    assert len(warnings_in(caplog)) == 2


def test_a_full_disk_is_said_once_and_leaves_nothing(training, trained, tmp_path, caplog):
    out = tmp_path / "out"
    training.save(out, "a")
    assert training.copies.wait(TIMEOUT_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _ignoring(signal.SIGXFSZ):  # inherited: the write fails instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
        try:
            training.save(out, "b")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not training.copies.wait(TIMEOUT_S)
    assert len(warnings_in(caplog)) == 1
    assert torch.equal(weight_in(out), trained[1]["a"])
    assert temporary(tmp_path) == []


@contextlib.contextmanager
def _ignoring(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_of_copies_that_fail_only_the_newest_keeps_its_snapshot(training, tmp_path, monkeypatch):
    monkeypatch.setenv("LAZYSNAP_FAULT", "export.accelerate.file:1:kill")
    for name in "ab":
        training.save(tmp_path / name, name)
    assert not training.copies.wait(TIMEOUT_S)
    assert training.released == ["a"]


def test_a_snapshot_that_never_comes_is_named(trained, tmp_path, caplog):
    training = Training(trained[0], stored_within_s=0.5)
    training.save(tmp_path / "out", "never")
    assert not training.copies.wait(TIMEOUT_S)
    [said] = warnings_in(caplog)
    assert "'never'" in said
    assert "complete are the steps 1, 2, 3" in said
    training.copies.close(1.0)


def test_an_end_that_waits_for_copies_says_so(trained, tmp_path, caplog):
    """Else a program that has told how its training ended is silent for minutes."""
    caplog.set_level(logging.INFO, "lazysnap")
    training = Training(trained[0])
    training.save(tmp_path / "out", "never")
    assert not training.copies.close(1.0)
    said = f"save_state(directory): waiting for {str(tmp_path / 'out')!r}"
    assert any(record.getMessage().startswith(said) for record in caplog.records)
    training.copies.give_up({"never": "this is the end of a test"})
    assert not training.copies.wait(TIMEOUT_S, str(tmp_path / "out"))


TRAINER = """
import sys
from lazysnap import PersistentLevel
from lazysnap.exports.copies import Copy, NamedCopies
from lazysnap.exports.folder import mark_unfinished
copies = NamedCopies(PersistentLevel(sys.argv[1]), lambda name: None)
for directory, name in zip(sys.argv[2::2], sys.argv[3::2]):
    mark_unfinished(directory)
    copies.save(Copy(directory=directory, name=name))
print("asked", flush=True)
sys.stdin.read()
"""


def test_copies_that_were_asked_for_outlive_the_training(training, trained, tmp_path):
    """Also those that had not begun when it died."""
    targets = {name: tmp_path / "copies" / name for name in "abc"}
    arguments = [str(text) for name, target in targets.items() for text in (target, name)]
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path / "level"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "LAZYSNAP_FAULT": "export.folder.whole:1:stop"},
    )
    with process:
        assert process.stdout.readline() == b"asked\n"
        [first] = until(lambda: temporary(tmp_path / "copies") if (tmp_path / "copies").exists() else [])
        until(lambda: (first / "lazysnap-export.json").exists())
        process.kill()
    for name, target in targets.items():
        # Not what is left of the one before, which is being deleted.
        [busy] = until(lambda: [at for at in temporary(tmp_path / "copies") if (at / "lazysnap-export.json").exists()])
        assert is_unfinished(str(target))
        child = int(busy.name.rpartition("-")[0].rpartition("-")[2])
        until(lambda pid=child: _state(pid) == "T")
        os.kill(child, signal.SIGCONT)
        until(lambda at=target: not is_unfinished(str(at)))
        assert torch.equal(weight_in(target), trained[1][name])
    until(lambda: not files_below(tmp_path / "level", "keep-*"))
    assert temporary(tmp_path / "copies") == []


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_a_dead_writer_left_goes_with_the_next_copy_beside_it(training, tmp_path, monkeypatch):
    """The trainer and its child both died, and nobody asks for that directory again."""
    monkeypatch.setenv("LAZYSNAP_FAULT", "export.folder.whole:1:kill")
    code = subprocess.run(
        [sys.executable, "-m", "lazysnap.cli", "export", str(tmp_path / "level"), "a", "--to", str(tmp_path / "one"),
         "--format", "accelerate"],
        check=False,
    ).returncode  # fmt: skip
    monkeypatch.delenv("LAZYSNAP_FAULT")
    assert code == -signal.SIGKILL
    assert len(temporary(tmp_path)) == 1
    training.save(tmp_path / "other", "b")
    assert training.copies.wait(TIMEOUT_S)
    assert temporary(tmp_path) == []
