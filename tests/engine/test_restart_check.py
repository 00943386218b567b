"""The first restart of a run trains its newest step again, and says whether it is the same, bit for bit."""

import re
import signal
from pathlib import Path

import pytest

from lazysnap.engine.restart_check import Difference

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).parent / "proved.py")
LAST = 12
EXACT = "was trained again and is identical bit for bit: this training resumes exactly"


class Job:
    def __init__(self, zygote, place):
        self.zygote = zygote
        self.place = place

    def run(self, case="plain", *, killed_at=0, verify="first", end=(), fault="", status=None):
        """One start of the training; what it printed."""
        output = self.place / "output"
        arguments = [PROGRAM, str(self.place / "snapshots"), case, str(LAST), str(killed_at), verify, *end]
        environment = {"LAZYSNAP_FAULT": fault} if fault else {}
        if status is None:
            status = -signal.SIGKILL if killed_at or fault else 0
        assert self.zygote.run(arguments, environment, output) == status, output.read_text()
        return output.read_text()


@pytest.fixture
def job(zygote, tmp_path):
    return Job(zygote, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    return digest_in(Job(zygote, tmp_path_factory.mktemp("undisturbed")).run())


def resumed(text):
    return int(re.search(r"^resumed (\d+)$", text, re.MULTILINE)[1])


def digest_in(text):
    return re.search(r"^digest (\w+)$", text, re.MULTILINE)[1]


@pytest.mark.parametrize("case", ["accumulated", "places"])
def test_a_restart_of_an_exact_program_says_so(job, case):
    job.run(case, killed_at=6)

    text = job.run(case)

    assert resumed(text) == 5
    assert "lost at most the step that was running" in text
    assert "step 6 is trained again, to prove the restart" in text
    assert f"step 6 {EXACT}" in text
    assert "check identical" in text


@pytest.mark.parametrize(
    ("case", "found"),
    [("held", "small state: rng.torch; tensors: optimizer.state"), ("ema", "tensors: optimizer.state")],
)
def test_a_hole_that_changes_the_next_step_is_found(job, case, found):
    """A batch drawn ahead, an average that the loss reads."""
    job.run(case, killed_at=6)

    text = job.run(case)

    assert re.search(rf"step 6 was trained again and is NOT identical \({found}.* by [\d.e-]+", text), text
    assert EXACT not in text


def test_of_a_callback_alone_the_line_says_what_such_a_callback_needs():
    entry = "callbacks.ModelCheckpoint{'monitor': 'val_loss'}.best_model_score"
    assert "without dirpath" in Difference((entry,)).usual_cause
    assert "without dirpath" not in Difference((entry, "rng.torch")).usual_cause


def test_a_number_of_another_type_is_named(job):
    """Both are texts in the encoded state, as paths are, which are not compared."""
    job.run("number", killed_at=6)

    assert "NOT identical (small state: notes.limit)" in job.run("number")


def test_only_the_first_restart_costs_a_step(job, undisturbed):
    job.run(killed_at=4)
    second = job.run(killed_at=7)
    third = job.run()

    assert resumed(second) == 3
    assert EXACT in second
    assert resumed(third) == 7
    assert "trained again" not in third
    assert digest_in(third) == undisturbed


def test_each_restart_may_be_checked_or_none(job, undisturbed):
    job.run(killed_at=4, verify="always")
    assert EXACT in job.run(killed_at=7, verify="always")
    text = job.run(killed_at=9, verify="always")
    assert resumed(text) == 6
    assert EXACT in text

    text = job.run(verify="never")

    assert resumed(text) == 9
    assert digest_in(text) == undisturbed


@pytest.mark.parametrize("end", ["forced", "named"])
def test_a_step_that_was_asked_for_is_resumed_exactly(job, end):
    job.run(killed_at=6, end=(end,))

    text = job.run()

    assert resumed(text) == 6
    assert "trained again" not in text


@pytest.mark.parametrize(
    "fault",
    [
        "restore.loaded:1:kill",
        "engine.check_begun:1:kill",
        "capture.copied_tensor:1:kill",
        "engine.compare:1:kill",
    ],
)
def test_a_death_before_the_check_is_over_loses_no_step(job, undisturbed, fault):
    """Each start after it resumes the step that was there already, and does not try again for ever."""
    job.run(killed_at=6)
    job.run(fault=fault)

    third = job.run()

    if fault == "restore.loaded:1:kill":  # nothing was trained: the check begins anew
        assert resumed(third) == 5
        assert EXACT in third
    else:
        assert resumed(third) == 6
    assert digest_in(third) == undisturbed


def test_an_error_of_the_comparison_costs_its_line_alone(job, undisturbed):
    job.run(killed_at=6)

    text = job.run(fault="engine.compare:1:raise", status=0)

    assert resumed(text) == 5
    assert "step 6 was to be compared, to prove the restart, and was not: " in text
    assert "check None" in text
    assert digest_in(text) == undisturbed


def test_a_capture_that_needs_a_slot_ends_a_comparison_that_hangs(job, undisturbed):
    job.run(killed_at=6)

    text = job.run(fault="engine.compare:1:hang", status=0)

    assert resumed(text) == 5
    assert "check None" in text
    assert "captured 7 of 7 due steps" in text
    assert digest_in(text) == undisturbed
