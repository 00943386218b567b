"""A plain loop that stores every step with lazysnap and prints its loss. Its argument names what it does wrong.

``nothing``; ``prefetch`` (nanoGPT): a batch that no snapshot has; ``refused`` (alpaca-lora): a state whose load fails;
``anew``: no restart.
"""

import pathlib
import sys
import time

import torch

from lazysnap import SnapshotEngine

WRONG = sys.argv[1]
STEPS = 30


class Progress:
    """State whose load fails."""

    def state_dict(self):
        return {"seen": 1}

    def load_state_dict(self, state):
        raise KeyError("adapter weights")


def draw():
    return scale * torch.randn(8, 64)


torch.manual_seed(7)
scale = float(pathlib.Path("scale.txt").read_text())
model = torch.nn.Linear(64, 1)
weight = torch.nn.Parameter(torch.ones(64))
optimizer = torch.optim.AdamW([*model.parameters(), weight], lr=0.01)
state = {"model": model, "optimizer": optimizer, "weight": {"value": weight}}
if WRONG == "refused":
    state["progress"] = Progress()

with SnapshotEngine("lazysnap", state) as engine:
    if WRONG != "anew":
        engine.restore("latest")
    if WRONG == "prefetch":
        batch = draw()
    while engine.step < STEPS:
        began_s = time.perf_counter()
        if WRONG != "prefetch":
            batch = draw()
        loss = (model(batch * weight) - 1).square().mean()
        if WRONG == "prefetch":
            batch = draw()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.arange(200_000).flip(0).sort()  # the work of a step
        engine.boundary()
        if engine.step == 3:
            engine.wait(3, until="durable", timeout_s=60)
        print(f"step {engine.step} loss {loss.item():.6f} in {time.perf_counter() - began_s:.4f} s", flush=True)
torch.save(model.state_dict(), "model.pt")
