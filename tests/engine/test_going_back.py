"""A training that restores an earlier step in the middle: what was captured after that step is of no account."""

import pytest
from small_training import TIMEOUT_S

from lazysnap.errors import LevelError
from lazysnap.levels.listing import list_names
from lazysnap.levels.store import open_storage


@pytest.mark.slow
def test_after_going_back_only_what_is_captured_from_then_on_is_the_last(job, tmp_path):
    training = job.start(tmp_path)
    engine = training.engine
    for step in (1, 2, 3):  # one at a time, or storage has only the newest
        training.run(step, step)
        assert engine.wait(timeout_s=TIMEOUT_S)
    assert engine.statistics().last_whole_step == 3

    assert engine.restore(2).step == 2

    # With several ranks flush would wait until all have this one, and all captured less since.
    assert engine.statistics().last_whole_step is None
    assert engine.wait(timeout_s=TIMEOUT_S)
    assert engine._wait_ready(TIMEOUT_S)
    training.run(3, 3)
    assert engine.statistics().last_whole_step == 3
    assert engine.close()


@pytest.mark.slow
def test_a_file_in_the_place_of_a_level_is_not_taken_for_an_empty_one(job, tmp_path, caplog):
    """Snapshots may be elsewhere: it is said, and not only that there are none."""
    path = tmp_path / "level"
    path.write_text("not a directory")

    with pytest.raises(LevelError, match=r"level: listing .*Not a directory"):
        list_names(open_storage(str(path)))

    assert job.start(path, ready=False).engine.restore() is None
    assert "level skipped: " in caplog.text
