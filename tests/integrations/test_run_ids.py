"""One id for all starts of a run, which a logger can take before the training is there."""

import json
import signal
from pathlib import Path

import pytest

import lazysnap
from lazysnap import ConfigError, LazySnapshotCallback, SnapshotConfig

PROGRAM = str(Path(__file__).parent / "run_id_training.py")
KNOWN_BEFORE = ("lightning", "transformers")
"""Integrations whose callback knows the id before the training."""


@pytest.fixture
def train(zygote, tmp_path):
    """Train in a process of its own; return the ids that it knew before, and in, the training."""

    def train(kind, how, steps, dies_at=0):
        output = tmp_path / "output"
        status = zygote.run([PROGRAM, kind, str(tmp_path), how, str(steps), str(dies_at)], {}, output)
        assert status == (-signal.SIGKILL if dies_at else 0), output.read_text()
        return json.loads((tmp_path / "ids").read_text().splitlines()[-1])

    return train


SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("lightning", "accelerate", "transformers")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", *SLOW_KINDS])
def test_a_run_keeps_its_id_after_sigkill_and_another_run_has_another(train, kind, tmp_path):
    place = tmp_path / "snapshots"
    assert lazysnap.run_id(place) is None

    before, first = train(kind, "latest", 6, dies_at=3)
    assert before == (first if kind in KNOWN_BEFORE else None)
    assert lazysnap.run_id(place) == first

    before, again = train(kind, "latest", 6)
    assert again == first
    assert before == (first if kind in KNOWN_BEFORE else None)
    assert lazysnap.run_id(place) == first

    _, another = train(kind, "fresh", 4)
    assert another != first
    assert lazysnap.run_id(place) == another


def test_without_a_place_nothing_is_known_and_without_a_job_it_is_refused():
    assert LazySnapshotCallback().run_id is None
    with pytest.raises(ConfigError, match="nothing names this job"):
        lazysnap.run_id(SnapshotConfig())


def test_a_callback_that_was_asked_keeps_its_answer(tmp_path):
    callback = LazySnapshotCallback(tmp_path / "level")

    assert callback.run_id == callback.run_id
