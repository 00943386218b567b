"""What snapshots cost goes to the trackers that a script logs to."""

import torch
from accelerate.tracking import GeneralTracker

from lazysnap import LazyAccelerator, MemoryLevel, PersistentLevel, SnapshotConfig


class Listed(GeneralTracker):
    name = "listed"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self):
        super().__init__()
        self.logged = []

    @property
    def tracker(self):
        return self.logged

    def log(self, values, step=None, **kwargs):
        self.logged.append((step, values))


def test_figures_are_logged_beside_the_scripts_own(tmp_path):
    level = PersistentLevel(str(tmp_path / "level"), every_n_steps=2)
    tracker = Listed()
    config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=5), io_timeout_s=60)
    accelerator = LazyAccelerator(cpu=True, log_with=tracker, snapshots=config)
    accelerator.init_trackers("a")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(torch.ones(8, 2)))
    for step, batch in enumerate(loader):
        accelerator.log({"before": step}, step=step)
        accelerator.backward(model(batch).sum())
        optimizer.step()
    assert accelerator.engine.wait(timeout_s=240)
    accelerator.log({"loss": 1.0}, step=8)
    accelerator.end_training()

    assert tracker.logged[0] == (0, {"before": 0})
    step, values = tracker.logged[-1]
    assert (step, values["loss"]) == (8, 1.0)
    names = {"stall_ms", "copy_gb_per_s", "skipped", "torn", "lag_steps/memory", "lag_s/memory", "lag_steps/storage_0"}
    assert {f"lazysnap/{name}" for name in names} <= values.keys()
    assert values["lazysnap/lag_steps/memory"] == 0
