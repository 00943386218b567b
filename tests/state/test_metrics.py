"""Metrics of torchmetrics keep what they accumulated, wherever they are in the state."""

import uuid

import pytest
import torch
import torchmetrics
from lightning.fabric import Fabric
from support.waiting import until

from lazysnap import LazySnapError, SnapshotConfig, SnapshotEngine
from lazysnap.config import MemoryLevel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        classes = {"num_classes": 3, "average": "macro"}
        accuracy = torchmetrics.classification.MulticlassAccuracy(**classes)
        precision = torchmetrics.classification.MulticlassPrecision(**classes)
        self.scores = torchmetrics.MetricCollection([accuracy, precision])


class Program:
    """A program that accumulates metrics in a module, and beside it."""

    def __init__(self, config, *, by_fabric):
        torch.manual_seed(0)
        self.net = Net()
        model = Fabric(accelerator="cpu", devices=1).setup(self.net) if by_fabric else self.net
        self.losses = torchmetrics.CatMetric()
        self.mean = torchmetrics.MeanMetric()
        self.engine = SnapshotEngine(config, {"model": model, "losses": self.losses, "mean": self.mean})

    def train(self, steps):
        for step in steps:
            outputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            self.net.scores.update(outputs.argmax(1), torch.tensor([0, 1, 2, 0]))
            self.losses.update(outputs.flatten())
            self.mean(outputs.sum())
            self.capture(step)

    def capture(self, step):
        until(lambda: self.engine.boundary(step))

    def values(self):
        return {
            "scores": {name: value.item() for name, value in self.net.scores.compute().items()},
            "losses": self.losses.compute().tolist(),
            "mean": self.mean.compute().item(),
            "updates": [self.mean.update_count, self.losses.update_count],
        }


@pytest.fixture
def config():
    return SnapshotConfig(job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=60))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .*compute.* method of metric")
@pytest.mark.parametrize("by_fabric", [False, True])
def test_after_a_restart_metrics_have_seen_the_batches_before_it(config, by_fabric):
    whole = Program(SnapshotConfig(job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=0)), by_fabric=by_fabric)
    whole.train(range(1, 7))
    whole.engine.close(drain=False)
    first = Program(config, by_fabric=by_fabric)
    first.train(range(1, 4))
    first.engine.wait(3, until="captured", timeout_s=60)
    first.engine.abandon()

    again = Program(config, by_fabric=by_fabric)
    try:
        assert again.engine.restore("latest").step == 3
        again.train(range(4, 7))
        assert again.values() == whole.values()
    finally:
        again.engine.close(drain=False)


@pytest.mark.slow
def test_a_metric_that_the_snapshot_lacks_is_named_before_anything_is_loaded(config):
    first = SnapshotEngine(config, {"model": torch.nn.Linear(1, 1)})
    assert first.boundary(1)
    first.wait(1, until="captured", timeout_s=60)
    first.abandon()
    model = torch.nn.Linear(1, 1)
    before = model.weight.detach().clone()
    model.mean = torchmetrics.MeanMetric()
    again = SnapshotEngine(config, {"model": model})
    try:
        with pytest.raises(LazySnapError, match=r"model\.mean: the snapshot has no state of this metric"):
            again.restore("latest")
        assert torch.equal(model.weight, before)
    finally:
        again.close(drain=False)
