"""Scripts that are no plain loop over one loader end bit for bit as uninterrupted, too."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from odd import CASES
from support.cuts import start
from support.newest import PROVES
from test_exact_accelerate import MOST_STARTS

SCRIPT = str(Path(__file__).with_name("odd.py"))


@pytest.mark.parametrize(("case", "first"), [(case, 1 + number % 2) for number, case in enumerate(CASES)])
def test_killed_in_mid_step_an_odd_script_goes_on_as_if_nothing_had_happened(zygote, tmp_path, case, first):
    def run(name, dies_after, seed):
        place = tmp_path / name
        return start(zygote, [SCRIPT, str(place), case, str(dies_after), str(seed)], place)

    begun = run("whole", 0, 1)
    assert begun.status == 0, begun.text
    whole = begun.lines

    trace, deaths = [], 0
    for number in range(MOST_STARTS):
        dies_after = 4 if number else first
        # Where the first capture was still under way at the death, it begins anew, with the same seed.
        begun = run("cut", dies_after, number + 1 if number > 1 else 1)
        status, head, lines, text = begun.status, begun.head, begun.lines, begun.text
        done = max((line["step"] for line in trace if "step" in line), default=0)
        # The second slot may still be made right after a start.
        assert (head["resumed"] or 0) >= done - 2, text
        # By batch: one that overflows is no step.
        trace = [line for line in trace if line["batches"] <= head["batches"]] + lines
        assert trace == whole[: len(trace)], text
        if status == 0:
            break
        deaths += 1
    assert trace == whole
    assert deaths >= 3


ENDS = str(Path(SCRIPT).with_name("ends.py"))


def plain_run(directory, way):
    """In a process that ends as any program does; its status and what it said."""
    program = [sys.executable, ENDS, str(directory), way]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stderr


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("way", "statuses", "resumed"),
    [("no-end", {0}, "7 storage"), ("exception", {1}, "3 memory"), ("ctrl-c", {-signal.SIGINT, 130}, "3 memory")],
)
def test_however_a_program_ends_without_end_training_the_next_one_goes_on(zygote, tmp_path, way, statuses, resumed):
    """From memory it resumes the step before the newest, which it trains again. Copies are made if it ended well."""
    status, text = plain_run(tmp_path, way)
    assert status in statuses, text
    assert "ignored" not in text, "an error at the end that Python has nobody to tell of"
    assert "weakly" not in text
    if way == "no-end":
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"], "of two, one stays"

    output = tmp_path / "output"
    assert zygote.run([ENDS, str(tmp_path), "no-end"], PROVES, output) == 0, output.read_text()

    [said] = [line for line in output.read_text().splitlines() if line.startswith("resumed ")]
    assert said.split()[1] == resumed.split()[0], output.read_text()
    assert ("memory" in said) == ("memory" in resumed), said


def test_after_free_memory_another_training_is_one_of_its_own(zygote, tmp_path):
    status = zygote.run([ENDS, str(tmp_path), "again"], {}, tmp_path / "output")
    assert status == 0, (tmp_path / "output").read_text()


def test_what_cannot_be_captured_is_refused_by_name(zygote, tmp_path):
    status = zygote.run([ENDS, str(tmp_path), "refused"], {}, tmp_path / "output")
    text = (tmp_path / "output").read_text()
    assert status == 0, text
    for name in ("DeepSpeed", "Megatron-LM", "XLA", "FSDP 1"):
        assert f"refused: LazyAccelerator: {name} cannot be captured" in text
