"""The same GPT in a plain PyTorch loop: no framework, the engine alone.

    python examples/plain_loop.py

Kill it with `kill -9` and start it again: it continues from the last optimizer step.
"""

import argparse
import logging

import torch
from gpt import GPT, HAMLET, GPTSize, TextWindows

from lazysnap import ResumableLoader, SnapshotEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--dirpath", default="runs/plain_loop")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    torch.manual_seed(1603)
    data = TextWindows(HAMLET.read_text(encoding="utf-8"), 64)
    model = GPT(GPTSize(layers=4, heads=4, width=128, context=64, vocabulary=len(data.characters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_steps)
    loader = ResumableLoader(torch.utils.data.DataLoader(data, 16, shuffle=True, drop_last=True))
    progress = {"epoch": 0}

    # Random number generators are part of the state without being named.
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader, "progress": progress}
    with SnapshotEngine(args.dirpath, parts) as engine:
        snapshot = engine.restore("latest")
        start = f"resumed at step {snapshot.step} from {snapshot.level}" if snapshot else "a fresh start"
        print(start, flush=True)
        while engine.step < args.max_steps:
            for batch in loader:  # after a restart: the rest of the epoch
                loss = model.loss(*batch)
                loss.backward()
                optimizer.step()  # the engine's hook waits here, only if the last copy is not done yet
                optimizer.zero_grad()
                schedule.step()
                engine.boundary()  # everything of this step is over: capture it
                if engine.step % 10 == 0:
                    print(f"step {engine.step} loss {loss.item():.4f}", flush=True)
                if engine.step == args.max_steps:
                    break
            else:
                progress["epoch"] += 1
    statistics = engine.statistics()
    print(f"{statistics.whole} snapshots in memory; training waited {statistics.waited_s:.1f} s in all")


if __name__ == "__main__":
    main()
