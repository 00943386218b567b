"""The same GPT in a plain PyTorch loop: no framework, the engine alone.

    python examples/plain_loop.py

Kill it with `kill -9` and start it again: it goes on from the last optimizer step.
"""

import argparse
import logging

import torch
from gpt import GPT, HAMLET, GPTSize, TextWindows

from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine


def batch_of(data: TextWindows, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of one step: a pure function of the step, so that there is no position to store."""
    generator = torch.Generator().manual_seed(step)
    picks = torch.randint(len(data), (size,), generator=generator).tolist()
    ids, targets = zip(*(data[i] for i in picks), strict=True)
    return torch.stack(ids), torch.stack(targets)


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

    # Random number generators are part of the state without being named.
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    config = SnapshotConfig(levels=(PersistentLevel(args.dirpath),))
    engine = SnapshotEngine(config, state)
    snapshot = engine.restore("latest")
    first = snapshot.step if snapshot else 0
    print(f"resumed at step {first} from {snapshot.level}" if snapshot else "a fresh start", flush=True)
    engine.wait_ready(timeout_s=60)  # else the first steps go by before there is memory to capture them into
    try:
        for step in range(first + 1, args.max_steps + 1):
            loss = model.loss(*batch_of(data, step, 16))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # the engine's hook waits here, only if the last copy is not done yet
            schedule.step()
            engine.boundary(step)  # everything of this step is over: capture it
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
    except BaseException:
        engine.abandon()  # the keeper stays, for the next start
        raise
    statistics = engine.statistics()
    blocked_s = statistics.boundary.total_s + statistics.gate.total_s
    print(f"{statistics.whole} snapshots in memory; training waited {blocked_s * 1e3:.0f} ms for all of them")
    engine.close(drain=True)


if __name__ == "__main__":
    main()
