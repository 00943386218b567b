"""``lazysnap chaos`` finds what is wrong with a program, and passes the ones with which nothing is."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from cli_level import run
from support.waiting import until

from lazysnap.cli.chaos import Printed, difference, digests
from lazysnap.cli.chaos_training import copy_directory, step_of
from lazysnap.errors import ConfigError
from lazysnap.shard.names import SnapshotName

PROGRAM = pathlib.Path(__file__).with_name("chaos_program.py")
EARLIER = SnapshotName("0" * 16, 7, "1" * 16).directory
COUNTS = """
import json, os, time
path, step = "checkpoint.json", 0
if os.path.exists(path):
    step = json.load(open(path))
while step < 40:
    step += 1
    time.sleep(0.02)
    print(f"step {step} of 40 loss {1 / step:.3f}")
    with open(path + ".tmp", "w") as file:
        json.dump(step, file)
    os.rename(path + ".tmp", path)
"""
"""A program that knows nothing of lazysnap."""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """The directory of the user's program."""
    shutil.copy(PROGRAM, tmp_path / "train.py")
    (tmp_path / "scale.txt").write_text("2.0")
    (tmp_path / "counts.py").write_text(COUNTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def chaos(capsys):
    """Run the command; the exit code and the result. Options come before the command."""

    def call(*words):
        capsys.readouterr()
        code = run("chaos", "--json", *words)
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.mark.slow
def test_a_stock_program_that_writes_to_its_directory_passes_in_one_try(chaos, directory, forking_python):
    """An earlier run in the same directory is not resumed, and nothing there is touched."""
    faults = "kill,keeper,both,stop-keeper,term,flip"
    (directory / "lazysnap" / EARLIER).mkdir(parents=True)
    (directory / "model.pt").write_text("of an earlier run")
    before = {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}

    words = ("--faults", faults, "--result", "model.pt", "--", forking_python, "train.py", "nothing")
    code, result = chaos(*words)

    assert [run["verdict"] for run in result["runs"]] == ["PASS"] * 6, result
    assert code == 0
    assert result["compared"]["lines"] == 30
    assert sorted(result["compared"]["files"]) == ["['bias'] of model.pt", "['weight'] of model.pt"]
    by_fault = {run["fault"]: run for run in result["runs"]}
    assert "of lazysnap/step-" in by_fault["flip"]["done"]
    for fault in ("keeper", "stop-keeper"):
        assert (by_fault[fault]["restarts"], by_fault[fault]["steps_again"]) == (0, 0)
    assert {path: path.read_bytes() for path in directory.iterdir() if path.is_file()} == before
    assert [path.name for path in (directory / "lazysnap").iterdir()] == [EARLIER]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "verdict", "reason"),
    [
        ("prefetch", "SILENT_DIVERGENCE", "it never printed `step "),
        ("refused", "HARD_FAIL", "also after 5 restarts"),
        ("anew", "LOST_WORK", "it started over"),
    ],
)
def test_each_hole_of_a_program_is_found(wrong, verdict, reason, chaos, forking_python):
    """Chaos compares what is printed, whatever makes it another: here state that is not captured."""
    code, result = chaos("--faults", "kill", "--", forking_python, "train.py", wrong)

    [trial] = result["runs"]
    assert (trial["verdict"], code) == (verdict, 1), trial
    assert reason in trial["reason"]
    assert "step 1 " in pathlib.Path(trial["log"]).read_text()


@pytest.mark.slow
def test_a_program_without_lazysnap_is_judged_by_the_faults_that_need_no_keeper(chaos):
    code, result = chaos("--faults", "kill,stop,term,keeper,flip", "--may-lose", "1", "--", sys.executable, "counts.py")

    assert [run["verdict"] for run in result["runs"]] == ["PASS"] * 3, result
    assert [run["restarts"] for run in result["runs"]] == [1, 0, 1]
    assert code == 0
    assert result["left_out"] == {
        "keeper": "the command has no keeper of lazysnap",
        "flip": "the command stores no snapshot of lazysnap in its directory",
    }


