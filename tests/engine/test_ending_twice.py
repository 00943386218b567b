"""What ``close`` says when it is called again: the same, and nothing better."""

import pytest


@pytest.mark.slow
def test_what_could_not_be_made_durable_is_not_durable_when_asked_again(job, tmp_path):
    place = tmp_path / "level"
    place.write_text("a file stands where the directory should be")
    training = job.start(place, drain_timeout_s=2)
    training.run(1, 1)

    assert [training.engine.close(), training.engine.close()] == [False, False]


def test_what_was_durable_stays_so(job, tmp_path):
    training = job.start(tmp_path / "level")
    training.run(1, 1)

    assert [training.engine.close(), training.engine.close()] == [True, True]


@pytest.mark.slow
def test_a_training_that_was_abandoned_did_not_end_well(job, tmp_path):
    training = job.start(tmp_path / "level")
    training.run(1, 1)
    training.engine.abandon()

    assert not training.engine.close()
