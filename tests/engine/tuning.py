"""A small fine-tuning: a frozen base, low-rank adapters that are trained; with an engine."""

import torch

from lazysnap import SnapshotEngine


class LowRank(torch.nn.Module):
    """What LoRA does to a linear layer."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features) / 30)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, batch):
        return self.base(batch) + batch @ self.down.t() @ self.up.t()


class Tuning:
    """Deterministic; what one step does is in ``train``."""

    def __init__(self, config, width=512, layers=2, frozen=None):
        """``frozen``: a module without gradient whose weights the optimizer gets as well."""
        torch.manual_seed(0)
        self.width = width
        self.model = torch.nn.Sequential(
            *(LowRank(torch.nn.Linear(width, width)) for _ in range(layers)), torch.nn.BatchNorm1d(width)
        )
        objects = {"model": self.model}
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if frozen is not None:
            objects["frozen"] = frozen
            trained += frozen.parameters()
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.engine = SnapshotEngine(config, {**objects, "optimizer": self.optimizer})
        self.began = []

    def train(self):
        batch = torch.randn(4, self.width)
        (self.model(batch) - batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, first, last):
        for step in range(first, last + 1):
            self.train()
            self.began.append(self.engine.boundary(step))
        self.engine.gate()
