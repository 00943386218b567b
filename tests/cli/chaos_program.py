"""A plain loop that stores every step with lazysnap and prints its loss. Its argument names what it does wrong.

``nothing``; state that no snapshot has: ``prefetch`` (nanoGPT), ``average`` (diffusers), ``metric`` (torchmetrics),
``generator`` (webdataset), ``accumulate`` (two optimizers), ``position``; ``replaced`` (TensoRF: a second optimizer in
place of the first), ``detached`` (a load that makes new tensors); ``refused`` (alpaca-lora); ``anew``.
"""

import pathlib
import random
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


class Weight:
    """A parameter that its load replaces."""

    def __init__(self):
        self.value = torch.nn.Parameter(torch.ones(64))

    def state_dict(self):
        return {"value": self.value.detach()}

    def load_state_dict(self, state):
        self.value = torch.nn.Parameter(state["value"].clone())


def draw():
    return scale * torch.randn(8, 64)


torch.manual_seed(7)
scale = float(pathlib.Path("scale.txt").read_text())
data = torch.randn(STEPS, 64)
order = iter(range(STEPS))
model = torch.nn.Linear(64, 1)
weight = Weight()
optimizer = torch.optim.AdamW([*model.parameters(), weight.value], lr=0.01)
average = model.weight.detach().clone()
waiting = torch.zeros_like(model.weight)
augment = random.Random(3)
seen = 0.0
state = {"model": model, "optimizer": optimizer, "weight": weight}
if WRONG == "refused":
    state["progress"] = Progress()
if WRONG != "detached":
    state["weight"] = {"value": weight.value}

with SnapshotEngine("lazysnap", state) as engine:
    if WRONG != "anew":
        engine.restore("latest")
    if WRONG == "prefetch":
        batch = draw()
    while engine.step < STEPS:
        began_s = time.perf_counter()
        if WRONG != "prefetch":
            batch = draw()
        if WRONG == "generator":
            batch = batch * augment.random()
        if WRONG == "position":
            batch = batch + data[next(order)]
        if WRONG == "replaced" and engine.step == 3:
            optimizer = torch.optim.AdamW([*model.parameters(), weight.value], lr=0.02)
        loss = (model(batch * weight.value) - 1).square().mean()
        if WRONG == "prefetch":
            batch = draw()
        loss.backward()
        if WRONG == "accumulate":
            waiting += model.weight.grad
            model.weight.grad = waiting.clone()
        optimizer.step()
        optimizer.zero_grad()
        average.lerp_(model.weight.detach(), 0.1)
        seen += loss.item()
        torch.arange(200_000).flip(0).sort()  # the work of a step
        engine.boundary()
        if engine.step == 3:
            engine.wait(3, until="durable", timeout_s=60)
        shown = {"average": average.norm().item(), "metric": seen}.get(WRONG, loss.item())
        print(f"step {engine.step} loss {shown:.6f} in {time.perf_counter() - began_s:.4f} s", flush=True)
torch.save(model.state_dict(), "model.pt")
