"""The same GPT under Lightning Fabric: its own loop, and the engine beside it.

    python examples/fabric.py

Kill it with `kill -9` and start it again: it continues from the last optimizer step, in mid-epoch too.
"""

import argparse
import logging

import torch
from gpt import GPT, HAMLET, GPTSize, TextWindows
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy

from lazysnap import ResumableLoader, SnapshotEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--dirpath", default="runs/fabric")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    fabric = Fabric(devices=1)
    fabric.launch()
    fabric.seed_everything(1603, verbose=False)
    data = TextWindows(HAMLET.read_text(encoding="utf-8"), 64)
    model = GPT(GPTSize(layers=2, heads=4, width=64, context=64, vocabulary=len(data.characters)))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    windows = torch.utils.data.DataLoader(data, 16, shuffle=True, drop_last=True)
    loader = ResumableLoader(fabric.setup_dataloaders(windows))

    state = {"model": model, "optimizer": optimizer, "loader": loader}
    with SnapshotEngine(args.dirpath, state) as engine:
        engine.restore("latest")
        while engine.step < args.max_steps:
            for ids, targets in loader:  # after a restart: the rest of the epoch
                loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten())
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                engine.boundary()  # everything of this step is over: capture it
                fabric.print(f"step {engine.step} loss {loss.item():.4f}", flush=True)
                if engine.step == args.max_steps:
                    break
    fabric.print(f"finished at step {engine.step}", flush=True)


if __name__ == "__main__":
    main()
