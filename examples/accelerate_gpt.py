"""The same GPT under Accelerate: `LazyAccelerator` instead of `Accelerator`, and one call of `load_state`.

    python examples/accelerate_gpt.py        (or: accelerate launch examples/accelerate_gpt.py)

Kill it with `kill -9` and start it again: it continues from the last optimizer step, in mid-epoch too.
"""

import argparse
import logging

import torch
from accelerate.utils import set_seed
from gpt import GPT, HAMLET, GPTSize, TextWindows
from torch.nn.functional import cross_entropy

from lazysnap import LazyAccelerator


class Progress:
    """What the loop counts."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--dirpath", default="runs/accelerate_gpt", help="snapshots are in its folder lazysnap")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    set_seed(1603)
    data = TextWindows(HAMLET.read_text(encoding="utf-8"), 64)
    model = GPT(GPTSize(layers=2, heads=4, width=64, context=64, vocabulary=len(data.characters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(data, 16, shuffle=True, drop_last=True)

    accelerator = LazyAccelerator(project_dir=args.dirpath)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.load_state("latest")
    while progress.step < args.max_steps:
        for ids, targets in loader:  # after a restart: the rest of the epoch
            loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            accelerator.print(f"step {progress.step} loss {loss.item():.4f}", flush=True)
            if progress.step == args.max_steps:
                break
    accelerator.end_training()
    accelerator.print(f"finished at step {progress.step}", flush=True)


if __name__ == "__main__":
    main()
