"""Trainings of odd models, and engines."""

import json
import pathlib
import signal
import uuid

import pytest

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

HERE = pathlib.Path(__file__).parent


class Trainings:
    """The starts of one job."""

    def __init__(self, zygote, root):
        self.zygote = zygote
        self.root = root
        self.job_id = uuid.uuid4().hex

    def run(self, case, steps, *, death=None, restarted=0, engine=True):
        """What a start wrote down at its end; if it died as it was to, the text that it put out until then."""
        result, output = self.root / "result", self.root / "output"
        result.unlink(missing_ok=True)
        place = str(self.root / "snapshots") if engine else "-"
        args = [str(HERE / "odd_trainer.py"), case, place, str(steps), str(result), *([death] if death else [])]
        env = {"LAZYSNAP_JOB_ID": self.job_id, "RESTARTED": str(restarted or "")}
        status = self.zygote.run(args, env, output)
        assert status == (-signal.SIGKILL if death else 0), output.read_text()[-4000:]
        return output.read_text() if death else json.loads(result.read_text())


@pytest.fixture
def trainings(zygote, tmp_path):
    return Trainings(zygote, tmp_path)


@pytest.fixture
def engines(tmp_path):
    """Makes engines of one job, over ``tmp_path`` and memory; what is left of them goes at the end."""
    made = []
    job_id = uuid.uuid4().hex

    def make(state, **settings):
        levels = (PersistentLevel(str(tmp_path), every_n_steps=1),)
        config = SnapshotConfig(levels=levels, job_id=job_id, memory=MemoryLevel(linger_s=60), **settings)
        made.append(SnapshotEngine(config, state))
        return made[-1]

    yield make
    for engine in made:
        engine.close(drain=False)
