"""The events of a start: each of its parts, in order, with the time at which it ended."""

import pytest
from small_training import TIMEOUT_S
from support.waiting import until

from lazysnap import events


def phases_at(level):
    """Phases by start, in the order of the starts."""
    found = [event for file in events.read(str(level)) for event in file.events]
    starts = [event.start for event in found if isinstance(event, events.TrainerStarted)]
    ended = [event for event in found if isinstance(event, events.PhaseEnded)]
    return [[event for event in ended if event.start == start] for start in starts]


@pytest.mark.slow
def test_a_restart_tells_the_times_of_its_parts_and_a_fresh_start_of_those_it_has(job, tmp_path):
    level = tmp_path / "level"
    first = job.start(level)
    first.run(1, 2)
    assert first.engine.wait(2, until="durable", timeout_s=TIMEOUT_S)
    first.engine.close()
    until(lambda: phases_at(level) and phases_at(level)[0])

    second = job.start(level, ready=False)
    assert second.engine.restore("latest").step == 2
    second.run(3, 4)
    until(lambda: len(phases_at(level)) == 2 and phases_at(level)[1])

    fresh, resumed = phases_at(level)
    assert [event.phase for event in fresh] == ["import", "rendezvous", "first_step"]
    assert [event.phase for event in resumed] == list(events.PHASES)
    times = [event.t for event in resumed]
    assert times == sorted(times)
    assert resumed[-1].waited_s > 0
    begun = [
        event for file in events.read(str(level)) for event in file.events if isinstance(event, events.TrainerStarted)
    ]
    assert [event.step for event in begun] == [0, 2]
    assert begun[1].began < times[0]
    passed = [event for file in events.read(str(level)) for event in file.events if isinstance(event, events.Progress)]
    assert max(event.copy_s for event in passed) > 0
