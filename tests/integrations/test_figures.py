"""Figures for loggers name a level by its place among the levels, whichever had a snapshot first."""

from lazysnap import PersistentLevel
from lazysnap.engine.statistics import Statistics
from lazysnap.integrations.session import logged_figures


def test_a_slower_level_that_stored_first_keeps_its_number(tmp_path):
    fast, slow = PersistentLevel(str(tmp_path / "fast")), PersistentLevel(str(tmp_path / "slow"))
    finished_s = {10: 0.0}
    statistics = Statistics(began=1, last_durable_step={slow.url: 4, fast.url: 9})

    values = logged_figures(statistics, [fast, slow], finished_s)

    assert (values["lazysnap/lag_steps/storage_0"], values["lazysnap/lag_steps/storage_1"]) == (1, 6)
    statistics = Statistics(began=1, last_durable_step={fast.url: 9})
    assert "lazysnap/lag_steps/storage_1" not in logged_figures(statistics, [fast, slow], finished_s)
