"""A training with pytorch_lightning alone: dies, resumes, and prints whether it ended as an uninterrupted one."""

import sys
import warnings

warnings.simplefilter("ignore")

import pytorch_lightning as pl  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from lazysnap import LazySnapshotCallback  # noqa: E402


class Net(pl.LightningModule):
    def __init__(self, die_at: int = -1) -> None:
        super().__init__()
        self.layer, self.die_at = torch.nn.Linear(3, 1), die_at

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.die_at:
            raise ZeroDivisionError
        loss = self.layer(batch[0] + torch.randn(4, 3)).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Ready(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        lazy = next(item for item in trainer.callbacks if isinstance(item, LazySnapshotCallback))
        assert lazy.engine._wait_ready(20)


def fit(directory: str, seed: int, die_at: int = -1) -> list[float]:
    pl.seed_everything(seed, verbose=False)
    model = Net(die_at)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[LazySnapshotCallback(), Ready()],
    )
    data = TensorDataset(torch.arange(60.0).view(20, 3))
    trainer.fit(model, DataLoader(data, 4, shuffle=True), ckpt_path="latest")
    return [value.item() for value in torch.cat([item.flatten() for item in model.parameters()])]


whole = fit(sys.argv[1] + "/whole", 1)
try:
    fit(sys.argv[1] + "/cut", 1, die_at=7)
except ZeroDivisionError:
    print("same" if fit(sys.argv[1] + "/cut", 99) == whole else "different")
print("lightning imported" if "lightning.pytorch" in sys.modules else "alone")
