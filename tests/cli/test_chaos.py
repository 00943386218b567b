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

from lazysnap.cli.chaos import STEP_LINE
from lazysnap.cli.chaos_results import difference, digests

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = [sys.executable, str(pathlib.Path(__file__).with_name("chaos_program.py")), "{dir}"]
ANY_PROGRAM = "kill,stop,term,flip,full,slow,hang"


def run_json(capsys, *words):
    """Exit code and result. Options come before the command."""
    capsys.readouterr()
    return run("chaos", "--json", *words), json.loads(capsys.readouterr().out)


@pytest.fixture
def chaos(capsys, tmp_path, monkeypatch):
    """Run the command on the program with these options; the exit code and the result."""
    monkeypatch.chdir(tmp_path)

    def call(faults, *words, options=()):
        return run_json(capsys, "--faults", faults, *options, "--", *PROGRAM, *words)

    return call


def verdicts(result):
    return [one["verdict"] for one in result["runs"]]


def test_a_program_that_resumes_by_itself_passes_under_every_fault_that_needs_no_keeper(chaos):
    code, result = chaos(f"{ANY_PROGRAM},keeper", "--steps", "100")

    assert verdicts(result) == ["PASS"] * len(result["runs"]), result
    assert code == 0
    assert [one["fault"] for one in result["runs"]] == ANY_PROGRAM.split(",")
    assert result["left_out"] == {"keeper": "the command has no keeper of lazysnap"}
    restarted = {one["fault"] for one in result["runs"] if one["restarts"]}
    assert {"kill", "term", "flip", "full", "slow"} <= restarted <= set(ANY_PROGRAM.split(",")) - {"stop", "hang"}
    assert all("(0 writes" not in one["what"] for one in result["runs"])


@pytest.mark.parametrize(
    ("defect", "fault", "verdict", "reason"),
    [
        (["--forgets-momentum"], "kill", "SILENT_DIVERGENCE", "checkpoint-0100.bin"),
        (["--begins-anew"], "kill", "LOST_WORK", "at most 10"),
        (["--in-place"], "full", "HARD_FAIL", "checkpoint-0000.bin is damaged"),
        (["--in-place", "--believes-files"], "flip", "SILENT_DIVERGENCE", "checkpoint-0000.bin"),
    ],
)
def test_each_defect_of_a_program_has_its_verdict_and_a_log(chaos, defect, fault, verdict, reason):
    code, result = chaos(fault, *defect, "--steps", "100", options=("--seed", "5", "--max-restarts", "2"))

    [one] = result["runs"]
    assert (code, one["verdict"]) == (1, verdict), one
    assert reason in one["reason"]
    assert "step 1\n" in pathlib.Path(one["log"]).read_text()


def test_a_program_that_hangs_after_its_restart_fails_at_the_deadline(capsys, tmp_path, monkeypatch):
    waits = "import sys, os, time; a = sys.argv[1] + '/a'; x = os.path.exists(a); open(a, 'w').write('x'); "
    waits += "[print('step', n, flush=True) or time.sleep(9 if x else 0.02) for n in range(40)]"
    monkeypatch.chdir(tmp_path)
    code, result = run_json(capsys, "--faults", "kill", "--deadline", "5", "--", sys.executable, "-c", waits, "{dir}")

    [one] = result["runs"]
    assert (one["verdict"], code) == ("HARD_FAIL", 1)
    assert "--deadline" in one["reason"]


def test_a_command_that_ended_before_it_left_a_file_to_damage_keeps_its_result(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = (
        "import os, sys, time\n"
        "for step in range(20): print('step', step, flush=True); time.sleep(0.05)\n"
        "open(sys.argv[1] + '/result.bin', 'wb', 0).write(bytes(64)); os._exit(0)"
    )
    words = ("--faults", "flip", "--seed", "5", "--", sys.executable, "-c", program, "{dir}")
    code, result = run_json(capsys, *words)

    [one] = result["runs"]
    assert (code, one["verdict"], one["what"]) == (0, "PASS", "it ended; there was no file to damage"), one


def test_the_same_seed_flips_the_same_bit(chaos):
    def struck(seed):
        [one] = chaos("flip", options=("--seed", seed))[1]["runs"]
        return one["what"].partition(" of checkpoint")[0]  # all files have the same size

    assert struck("77") == struck("77") != struck("78")


def test_without_lines_of_steps_the_moment_is_one_of_time_and_no_work_is_counted(chaos):
    code, result = chaos("kill", "--silent", "--steps", "100")

    assert code == 0
    assert result["undisturbed"]["steps"] is None
    assert [(one["at_step"], one["steps_again"], one["restarts"]) for one in result["runs"]] == [(None, None, 1)]


def test_steps_that_begin_anew_with_each_epoch_are_not_counted(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    epochs = "import sys; [print('step', n % 50) for n in range(200)]; open(sys.argv[1] + '/x.json', 'w').write('1'); "
    epochs += "import time; time.sleep(1)"
    code, result = run_json(capsys, "--faults", "kill", "--", sys.executable, "-c", epochs, "{dir}")

    assert (code, result["undisturbed"]["steps"], result["runs"][0]["steps_again"]) == (0, None, None)


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
        (["--", sys.executable, "-c", "1"], "LAZYSNAP_CHAOS_DIR"),
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


def test_a_machine_without_a_compiler_leaves_out_the_faults_of_the_disk(chaos, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    _, result = chaos("kill,full", "--steps", "20")

    assert result["left_out"] == {"full": "no C compiler (cc, gcc or clang) is installed"}
    assert [one["fault"] for one in result["runs"]] == ["kill"]


def test_people_are_told_the_verdict_the_reason_and_how_to_repeat_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = run("chaos", "--faults", "kill", "--seed", "9", "--", *PROGRAM, "--begins-anew")

    assert code == 1
    out = capsys.readouterr().out
    assert "LOST_WORK: it resumed further back" in out
    assert "--faults kill --seed 9 --runs 1" in out
    assert "log.txt" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_chaos_leaves_no_process_and_no_file_but_logs(number, tmp_path):
    words = ["chaos", "--faults", "stop", "--dir", str(tmp_path / "chaos"), "--", *PROGRAM, "--steps", "400"]
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
    # It stores every 100 steps and prints every tenth.
    words = ("--may-lose", "100", "--", sys.executable, script, "--max-steps", "120", "--dirpath", "{dir}")
    code, result = run_json(capsys, *words)

    assert verdicts(result) == ["PASS"] * 10, result
    assert code == 0
    assert result["left_out"] == {}
    by_fault = {one["fault"]: one for one in result["runs"]}
    for name in ("kill", "keeper", "stop", "stop-keeper", "hang"):
        assert by_fault[name]["steps_again"] == 0, by_fault[name]
    assert "step-" in by_fault["flip"]["what"], "a snapshot is damaged, no list of events"
