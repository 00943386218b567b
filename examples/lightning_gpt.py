"""Train a small GPT on Hamlet with Lightning; kill it whenever you like and start it again.

    python examples/lightning_gpt.py

What lazysnap needs of a training script are the two lines marked with (*).
"""

import argparse
import logging
from typing import Any

import lightning as L
import torch
from gpt import GPT, HAMLET, GPTSize, TextWindows

from lazysnap import LazySnapshotCallback


class LightningGPT(L.LightningModule):
    """The GPT with its optimizer and schedule."""

    def __init__(self, size: GPTSize, max_steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = GPT(size)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.network.loss(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=self.hparams.max_steps + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PrintLoss(L.Callback):
    """One line per optimizer step."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        print(f"step {trainer.global_step} loss {trainer.callback_metrics['loss']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--dirpath", default="runs/lightning_gpt", help="directory or URL for snapshots on storage")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    L.seed_everything(1603, verbose=False)
    data = TextWindows(HAMLET.read_text(encoding="utf-8"), 64)
    size = GPTSize(layers=2, heads=4, width=64, context=64, vocabulary=len(data.characters))
    loader = torch.utils.data.DataLoader(data, 16, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        max_steps=args.max_steps,
        devices=1,
        callbacks=[PrintLoss(), LazySnapshotCallback(args.dirpath)],  # (*)
        default_root_dir="runs",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LightningGPT(size, args.max_steps), loader, ckpt_path="latest")  # (*)
    print(f"finished at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
