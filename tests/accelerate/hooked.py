"""Small Accelerate scripts in one process: ``hooked.py WAY DIRECTORY``."""

import gc
import sys

import torch
from accelerate.utils import find_executable_batch_size

from lazysnap import LazyAccelerator


class Progress:
    def __init__(self):
        self.epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def prepared(accelerator, batch_size=4):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=batch_size, shuffle=True)
    return accelerator.prepare(model, optimizer, loader)


def train(accelerator, model, optimizer, loader):
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def hooks(directory):
    """State that only hooks save is named."""
    accelerator = LazyAccelerator(cpu=True, project_dir=directory)

    def save_average(models, weights, place):
        raise AssertionError("snapshots do not run it")

    accelerator.register_save_state_pre_hook(save_average)
    parts = prepared(accelerator)
    train(accelerator, *parts)
    accelerator.end_training()


def batch_size(directory):
    """An attempt that runs out of memory is followed by another one in the same process."""
    accelerator = LazyAccelerator(cpu=True, project_dir=directory)
    sizes = []

    @find_executable_batch_size(starting_batch_size=16)
    def attempt(batch_size):
        accelerator.free_memory()
        model, optimizer, loader = prepared(accelerator, batch_size)
        progress = Progress()
        accelerator.register_for_checkpointing(progress)
        assert accelerator.load_state("latest") is None
        sizes.append(batch_size)
        train(accelerator, model, optimizer, loader)
        if batch_size == 16:
            raise RuntimeError("CUDA out of memory.")
        assert "custom_1" not in accelerator._lazysnap_integration._state._named()

    attempt()
    assert len(sizes) == 2
    accelerator.end_training()


def notebook(directory):
    """An error of an earlier cell does not end a later training."""
    sys.last_value = ZeroDivisionError("of an earlier cell")
    accelerator = LazyAccelerator(cpu=True, project_dir=directory)
    parts = prepared(accelerator)
    train(accelerator, *parts)
    del parts, accelerator
    gc.collect()


if __name__ == "__main__":
    {"hooks": hooks, "batch_size": batch_size, "notebook": notebook}[sys.argv[1]](sys.argv[2])
