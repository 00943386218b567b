"""Figures for loggers name a level by its place among the levels, whichever had a snapshot first."""

from lazysnap import PersistentLevel
from lazysnap.engine.statistics import Statistics
from lazysnap.integrations.session import Figures


def test_a_slower_level_that_stored_first_keeps_its_number(tmp_path):
    fast, slow = PersistentLevel(str(tmp_path / "fast")), PersistentLevel(str(tmp_path / "slow"))
    figures = Figures()
    figures.record(10)
    statistics = Statistics(began=1, last_durable_step={slow.url: 4, fast.url: 9})

    values = figures.values(statistics, [fast, slow])

    assert (values["lazysnap/lag_steps/storage_0"], values["lazysnap/lag_steps/storage_1"]) == (1, 6)
    assert "lazysnap/lag_steps/storage_1" not in figures.values(
        Statistics(began=1, last_durable_step={fast.url: 9}), [fast, slow]
    )
