"""What Accelerate's own save_state and load_state lose in mid-epoch, and LazyAccelerator does not.

Reported there as #4195, #3996, #2823, #2574 (order), and #1601 (iteration). Each test shows both.
"""

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

from lazysnap import LazyAccelerator, MemoryLevel, PersistentLevel, SnapshotConfig

ITEMS, BATCH, EPOCHS = 24, 4, 3
PER_EPOCH = ITEMS // BATCH


class Stock:
    """As Accelerate's guide tells: a directory at every step, and skip_first_batches."""

    def __init__(self, directory):
        self.directory = directory
        self.accelerator = Accelerator(cpu=True)

    def save(self, step):
        self.accelerator.save_state(str(self.directory / f"step_{step}"))

    def load(self, step):
        self.accelerator.load_state(str(self.directory / f"step_{step}"))


class Lazy(Stock):
    def __init__(self, directory):
        self.directory = directory
        level = PersistentLevel(str(directory / "level"), every_n_steps=1)
        config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=30))
        project = ProjectConfiguration(project_dir=str(directory))
        self.accelerator = LazyAccelerator(cpu=True, project_config=project, snapshots=config)

    def save(self, step):
        assert self.accelerator.save_state() == step

    def load(self, step):
        assert self.accelerator.load_state("latest").step == step


def train(kind, directory, begins=0, ends=PER_EPOCH * EPOCHS, load=False):
    """The numbers of all batches, and a draw of the global generator in each step."""
    set_seed(7)
    door = kind(directory)
    accelerator = door.accelerator
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.arange(ITEMS, dtype=torch.float32).reshape(-1, 1), BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-4), loader)
    if load:
        door.load(begins)
    if kind is Lazy:
        assert accelerator.engine.wait_ready(60)
    step, seen = begins, []
    for epoch in range(begins // PER_EPOCH, EPOCHS):
        skip = load and epoch == begins // PER_EPOCH
        for batch in accelerator.skip_first_batches(loader, begins % PER_EPOCH) if skip else loader:
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            seen.append((batch.flatten().tolist(), torch.rand(()).item()))
            door.save(step)
            if step == ends:
                if kind is Lazy:
                    accelerator.engine.abandon()
                return seen
    accelerator.end_training()
    return seen


@pytest.mark.parametrize("cut", [2, PER_EPOCH, PER_EPOCH + 2, 2 * PER_EPOCH + 5])
def test_order_and_random_numbers_go_on_as_they_would_have(tmp_path, cut):
    whole = train(Stock, tmp_path / "whole")

    (tmp_path / "stock").mkdir()
    train(Stock, tmp_path / "stock", ends=cut)
    stock = train(Stock, tmp_path / "stock", begins=cut, load=True)
    if cut % PER_EPOCH:  # it draws an order anew from the generator that it restored
        assert [batch for batch, _ in stock] != [batch for batch, _ in whole[cut:]]
        assert [draw for _, draw in stock] != [draw for _, draw in whole[cut:]]

    assert train(Lazy, tmp_path / "lazy", ends=cut) == whole[:cut]
    assert train(Lazy, tmp_path / "lazy", begins=cut, load=True) == whole[cut:]
