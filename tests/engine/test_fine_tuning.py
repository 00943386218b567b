"""A fine-tuning: its frozen base is stored once, and it resumes from storage alone, bit for bit."""

import pathlib

import pytest
import torch
from small_training import TIMEOUT_S, end
from tuning import Tuning

WIDTH = 2_900
"""The base has 34 MB: one whole block of a file, and more."""


def start(job, level):
    tuning = Tuning(job.config(level), width=WIDTH, layers=1)
    job.trainings.append(tuning)
    return tuning


def weights(tuning):
    return [tensor.numpy().tobytes() for tensor in tuning.model.state_dict().values()]


def start_stored(job, level):
    """A fine-tuning whose first step is at the level."""
    tuning = start(job, level)
    assert tuning.engine._wait_ready(TIMEOUT_S)
    tuning.run(1, 1)
    assert tuning.engine.wait(1, timeout_s=TIMEOUT_S)
    return tuning


@pytest.mark.slow
def test_a_fine_tuning_resumes_from_storage_and_stores_its_base_once(job, tmp_path):
    first = start_stored(job, tmp_path)
    first.run(2, 3)
    stored = weights(first)
    end(first)  # so that memory has nothing

    second = start(job, tmp_path)
    with torch.no_grad():
        for weight in second.model.parameters():
            weight.zero_()
    snapshot = second.engine.restore("latest")
    assert (snapshot.step, snapshot.level) == (3, str(tmp_path))
    assert weights(second) == stored
    assert second.engine._wait_ready(TIMEOUT_S)
    second.run(4, 5)
    end(second)

    bases = sorted(pathlib.Path(tmp_path).glob("step-*/*.base"))
    first_step, last_step = [base.parent.name[:13] for base in bases]
    assert first_step in ("step-00000003", "step-00000004")  # the first step of a start is stored, if it is in time
    assert last_step == "step-00000005"
    assert bases[0].samefile(bases[1])


@pytest.mark.slow
def test_frozen_weights_that_are_written_to_make_another_base(job, tmp_path):
    """Merged adapters: a write through ``.data``, which torch does not count."""
    tuning = start_stored(job, tmp_path)
    tuning.model[0].base.weight.data.add_(1)
    tuning.run(2, 2)
    stored = weights(tuning)
    end(tuning)

    bases = sorted(pathlib.Path(tmp_path).glob("step-*/*.base"))
    assert len(bases) == 2
    assert not bases[0].samefile(bases[1])
    second = start(job, tmp_path)
    assert second.engine.restore("latest").step == 2
    assert weights(second) == stored


@pytest.mark.slow
@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_frozen_weights_that_were_made_in_inference_mode_are_captured(job, every_n_steps):
    """All parameters are given to the optimizer, as many programs do. torch counts no writes to such weights."""
    with torch.inference_mode():
        frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    tuning = Tuning(job.config(every_n_steps=every_n_steps), frozen=frozen)
    job.trainings.append(tuning)
    assert tuning.engine._wait_ready(TIMEOUT_S)

    tuning.run(1, 4)

    assert tuning.began == [True, True, every_n_steps == 1, True]  # the first boundary is always due
    assert tuning.engine.wait(4, until="captured", timeout_s=TIMEOUT_S)
