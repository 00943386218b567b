"""Objects that Fabric set up or Accelerate prepared are captured, gated and restored as the ones inside them."""

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from support.waiting import until

from lazysnap import SnapshotEngine
from lazysnap.state.objects import ObjectState
from lazysnap.state.wrappers import stepping, unwrapped

pytestmark = pytest.mark.slow


class SetUp:
    """A loop over a model, an optimizer and a schedule, by Fabric or without."""

    def __init__(self, config, *, by_fabric=True, compiled=False):
        torch.manual_seed(0)
        self.fabric = Fabric(accelerator="cpu", devices=1) if by_fabric else None
        self.inner = self.model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Linear(64, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        if compiled:
            self.model = torch.compile(self.model, backend="eager")
        if self.fabric is not None:
            self.model, self.optimizer = self.fabric.setup(self.model, self.optimizer)
            assert type(self.optimizer) is not torch.optim.AdamW
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.engine = SnapshotEngine(config, parts)

    def run(self, last):
        """Train up to that step."""
        while self.engine.step < last:
            batch = torch.randn(8, 6)
            loss = (self.model(batch) - batch).square().mean()
            loss.backward() if self.fabric is None else self.fabric.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            captured(self.engine)

    def facts(self):
        moments = self.optimizer.state_dict()["state"]
        tensors = {**self.inner.state_dict(), **{f"{n}.{k}": v for n, held in moments.items() for k, v in held.items()}}
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()} | {
            "rate": self.schedule.get_last_lr(),
            "next": torch.rand(3).tolist(),
        }


class Prepared(SetUp):
    """By Accelerate, with gradient accumulation."""

    def __init__(self, config):
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.inner = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Linear(64, 6))
        optimizer = torch.optim.AdamW(self.inner.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(self.inner, optimizer, schedule)
        assert type(self.optimizer) is not torch.optim.AdamW
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.engine = SnapshotEngine(config, parts)

    def run(self, last):
        while self.engine.step < last:
            for _ in range(2):
                with self.accelerator.accumulate(self.model):
                    batch = torch.randn(8, 6)
                    self.accelerator.backward((self.model(batch) - batch).square().mean())
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
            captured(self.engine)


def captured(engine):
    """One that is left out, because a level still reads the slot, is asked for again."""
    step = engine.step + 1
    until(lambda: engine.boundary(step))


@pytest.fixture
def start(job):
    def make(kind=SetUp, **settings):
        training = kind(job.config(), **settings)
        job.trainings.append(training)
        return training

    return make


@pytest.mark.parametrize(
    "how", [{}, {"compiled": True}, {"kind": Prepared}], ids=["Fabric", "Fabric, compiled", "Accelerate"]
)
def test_what_is_wrapped_is_gated_captured_and_restored(start, job, how):
    whole = start(**how)
    whole.run(9)
    wanted = whole.facts()
    statistics = whole.engine.statistics()
    assert (statistics.torn, statistics.failed) == (0, 0)
    assert whole.optimizer.optimizer._optimizer_step_pre_hooks, "the gate is on the inner optimizer"
    assert whole.engine.close(drain=False)

    first = start(**how)
    first.run(5)
    job.crash(first)

    again = start(**how)
    assert again.engine.restore("latest").step == 5
    again.run(9)
    assert again.facts() == wanted


def test_a_run_may_go_on_with_fabric_or_without(start, job):
    plain = start(by_fabric=False)
    plain.run(3)
    wanted = plain.facts()
    job.crash(plain)

    by_fabric = start()
    assert by_fabric.engine.restore("latest").step == 3
    assert by_fabric.facts() == wanted
    by_fabric.run(4)
    wanted = by_fabric.facts()
    job.crash(by_fabric)

    plain = start(by_fabric=False)
    assert plain.engine.restore("latest").step == 4
    assert plain.facts() == wanted


def test_names_are_those_of_the_inner_model_and_optimizer(start):
    training = start()
    source = ObjectState({"model": training.model, "optimizer": training.optimizer})

    assert unwrapped(training.model) is training.inner
    assert [stepping(training.optimizer)] == source.optimizers() == [training.optimizer.optimizer]
    assert set(source.parameter_names().values()) == set(dict(training.inner.named_parameters()))
    assert set(source.collect()["model"]) == set(training.inner.state_dict())
