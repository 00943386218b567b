"""A prepared training whose state has the parts of ``export --format accelerate``; and what must be equal."""

import random

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from lazysnap.state.wrappers import wrapper_prefix

BATCHES = 12


class Net(torch.nn.Module):
    """Tied weights, a buffer that changes in forward, a frozen base, a low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.base = torch.nn.Linear(6, 6).requires_grad_(False)
        self.low = torch.nn.Linear(6, 6).bfloat16()
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.base(self.norm(self.embedding(tokens)))
        return self.head(self.low(hidden.bfloat16()).float()).square().mean()


class Progress:
    """Something that a script registers."""

    def __init__(self) -> None:
        self.facts = {"tokens": 0, "best": float("inf"), "window": [np.float64(1.5)]}

    def state_dict(self) -> dict:
        return dict(self.facts)

    def load_state_dict(self, state: dict) -> None:
        self.facts = dict(state)


class Prepared:
    """Everything that a script prepares and registers."""

    def __init__(self, *, seed: int, stateful: bool = False) -> None:
        loading = DataLoaderConfiguration(use_stateful_dataloader=stateful)
        self.accelerator = Accelerator(cpu=True, dataloader_config=loading)
        torch.manual_seed(seed)
        model = Net()
        second = torch.nn.Linear(3, 2)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [{"params": trained[:2], "lr": 1e-2 * seed}, {"params": trained[2:], "weight_decay": 0.25}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        descent = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        loader = torch.utils.data.DataLoader(torch.arange(4 * BATCHES) % 11, batch_size=4, shuffle=True)
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        self.model, self.second, self.optimizer, self.descent, self.schedule, self.loader = self.accelerator.prepare(
            model, second, optimizer, descent, schedule, loader
        )
        self.facts: dict = {}
        self.mix(seed)

    def mix(self, seed: int) -> None:
        """Other numbers than anybody else has, of each library and rank."""
        seed = 10 * seed + self.accelerator.process_index
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        np.random.standard_normal()  # leaves half of a pair behind

    def objects(self) -> dict:
        """What the engine captures."""
        return {
            "model": self.model,
            "model_1": self.second,
            "optimizer": self.optimizer,
            "optimizer_1": self.descent,
            "scheduler": self.schedule,
            "custom_0": self.progress,
            "loader": {"iteration": 0},
            "accelerate": self.facts,
        }

    def train(self, steps: int) -> None:
        device_batches = iter(self.loader)
        for _ in range(steps):
            batch = next(device_batches)
            self.accelerator.backward(self.model(batch) + self.second(torch.randn(2, 3)).sum())
            for optimizer in (self.optimizer, self.descent):
                optimizer.step()
                optimizer.zero_grad()
            self.schedule.step()
            self.progress.facts["tokens"] += batch.numel()
            self.accelerator.step += 1
        self.note()

    def note(self, **facts) -> None:
        self.facts.clear()
        models = self.accelerator._models  # without the wrapper of DDP, in this version
        prefixes = {"model": wrapper_prefix(models[0]), "model_1": wrapper_prefix(models[1])}
        self.facts.update(iteration=0, step=self.accelerator.step, prefixes=prefixes, **facts)
        if getattr(self.loader, "use_stateful_dataloader", False):
            self.facts["stateful_loaders"] = {"loader": self.loader.state_dict()}

    def bits(self, *, draw: bool = True) -> dict:
        """All that must be equal, plain; ``draw``: the next random numbers among it, which draws them."""
        found = {
            "model": plain(self.model.state_dict()),
            "second": plain(self.second.state_dict()),
            "optimizer": plain(self.optimizer.state_dict()),
            "descent": plain(self.descent.state_dict()),
            "schedule": plain(self.schedule.state_dict()),
            "progress": plain(self.progress.facts),
            "step": self.accelerator.step,
        }
        if draw:
            found["next"] = [random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()]
        return found


def plain(value):
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return [str(value.dtype), list(value.shape), data.hex()]
    if isinstance(value, dict):
        return [[repr(key), plain(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return repr(value)
