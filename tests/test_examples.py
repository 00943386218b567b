"""The examples do what the README says: they are run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["--size", "tiny", "--batch-size", "4"]


def run(script: str, *arguments: str, job_id: str, code: int = 0) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LAZYSNAP_JOB_ID": job_id, "COLUMNS": "150"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == code, result.stdout[-4000:]
    return result.stdout


def test_the_lightning_example_trains_and_its_loss_falls(tmp_path):
    output = run("lightning_gpt.py", *TINY, "--max-steps", "60", "--dirpath", str(tmp_path), job_id=f"ex-{tmp_path}")
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", output, flags=re.M)]
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 0.2
    assert list(tmp_path.glob("step-*/*.json")), "a clean end leaves the last snapshot on disk"


def test_the_plain_loop_goes_on_where_it_ended(tmp_path):
    common = ["--dirpath", str(tmp_path)]
    first = run("plain_loop.py", "--max-steps", "3", *common, job_id=f"plain-{tmp_path}")
    second = run("plain_loop.py", "--max-steps", "5", *common, job_id=f"plain-{tmp_path}")
    assert "a fresh start" in first
    assert f"resumed at step 3 from {tmp_path}" in second


@pytest.mark.slow
def test_killed_twice_and_once_with_its_keeper_the_run_ends_bit_for_bit_equal(tmp_path):
    output = run("kill_and_resume.py", "--size", "tiny", "--max-steps", "120", "--kills", "2", job_id="unused")
    assert "equal bit for bit after 2 kills" in output
    assert "trainer + keeper" in output