@pytest.mark.slow
def test_step_0_is_not_trained_again_without_a_restart(chaos, directory):
    (directory / "counts.py").write_text(COUNTS.replace('"step {step}', '"step {step - 1}'))
    code, result = chaos("--faults", "stop,kill", "--may-lose", "1", "--", sys.executable, "counts.py")

    stop, kill = result["runs"]
    assert (stop["restarts"], stop["steps_again"]) == (0, 0)
    assert kill["steps_again"] <= 1
    assert code == 0


@pytest.mark.slow
def test_a_flip_without_a_snapshot_in_time_is_one_clear_error(chaos):
    """Undisturbed the program stores one; the third time it never does."""
    place = f"lazysnap/{EARLIER}"
    stores = f"mkdir -p {place}; touch {place}/node-00000-of-00001.json"
    program = f"echo loss 0.5; case $PWD in */undisturbed*) {stores};; *) exec sleep 1000;; esac"
    code, result = chaos("--faults", "flip", "--deadline", "0.1", "--", "sh", "-c", program)

    assert code == 2
    assert "flip found no snapshot to damage" in result["error"]


@pytest.mark.slow
def test_a_program_that_hangs_after_its_restart_fails_at_the_deadline(chaos, directory):
    (directory / "counts.py").write_text(COUNTS.replace("json.load(open(path))", "time.sleep(60)"))
    code, result = chaos("--faults", "kill", "--deadline", "2", "--", sys.executable, "counts.py")

    [trial] = result["runs"]
    assert (trial["verdict"], code) == ("HARD_FAIL", 1)
    assert "within 2 s, restarts included (--deadline)" in trial["reason"]


@pytest.mark.slow
def test_the_deadline_is_that_of_all_restarts_together(chaos, directory):
    crash = "time.sleep(1.5); raise SystemExit(1)"
    (directory / "counts.py").write_text(COUNTS.replace("json.load(open(path))", f"exec({crash!r})"))
    _, result = chaos("--faults", "kill", "--deadline", "5", "--", sys.executable, "counts.py")

    [trial] = result["runs"]
    assert trial["verdict"] == "HARD_FAIL"
    assert "within 5 s" in trial["reason"]


@pytest.mark.slow
def test_people_read_the_verdict_the_reason_and_how_to_repeat_it(capsys, directory):
    (directory / "counts.py").write_text(COUNTS.replace("json.load(open(path))", "0"))
    code = run("chaos", "--faults", "kill", "--seed", "9", "--may-lose", "0", "--", sys.executable, "counts.py")

    assert code == 1
    printed = capsys.readouterr()
    assert "are allowed (--may-lose)" in printed.out
    assert "--faults kill --seed 9" in printed.out
    assert "log.txt" in printed.out
    assert "40 lines that it prints, the last is `step 40 of 40 loss 0.025`" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a command"),
        (["--", "echo", "hello"], "--result model.pt"),
        (["--", sys.executable, "-SIc", "import os; print('step 1 loss', os.urandom(9).hex())"], "seed all random"),
        (["--", sys.executable, "-SIc", "1 / 0"], "ZeroDivisionError"),
        (["--", "no-such-program"], "no-such-program"),
        (["--result", "x", "--", "touch", "{dir}/y"], "--result x matches no file"),
        (["--result", "x", "--", "sh", "-c", "date +%N > x"], "two undisturbed runs differ: 1 of 1"),
    ],
    ids=str,
)
def test_what_cannot_be_judged_is_said_with_exit_code_2(words, message, chaos):
    code, result = chaos(*words)

    assert code == 2
    assert message in result["error"]


@pytest.mark.slow
def test_an_interrupted_chaos_leaves_no_process_and_no_file_but_logs(directory):
    words = ["chaos", "--", sys.executable, "counts.py", str(directory)]
    process = subprocess.Popen([sys.executable, "-m", "lazysnap.cli", *words], stderr=subprocess.DEVNULL)
    until(lambda: any("step 10 " in log.read_text() for log in directory.glob("lazysnap-chaos/*/undisturbed/log.txt")))
    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 130
    left = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            left += [path] * (os.fsencode(directory) in path.read_bytes())
    assert left == []
    assert not list(directory.glob("lazysnap-chaos/*/undisturbed/files"))


