"""Figures for loggers name a level by its place among the levels, and count from the newest step that is finished."""

import torch

from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.engine.statistics import Statistics
from lazysnap.integrations.session import Session, logged_figures


def test_a_slower_level_that_stored_first_keeps_its_number(tmp_path):
    fast, slow = PersistentLevel(str(tmp_path / "fast")), PersistentLevel(str(tmp_path / "slow"))
    finished_s = {10: 0.0}
    statistics = Statistics(began=1, last_durable_step={slow.url: 4, fast.url: 9})

    values = logged_figures(statistics, [fast, slow], finished_s)

    assert (values["lazysnap/lag_steps/storage_0"], values["lazysnap/lag_steps/storage_1"]) == (1, 6)
    statistics = Statistics(began=1, last_durable_step={fast.url: 9})
    assert "lazysnap/lag_steps/storage_1" not in logged_figures(statistics, [fast, slow], finished_s)


def test_after_a_rollback_the_lag_counts_from_the_step_at_which_training_stands(tmp_path):
    config = SnapshotConfig(levels=(PersistentLevel(str(tmp_path)),))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SnapshotEngine(config, {"model": model, "optimizer": optimizer}) as engine:
        assert engine._wait_ready(60)
        session = Session(engine)
        for step in (1, 2, 3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.finish_step(step)
            session.capture(is_last=False)
        assert engine.wait(3, until="captured", timeout_s=60)

        session.request_rollback(2)
        session.roll_back()

        assert session.step == 2
        assert session.figures()["lazysnap/lag_steps/memory"] == 0
