"""What is told of a level that fails, and works again: once each."""

import pytest

from lazysnap.engine.events import EventLog
from lazysnap.engine.statistics import Statistics
from lazysnap.keeper.events import Complete
from lazysnap.keeper.protocol import Durable, LevelFailed


def said(caplog):
    return [" ".join(record.getMessage().split()[:3]) for record in caplog.records if record.levelname == "WARNING"]


def test_a_disk_of_one_rank_that_writes_garbage_is_told_once(caplog):
    """It commits each time, and is read back damaged each time."""
    log = EventLog(Statistics(), is_alone=False)

    for step in range(1, 6):
        log.drain([Durable("/disk", step, 100, 0.1, step), LevelFailed("/disk", step, "read back damaged")])

    assert said(caplog) == ["step 1 is"]
    log.drain([Durable("/disk", 6, 100, 0.1, 6), Complete("/disk", 6, 1)])
    assert said(caplog) == ["step 1 is", "/disk works again:"]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_level_of_one_rank_works_again_when_it_commits(caplog, steps):
    log = EventLog(Statistics(), is_alone=True)

    log.drain([LevelFailed("/disk", step, "full") for step in range(steps)])
    log.drain([Durable("/disk", step, 100, 0.1, step) for step in range(steps, 2 * steps)])

    assert said(caplog) == ["step 0 is", "/disk works again:"]