def test_a_copy_of_the_directory_has_no_earlier_snapshots_and_results_and_links_what_is_large(directory):
    (directory / "runs" / "lazysnap" / EARLIER).mkdir(parents=True)
    (directory / "runs" / "settings.json").write_text("{}")  # the program reads it
    with (directory / "runs" / "lazysnap" / EARLIER / "node-00000-of-00001.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    (directory / "lazysnap-chaos").mkdir()
    (directory / "data").mkdir()
    (directory / "data" / "val.bin").write_text("small")
    with (directory / "large.bin").open("wb") as file:
        file.truncate(1 << 30)
    copy = directory / "lazysnap-chaos" / "files"
    copy.mkdir()

    assert copy_directory(directory, copy, "scale.*") == ["large.bin"]

    assert sorted(path.name for path in copy.iterdir()) == ["counts.py", "data", "large.bin", "runs", "train.py"]
    assert [path.name for path in copy.rglob("runs/**/*")] == ["settings.json", "lazysnap"]
    (copy / "data" / "val.bin").write_text("damaged")
    assert (directory / "data" / "val.bin").read_text() == "small"


def test_results_in_a_directory_that_is_linked_are_neither_deleted_nor_replaced(directory):
    """The link leads to the user's own files."""
    trained = directory / "trained"
    trained.mkdir()
    (trained / "model.pt").write_text("of months")
    with (trained / "large.bin").open("wb") as file:
        file.truncate(1 << 30)
    copy = directory / "lazysnap-chaos" / "files"
    copy.mkdir(parents=True)

    with pytest.raises(ConfigError, match=r"trained has files that an earlier training wrote, such as model\.pt"):
        copy_directory(directory, copy, "trained/*.pt")

    assert (trained / "model.pt").read_text() == "of months"
    assert not (copy / "trained").exists()


def test_numbers_are_compared_that_two_undisturbed_runs_print_alike():
    first = ["pid 12", "12:00:01 step 1 loss 0.50 in 13 ms", "12:00:02 step 2 loss 0.25 in 13 ms", "mean 0.375"]
    second = ["pid 13", "12:00:09 step 1 loss 0.50 in 13 ms", "12:00:09 step 2 loss 0.25 in 12 ms", "mean 0.375"]
    printed = Printed(first, second)

    assert list(printed.lines.values()) == [line.strip() for line in first[1:]]
    assert printed.of(["13:59:59 step 1 loss 0.50 in 99 ms"]).keys() < printed.lines.keys()
    assert not printed.of(["12:00:01 step 1 loss 0.51 in 13 ms"]).keys() & printed.lines.keys()


def test_files_are_compared_tensor_for_tensor_also_where_their_bytes_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "numpy", None)  # it is not installed everywhere
    state = {"model": {"w": torch.arange(3.0)}, "moments": [torch.tensor(float("nan"))]}
    seconds = iter((1.5, 2.5, 3.5))

    def saved():
        torch.save({**state, "seconds": next(seconds)}, tmp_path / "x.pt")
        return digests(tmp_path, "x.pt")

    first = saved()
    second = saved()
    state["model"]["w"][1] = -1

    assert difference(first, second) == ""
    assert difference(first, saved()) == "1 of 2 differ, the first is ['model']['w'] of x.pt"


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 12 loss 0.5", 12),
        ("[rank0]: epoch 3, Step: 7, lr 1e-3", 7),
        ("iter 30: loss 2.1, time 12.00ms", 30),
        ("lazysnap: resumed step 12 of run 19a4", None),
        ("resumed at step 12 from memory", None),
        ("starting at step 12", None),
        ("saved step 12", None),
        ("12 steps in all", None),
    ],
)
def test_lines_of_steps_are_told_from_lines_of_restarts(line, step):
    assert step_of(line) == step
