"""Worker processes start before a restart has told them anything: the order of the data survives that."""

import pytest
import torch
from harness import BATCH_SIZE, BATCHES, Case, Numbers, run
from torch.utils.data import DataLoader, DistributedSampler

SIZE = BATCHES * BATCH_SIZE


class Persistent(Case):
    def train_loader(self):
        data = Numbers(SIZE, noisy=False)
        return DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=1, persistent_workers=True)


class PersistentValidation(Case):
    def validation_loader(self):
        return DataLoader(Numbers(8, noisy=False), 4, shuffle=True, num_workers=1, persistent_workers=True)


class EpochSampler(Case):
    def train_loader(self):
        data = Numbers(SIZE)
        return DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, 1, 0, seed=3), num_workers=1)


class OwnGeneratorWorkers(Case):
    def train_loader(self):
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Numbers(SIZE), BATCH_SIZE, shuffle=True, num_workers=1, generator=generator)

    def validation_loader(self):
        return DataLoader(Numbers(8), 4, shuffle=True, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    "kind", [Persistent, PersistentValidation, EpochSampler, OwnGeneratorWorkers], ids=lambda kind: kind.__name__
)
def test_workers_of_a_restarted_training_give_the_batches_of_an_uninterrupted_one(kind, tmp_path):
    whole = run(kind(), tmp_path)
    # In the first epoch, at the very start of the second one, and inside it.
    for kept in [item for item in whole.kept if item.step in (BATCHES - 1, BATCHES, BATCHES + 2)]:
        resumed = run(kind(), tmp_path, choice=kept)
        assert resumed.trace == whole.trace[kept.trace_length :], f"cut after step {kept.step}"
        assert resumed.final == whole.final, f"cut after step {kept.step}"
