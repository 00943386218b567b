"""``lazysnap chaos`` finds what is wrong with a program, and passes the ones with which nothing is."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import torch
from cli_level import run
from support.waiting import until

from lazysnap.cli.chaos import STEP_LINE, difference, digests
from lazysnap.shard.names import SnapshotName

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = [sys.executable, str(pathlib.Path(__file__).with_name("chaos_program.py")), "{dir}"]
ANY_PROGRAM = "kill,stop,term"


def run_json(capsys, *words):
    """Exit code and result. Options come before the command."""
    capsys.readouterr()
    return run("chaos", "--json", *words), json.loads(capsys.readouterr().out)


@pytest.fixture
def chaos(capsys, tmp_path, monkeypatch):
    """Run the command on the program with these options; the exit code and the result."""
    monkeypatch.chdir(tmp_path)

    def call(faults, *words, options=()):
        return run_json(capsys, "--faults", faults, "--result", "result.json", *options, "--", *PROGRAM, *words)

    return call


def verdicts(result):
    return [one["verdict"] for one in result["runs"]]


@pytest.mark.slow
def test_a_program_that_resumes_by_itself_passes_under_every_fault_that_needs_no_keeper(chaos):
    code, result = chaos(f"{ANY_PROGRAM},keeper,flip", "--steps", "100")

    assert verdicts(result) == ["PASS"] * len(result["runs"]), result
    assert code == 0
    assert [one["fault"] for one in result["runs"]] == ANY_PROGRAM.split(",")
    assert result["left_out"] == {
        "keeper": "the command has no keeper of lazysnap",
        "flip": "the command stores no snapshot of lazysnap in its directory",
    }
    assert {one["fault"] for one in result["runs"] if one["restarts"]} == {"kill", "term"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "fault", "verdict", "reason"),
    [
        (["--forgets-momentum"], "kill", "SILENT_DIVERGENCE", "result.json"),
        (["--begins-anew"], "kill", "LOST_WORK", "at most 10 are allowed"),
        (["--refuses-to-resume"], "kill", "HARD_FAIL", "checkpoint of another day"),
    ],
)
def test_each_defect_of_a_program_has_its_verdict_and_a_log(chaos, defect, fault, verdict, reason):
    code, result = chaos(fault, *defect, "--steps", "100", options=("--seed", "5", "--max-restarts", "2"))

    [one] = result["runs"]
    assert (code, one["verdict"]) == (1, verdict), one
    assert reason in one["reason"]
    assert "step 1\n" in pathlib.Path(one["log"]).read_text()


@pytest.mark.slow
def test_a_program_that_hangs_after_its_restart_fails_at_the_deadline(capsys, tmp_path, monkeypatch):
    waits = "import sys, os, time; a = sys.argv[1] + '/a'; x = os.path.exists(a); open(a, 'w').write('x'); "
    waits += "[print('step', n, flush=True) or time.sleep(9 if x else 0.02) for n in range(40)]"
    monkeypatch.chdir(tmp_path)
    code, result = run_json(
        capsys, "--faults", "kill", "--deadline", "5", "--result", "a", "--", sys.executable, "-c", waits, "{dir}"
    )

    [one] = result["runs"]
    assert (one["verdict"], code) == ("HARD_FAIL", 1)
    assert "--deadline" in one["reason"]


@pytest.mark.slow
def test_without_lines_of_steps_the_moment_is_one_of_time_and_no_work_is_counted(chaos):
    code, result = chaos("kill", "--silent", "--steps", "100")

    assert code == 0
    assert result["undisturbed"]["steps"] is None
    assert [(one["at_step"], one["steps_again"], one["restarts"]) for one in result["runs"]] == [(None, None, 1)]


@pytest.mark.slow
def test_steps_that_begin_anew_with_each_epoch_are_not_counted(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    epochs = "import sys; [print('step', n % 50) for n in range(200)]; open(sys.argv[1] + '/x.json', 'w').write('1'); "
    epochs += "import time; time.sleep(1)"
    code, result = run_json(
        capsys, "--faults", "kill", "--result", "x.json", "--", sys.executable, "-c", epochs, "{dir}"
    )

    assert (code, result["undisturbed"]["steps"], result["runs"][0]["steps_again"]) == (0, None, None)


@pytest.mark.slow
def test_a_program_whose_result_changes_by_itself_is_not_judged(chaos):
    code, result = chaos("kill", "--unseeded")

    assert code == 2
    assert "two undisturbed runs of the command differ" in result["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a command"),
        (["--step-regex", "(", "--", "true"], "--step-regex"),
        (["--step-regex", "step", "--", "true"], "must be a group"),
        (["--", sys.executable, "-c", "1"], "--result model.pt"),
        (["--", sys.executable, "-c", "1 / 0"], "ZeroDivisionError"),
        (["--", "no-such-program"], "no-such-program"),
        (["--runs", "0", "--", "true"], "--runs must be 1 or more"),
        (["--result", "x", "--", "touch", "{dir}/y"], "--result x matches no file"),
    ],
    ids=str,
)
def test_what_cannot_be_judged_is_said_with_exit_code_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, result = run_json(capsys, *words)

    assert code == 2
    assert said in result["error"]


@pytest.mark.slow
def test_people_are_told_the_verdict_the_reason_and_how_to_repeat_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = run("chaos", "--faults", "kill", "--seed", "9", "--result", "result.json", "--", *PROGRAM, "--begins-anew")

    assert code == 1
    out = capsys.readouterr().out
    assert "LOST_WORK: it resumed further back" in out
    assert "--faults kill --seed 9 --runs 1" in out
    assert "log.txt" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_chaos_leaves_no_process_and_no_file_but_logs(number, tmp_path):
    words = [
        "chaos",
        "--faults",
        "stop",
        "--result",
        "result.json",
        "--dir",
        str(tmp_path / "chaos"),
        "--",
        *PROGRAM,
        "--steps",
        "400",
    ]
    process = subprocess.Popen([sys.executable, "-m", "lazysnap.cli", *words], stderr=subprocess.PIPE)
    log = tmp_path / "chaos" / "1-stop" / "log.txt"
    until(lambda: log.exists() and "step 10\n" in log.read_text())
    process.send_signal(number)

    assert process.wait(60) == 130
    process.stderr.close()
    left = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            left += [path] * (os.fsencode(tmp_path) in path.read_bytes())
    assert left == []
    assert not (log.parent / "files").exists()


STOCK = """
import pathlib
import torch
from lazysnap import SnapshotEngine

