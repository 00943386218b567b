"""Objects that Accelerate prepared are captured, gated and restored as the ones inside them."""

import torch
from accelerate import Accelerator
from small_training import TIMEOUT_S

from lazysnap import SnapshotEngine


class Prepared:
    """A loop over a model, an optimizer and a schedule of Accelerate, with gradient accumulation."""

    def __init__(self, config):
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Linear(64, 6))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        assert type(self.optimizer) is not torch.optim.AdamW
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.engine = SnapshotEngine(config, parts)

    def run(self, first, last):
        for step in range(first, last + 1):
            for _ in range(2):
                with self.accelerator.accumulate(self.model):
                    batch = torch.randn(8, 6)
                    self.accelerator.backward((self.model(batch) - batch).square().mean())
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
            assert self.engine.boundary(step)

    def facts(self):
        moments = self.optimizer.state_dict()["state"]
        tensors = {**self.model.state_dict(), **{f"{n}.{k}": v for n, held in moments.items() for k, v in held.items()}}
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()} | {
            "rate": self.schedule.get_last_lr(),
            "next": torch.rand(3).tolist(),
        }


def test_an_optimizer_that_accelerate_prepared_is_gated_captured_and_restored(job):
    def start():
        training = Prepared(job.config())
        job.trainings.append(training)
        return training

    whole = start()
    assert whole.engine.wait_ready(TIMEOUT_S)
    whole.run(1, 9)
    wanted = whole.facts()
    statistics = whole.engine.statistics()
    assert (statistics.torn, statistics.failed) == (0, 0)
    assert whole.optimizer.optimizer._optimizer_step_pre_hooks, "the gate is on the inner optimizer"
    assert whole.engine.close(drain=False)

    first = start()
    assert first.engine.wait_ready(TIMEOUT_S)
    first.run(1, 5)
    job.crash(first)

    again = start()
    snapshot = again.engine.restore("latest")
    assert snapshot.step == 5
    assert again.engine.wait_ready(TIMEOUT_S)
    again.run(6, 9)
    assert again.facts() == wanted
