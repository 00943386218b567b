"""The examples do what the README says, with the arguments of a user. Python is forked, its frameworks imported."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.newest import PROVES
from support.programs import ENVIRONMENT

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(zygote, tmp_path_factory):
    """Run an example, which has to end well; what it said."""
    output = tmp_path_factory.mktemp("output") / "output"

    def run(script: str, *arguments: str, job_id: str) -> str:
        environment = {"LAZYSNAP_JOB_ID": job_id, "COLUMNS": "150", **PROVES}
        status = zygote.run([str(ROOT / "examples" / script), *arguments], environment, output)
        assert status == 0, output.read_text()[-6000:]
        return output.read_text()

    return run


@pytest.mark.slow
def test_the_lightning_example_trains_and_its_loss_falls(run, tmp_path):
    output = run("lightning_gpt.py", "--max-steps", "60", "--dirpath", str(tmp_path), job_id=f"ex-{tmp_path}")
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", output, flags=re.M)]
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 0.2
    assert list(tmp_path.glob("step-*/*.json")), "a clean end leaves the last snapshot on disk"


@pytest.mark.slow
def test_the_plain_loop_goes_on_where_it_ended(run, tmp_path):
    common = ["--dirpath", str(tmp_path)]
    first = run("plain_loop.py", "--max-steps", "3", *common, job_id=f"plain-{tmp_path}")
    second = run("plain_loop.py", "--max-steps", "5", *common, job_id=f"plain-{tmp_path}")
    assert "a fresh start" in first
    assert f"resumed at step 3 from {tmp_path}" in second


@pytest.mark.slow
def test_the_rollback_example_goes_back_once_and_ends_with_finite_weights(run, tmp_path):
    output = run("rollback_on_nan.py", "--dirpath", str(tmp_path), job_id=f"nan-{tmp_path}")
    assert re.findall(r"^went back from step (\d+) to step (\d+)$", output, flags=re.M) == [("21", "20")]
    assert "step 39, weights are finite: True" in output


@pytest.mark.slow
def test_the_loop_of_the_readme_goes_on_where_it_was_killed_and_ends_once(zygote, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    [loop] = [block for block in blocks if "engine.boundary()" in block]
    script, output = tmp_path / "loop.py", tmp_path / "output"
    script.write_text(f"import os\n\nos.chdir({str(tmp_path)!r})\n{loop}")

    def start(**environment):
        return zygote.run([str(script)], environment, output), output.read_text()

    status, said = start(LAZYSNAP_FAULT="engine.begun:50:kill")
    assert (status, "lazysnap: starting fresh" in said) == (-signal.SIGKILL, True), said
    status, said = start(**PROVES)
    resumed = re.findall(r"^lazysnap: resumed step (\d+) of run \w+ .*from memory", said, flags=re.M)
    assert (status, len(resumed)) == (0, 1), said
    assert "was trained again and is identical bit for bit" in said
    # The capture before the 49th; steps may be left out while the second slot is made.
    assert 48 <= int(resumed[0]) < 400
    assert "(newest: step 400)" in said
    status, said = start()
    assert (status, "lazysnap: resumed step 400 of run" in said) == (0, True), said


def killed_at(step: int, python: str, script: str, *arguments: str, job_id: str) -> str:
    """What an example said until it was killed, at once after it had said that this step is over."""
    with subprocess.Popen(
        [python, str(ROOT / "examples" / script), *arguments],
        env={**os.environ, **PROVES, "LAZYSNAP_JOB_ID": job_id},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith(f"step {step} loss"):
                process.kill()
        assert process.wait(60) == -signal.SIGKILL, said[-4000:]
    return said


@pytest.mark.slow
@pytest.mark.parametrize("script", ["plain_loop.py", "fabric.py", "accelerate_gpt.py"])
def test_an_example_that_is_killed_goes_on_where_it_was(run, forking_python, tmp_path, script):
    arguments, job_id = ["--max-steps", "40", "--dirpath", str(tmp_path)], f"killed-{tmp_path}"
    first = killed_at(20, forking_python, script, *arguments, job_id=job_id)
    second = run(script, *arguments, job_id=job_id)

    assert "starting fresh" in first
    done = max(int(step) for step in re.findall(r"^step (\d+) loss", first, flags=re.M))
    [resumed] = re.findall(r"resumed step (\d+) of run .* from memory", second)
    # The newest step is trained again.
    assert done - 2 <= int(resumed) <= done + 1
    steps = [int(step) for step in re.findall(r"^step (\d+) loss", second, flags=re.M)]
    assert int(resumed) < steps[0] <= int(resumed) + 10
    losses = dict(re.findall(r"^step (\d+) loss ([\d.]+)$", first, flags=re.M))
    again = dict(re.findall(r"^step (\d+) loss ([\d.]+)$", second, flags=re.M))
    assert all(again[step] == losses[step] for step in set(losses) & set(again))


@pytest.mark.slow
def test_the_trainer_of_transformers_goes_on_where_it_ended(run, tmp_path):
    common = ["--output-dir", str(tmp_path), "--batch-size", "4"]
    first = run("hf_trainer.py", "--max-steps", "3", *common, job_id=f"hf-{tmp_path}")
    second = run("hf_trainer.py", "--max-steps", "5", *common, job_id=f"hf-{tmp_path}")
    assert re.findall(r"^step (\d+) loss", first, flags=re.M) == ["1", "2", "3"]
    assert re.findall(r"^step (\d+) loss", second, flags=re.M) == ["4", "5"]


@pytest.mark.slow
def test_the_trainer_of_trl_goes_on_where_it_ended(run, tmp_path):
    pytest.importorskip("trl", reason="trl and datasets take 220 MB: `uv pip install trl` to run this")
    common = ["--output-dir", str(tmp_path)]
    run("trl_sft.py", "--max-steps", "3", *common, job_id=f"trl-{tmp_path}")
    second = run("trl_sft.py", "--max-steps", "5", *common, job_id=f"trl-{tmp_path}")
    assert "resumed step 3" in second
    assert "finished at step 5" in second


class Torchrun:
    """An example on two ranks, and what it says."""

    def __init__(self, python: str, script: str, *arguments: str, job_id: str) -> None:
        launcher = str(Path(sys.executable).with_name("torchrun"))
        options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--no-python"]
        self.process = subprocess.Popen(
            [python, launcher, *options, python, str(ROOT / "examples" / script), *arguments],
            env={**os.environ, **ENVIRONMENT, **PROVES, "LAZYSNAP_JOB_ID": job_id},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.text = ""
        self._deadline = time.monotonic() + 400
        self._coming = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._coming.put(line)
        self._coming.put("")

    def follow(self, until: str | None) -> None:
        """Read on until something was said; ``None``: to the end."""
        while until is None or until not in self.text:
            try:
                line = self._coming.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"did not come to {until or 'its end'!r} in time: {self.text[-4000:]}")
            if not line:
                break
            self.text += line

    def end(self) -> None:
        # The workers are in sessions of their own: the launcher takes them along if it is asked, not if it is killed.
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(40)
        self.process.kill()
        self.process.wait(20)
        self._reader.join(20)
        self.process.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_two_ranks_go_on_from_memory_when_one_of_them_was_killed(forking_python, tmp_path):
    arguments = ["--max-steps", "40", "--dirpath", str(tmp_path)]
    job = Torchrun(forking_python, "ddp_loop.py", *arguments, job_id=f"ddp-{tmp_path}")
    try:
        job.follow("step 10 loss")
        fresh = dict(re.findall(r"rank (\d), process (\d+): a fresh start", job.text))
        os.kill(int(fresh["1"]), signal.SIGKILL)
        job.follow(None)
        code = job.process.wait(60)
    finally:
        job.end()

    resumed = re.findall(r"rank (\d), process \d+: resumed at step (\d+) from memory", job.text)
    steps = {step for _, step in resumed}
    assert {rank for rank, _ in resumed} == {"0", "1"}, job.text[-4000:]
    # Rank 0 was through step 10; what was begun two steps before was whole on both by then, and is trained again.
    assert len(steps) == 1
    assert int(steps.pop()) >= 7
    assert f"finished at step 40 after {40 * 2 * 16 * 64:,} characters" in job.text
    assert code == 0, job.text[-4000:]