torch.manual_seed(7)
scale = float(pathlib.Path("scale.txt").read_text())
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters())
with SnapshotEngine("lazysnap", {"model": model, "optimizer": optimizer}) as engine:
    engine.restore("latest")
    while engine.step < 260:
        (scale * model(torch.randn(8, 16))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.boundary()
        print("step", engine.step, flush=True)
        torch.arange(200_000).flip(0).sort()
"""


@pytest.mark.slow
def test_a_stock_program_that_writes_to_its_directory_is_judged_in_one_try(capsys, tmp_path, monkeypatch):
    """It has no {dir}, reads a file beside it and stores every 100 steps. An earlier run is not touched."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(STOCK)
    (tmp_path / "scale.txt").write_text("2.0")
    earlier = tmp_path / "lazysnap" / SnapshotName("0" * 16, 7, "1" * 16).directory
    earlier.mkdir(parents=True)

    code, result = run_json(capsys, "--faults", "kill,both,flip", "--", sys.executable, "train.py")

    assert (code, verdicts(result)) == (0, ["PASS"] * 3), result
    assert re.search(r"bit \d of byte \d+ of lazysnap/step-", result["runs"][2]["what"])
    assert [path.name for path in (tmp_path / "lazysnap").iterdir()] == [earlier.name]
    assert (tmp_path / "scale.txt").read_text() == "2.0"


def test_results_are_compared_tensor_for_tensor_also_where_bytes_of_the_file_differ(tmp_path):
    state = {"model": {"w": torch.arange(3.0)}, "moments": [torch.tensor(float("nan"))]}
    one, other, third = (tmp_path / name / "x.pt" for name in "abc")
    for path, extra in ((one, {"seconds": 1.5}), (other, {"seconds": 2.5}), (third, {})):
        path.parent.mkdir()
        torch.save({**state, **extra}, path)
    same = difference(digests([one]), digests([other]))
    state["moments"][0] += 1
    state["model"]["w"][1] = -1
    torch.save(state, third)

    assert one.read_bytes() != other.read_bytes()
    assert same == ""
    assert difference(digests([one]), digests([third])) == "1 of 2 differ, the first is model.w in x.pt"


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 12 loss 0.5", "12"),
        ("[rank0]: epoch 3, Step: 7, lr 1e-3", "7"),
        ("lazysnap: resumed step 12 of run 19a4", None),
        ("resumed at step 12 from memory", None),
        ("starting at step 12", None),
        ("saved step 12", None),
        ("12 steps in all", None),
    ],
)
def test_lines_of_steps_are_told_from_lines_of_restarts(line, step):
    match = re.search(STEP_LINE, line)
    assert (match[1] if match else None) == step


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_of_a_plain_loop_passes_under_every_fault(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = str(ROOT / "examples" / "plain_loop.py")
    words = ("--", sys.executable, script, "--max-steps", "120", "--dirpath", "{dir}")
    code, result = run_json(capsys, *words)

    assert verdicts(result) == ["PASS"] * 7, result
    assert code == 0
    assert result["left_out"] == {}
    by_fault = {one["fault"]: one for one in result["runs"]}
    for name in ("kill", "keeper", "stop", "stop-keeper"):
        assert by_fault[name]["steps_again"] == 0, by_fault[name]
    assert "step-" in by_fault["flip"]["what"], "a snapshot is damaged, no list of events"
