"""``lazysnap status`` beside a real training with an engine: while it runs, and after its death."""

import json
import pathlib
import signal

import pytest
from cli_level import run, run_json
from support.waiting import until

PROGRAM = pathlib.Path(__file__).parents[1] / "faults" / "visible_trainer.py"


@pytest.fixture
def training(zygote, url, tmp_path):
    child = zygote.start([str(PROGRAM), json.dumps({"url": url, "steps": 10**9})], {}, tmp_path / "output")
    yield child
    child.kill()
    run("stop", url, "--force")


def waited(job):
    """The wait that is told with the states of a training, so behind the first snapshot that was stored."""
    return job["ranks"][0]["waited_s"]


def test_a_training_is_seen_live_and_what_is_left_after_its_death(training, url, capsys):
    def job(is_so):
        def look():
            jobs = run_json(capsys, "status", url)[1]["jobs"]
            return jobs and jobs[0]["ranks"] and is_so(jobs[0]) and jobs[0]

        return until(look)

    live = job(lambda found: found["levels"][0]["age_s"] and found["ranks"][0]["steps_per_s"] and waited(found))

    assert live["job"] == url
    [rank] = live["ranks"]
    assert (rank["training"], rank["pid"], rank["slots"]) == (True, training.pid, 3)
    assert rank["copy_s"] > 0
    assert rank["waited_s"] > 0
    assert rank["captured_age_s"] < 30
    assert rank["captured_step"] <= rank["step"] <= rank["captured_step"] + 1
    assert live["survives"]["keeper"]["safe"] == live["survives"]["process"]["safe"]
    assert live["survives"]["process"]["safe"]["source"] == "memory"
    assert live["survives"]["process_and_keeper"]["safe"]["source"] == url
    assert live["problems"] == []

    training.kill()
    assert training.get() == -signal.SIGKILL
    dead = job(lambda found: not found["ranks"][0]["training"])

    left = dead["survives"]["process"]["safe"]
    assert left["source"] == "memory"
    assert left["step"] >= live["survives"]["process"]["safe"]["step"]
    assert dead["survives"]["keeper"]["safe"]["source"] == url
    assert 0 < dead["ranks"][0]["memory_stays_s"] <= 30
    assert dead["ranks"][0]["steps_per_s"] is None
