"""The first restart of a run proves itself in every integration: the step that it trains again is the same."""

import re
import signal
from pathlib import Path

import pytest
from support.newest import PROVES

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent.parent
EXACT = r"step (\d+) was trained again and is identical bit for bit: this training resumes exactly"
PROGRAMS = {
    "Transformers": ("huggingface/hf_training.py", ["base", "{place}", "killed", "5"], ["base", "{place}", "again"]),
    "Transformers that accumulates": (
        "huggingface/hf_training.py",
        ["accumulation", "{place}", "killed", "3"],
        ["accumulation", "{place}", "again"],
    ),
    "Lightning": ("lightning/killed.py", ["{place}", "5"], ["{place}", "1000"]),
    "Accelerate": ("accelerate/accelerated.py", ["{place}", "Plain", "5", "1"], ["{place}", "Plain", "0", "2"]),
    "Accelerate that accumulates": (
        "accelerate/accelerated.py",
        ["{place}", "Accumulated", "3", "1"],
        ["{place}", "Accumulated", "0", "2"],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_restart_of_a_killed_training_says_that_it_is_exact(zygote, tmp_path, name):
    program, killed, again = PROGRAMS[name]
    output = tmp_path / "output"

    def run(arguments):
        given = [argument.format(place=tmp_path / "training") for argument in arguments]
        (tmp_path / "training").mkdir(exist_ok=True)
        return zygote.run([str(TESTS / program), *given], PROVES, output), output.read_text()

    status, text = run(killed)
    assert status == -signal.SIGKILL, text

    status, text = run(again)

    assert status == 0, text
    proved = re.search(EXACT, text)
    assert proved, text
    assert f"resumed step {int(proved[1]) - 1} of run" in text
