"""Exact resumes with whatever Lightning is installed. `make smoke` runs this with the oldest one that is supported.

Uses only what every supported version has; more cases are in test_exact_resume.py, for the newest.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from harness import KINDS, Shuffled, check_exact, run, run_real


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_resumed_within_an_epoch_and_at_its_end_it_ends_as_uninterrupted(kind, tmp_path):
    """With and without accumulation after every step; the others differ in what they restore, not in where."""
    check_exact(kind(), tmp_path, slice(None) if kind is Shuffled else None)


def test_resumed_from_memory_it_ends_as_uninterrupted(tmp_path):
    whole = run(Shuffled(), tmp_path, snapshots=False)
    with pytest.raises(ZeroDivisionError):
        run_real(Shuffled(), tmp_path, seed=1, die_at=8)
    resumed = run_real(Shuffled(), tmp_path, seed=99)
    assert 0 < len(resumed.trace) < len(whole.trace)
    assert resumed.trace == whole.trace[-len(resumed.trace) :]


OF_BOTH = """
import pickle
import warnings

warnings.simplefilter("ignore")

import lightning.pytorch
from lazysnap import LazySnapshotCallback

classes = LazySnapshotCallback.__mro__
import pytorch_lightning


class Both(pytorch_lightning.Callback, lightning.pytorch.Callback):
    pass


class Mine(LazySnapshotCallback, Both):
    pass


for kind in (LazySnapshotCallback, Mine):
    callback = kind("snapshots")
    for package in (lightning.pytorch, pytorch_lightning):
        trainer = package.Trainer(callbacks=callback, logger=False, accelerator="cpu")
        assert callback in trainer.callbacks
    again = pickle.loads(pickle.dumps(callback))
    assert isinstance(again, kind) and isinstance(again, pytorch_lightning.Callback)
    assert again.state_key == kind.__qualname__
assert LazySnapshotCallback.__mro__ == classes
"""


def test_a_package_that_is_imported_later_leaves_the_class_and_its_subclasses_as_they_are(tmp_path):
    """Trainers of both packages take the callback, although it was defined for the first one."""
    done = subprocess.run(
        [sys.executable, "-c", OF_BOTH], capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_same_with_pytorch_lightning(tmp_path):
    script = Path(__file__).with_name("other_package.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.split() == ["same", "alone"], done.stderr
