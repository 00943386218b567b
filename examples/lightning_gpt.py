"""Train a small GPT on Hamlet with Lightning; kill it whenever you like and start it again.

    python examples/lightning_gpt.py

What lazysnap needs of a training script are the two lines marked with (*).
"""

import argparse
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from gpt import GPT, HAMLET, GPTSize, TextWindows

from lazysnap import LazySnapshotCallback

SIZES = {  # layers, heads, width, context
    "tiny": (2, 2, 32, 32),
    "small": (4, 4, 128, 64),
    "medium": (8, 8, 512, 128),
}


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

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        print(f"starting at step {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        print(f"step {trainer.global_step} loss {trainer.callback_metrics['loss']:.4f}", flush=True)


def digest(trainer: L.Trainer) -> str:
    """SHA-256 of every bit of the weights and of the optimizer's tensors."""

    def tensors(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            for inner in value.values():
                yield from tensors(inner)

    state = {"model": trainer.lightning_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
    total = hashlib.sha256()
    for tensor in tensors(state):
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def sample(model: LightningGPT, data: TextWindows, length: int = 200) -> str:
    """Text that the model writes."""
    generator = torch.Generator().manual_seed(0)
    model.eval().cpu()
    ids = data.ids[:8][None]
    with torch.no_grad():
        for _ in range(length):
            logits = model.network(ids[:, -data.context :])[0, -1]
            pick = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, pick[None]], dim=1)
    return data.decode(ids[0])


def snapshots(args: argparse.Namespace) -> list[L.Callback]:
    """The callback; `LazySnapshotCallback()` alone is enough, the settings here make it visible."""
    if args.no_snapshots:
        return []
    settings = {"every_n_steps": args.every_n_steps, "persist_every_n_steps": args.persist_every_n_steps}
    return [LazySnapshotCallback(args.dirpath, **settings)]  # (*)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--dirpath", default="runs/lightning_gpt", help="directory or URL for snapshots on storage")
    parser.add_argument("--every-n-steps", type=int, default=1, help="optimizer steps between captures in memory")
    parser.add_argument("--persist-every-n-steps", type=int, default=100, help="steps between files")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--text", type=Path, default=HAMLET, help="any UTF-8 text file")
    parser.add_argument("--no-snapshots", action="store_true", help="train without lazysnap, to compare")
    parser.add_argument("--sample", action="store_true", help="print text written by the model at the end")
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    L.seed_everything(1603, verbose=False)
    layers, heads, width, context = SIZES[args.size]
    data = TextWindows(args.text.read_text(encoding="utf-8"), context)
    model = LightningGPT(GPTSize(layers, heads, width, context, len(data.characters)), args.max_steps)
    loader = torch.utils.data.DataLoader(data, args.batch_size, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        max_steps=args.max_steps,
        devices=1,
        callbacks=[PrintLoss(), *snapshots(args)],
        default_root_dir="runs",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=None if args.no_snapshots else "latest")  # (*)
    print(f"finished at step {trainer.global_step}: state sha256 {digest(trainer)}", flush=True)
    if args.sample:
        print(sample(model, data))


if __name__ == "__main__":
    main()
