"""A Lightning fit as a user writes it, without any logging configured: ``visible_fit.py DIRECTORY DIE_AT [CKPT]``."""

import os
import signal
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lazysnap import LazySnapshotCallback


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def test_step(self, batch, batch_idx):
        self.log("loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Watch(L.Callback):
    def __init__(self, lazy, die_at: int) -> None:
        self.lazy, self.die_at = lazy, die_at

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        assert self.lazy.engine._wait_ready(60)
        if trainer.global_step == self.die_at:
            self.lazy.engine.gate()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    directory, die_at, path = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or ["latest"])[0]
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(40, 4)), 4, shuffle=True)
    lazy = LazySnapshotCallback(persist_every_n_steps=10)
    trainer = L.Trainer(
        max_epochs=2,
        callbacks=[lazy, Watch(lazy, die_at)],
        default_root_dir=directory,
        logger=False,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), loader, ckpt_path=None if path == "none" else path)
    statistics = lazy.statistics()
    print("statistics", statistics.whole, statistics.last_durable_step, flush=True)
    trainer.save_checkpoint(f"{directory}/whole.ckpt")
    if path == "latest":
        trainer.test(Model(), loader, ckpt_path="latest", verbose=False)
        print("afterwards", lazy.statistics() is statistics, flush=True)


if __name__ == "__main__":
    main()
