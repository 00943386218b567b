"""Go back when the loss is not a number: the last good step comes back from memory, and the bad batch is skipped.

    python examples/rollback_on_nan.py

Batch 20 of this training is bad. With several ranks let all of them decide together: see docs/rollback.md.
"""

import argparse

import torch

from lazysnap import SnapshotEngine

MOST_ROLLBACKS = 3
"""In a row: more of them mean that the learning rate or the data are wrong, and skipping batches does not help."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dirpath", default="runs/rollback_on_nan")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randn(40, 16, 8)
    batches[20] *= float("nan")
    rollbacks = 0

    with SnapshotEngine(args.dirpath, {"model": model, "optimizer": optimizer}) as engine:
        for batch in batches:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if torch.isfinite(loss):
                engine.boundary()
                rollbacks = 0
                continue
            rollbacks += 1
            if rollbacks > MOST_ROLLBACKS:
                raise RuntimeError(f"the loss is {loss.item()} after {MOST_ROLLBACKS} rollbacks in a row")
            back = engine.rollback(reason=f"the loss is {loss.item()}")
            print(f"went back from step {back.from_step} to step {back.step}")
    print(f"step {engine.step}, weights are finite: {bool(model.weight.isfinite().all())}")


if __name__ == "__main__":
    main()
