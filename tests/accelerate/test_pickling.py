"""What stock Accelerate can pickle, and frees at once, is pickled and freed with snapshots, too."""

import gc
import pickle
import weakref

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.state import GradientState

import lazysnap
from lazysnap import LazyAccelerator, MemoryLevel, PersistentLevel, SnapshotConfig


@pytest.fixture(autouse=True)
def no_loop_in_progress():
    """A loop that another test left has no end for Accelerate, and an accelerator cannot be pickled within a loop."""
    GradientState._reset_state()


def lazy(root):
    return LazyAccelerator(cpu=True, project_dir=str(root))


def attached(root):
    level = PersistentLevel(str(root / "level"))
    config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=5))
    return lazysnap.attach(Accelerator(cpu=True), config)


def prepared(accelerator):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.arange(16.0).reshape(8, 2), 2)
    return accelerator.prepare(model, optimizer, loader)


@pytest.mark.parametrize("make", [lazy, attached])
def test_an_accelerator_is_pickled_with_all_it_prepared_and_has_snapshots_again(tmp_path, make):
    accelerator = make(tmp_path)
    prepared(accelerator)
    again = pickle.loads(pickle.dumps(accelerator))
    assert isinstance(again, Accelerator)
    assert type(again) is type(accelerator)
    assert again.statistics() is None
    [loader] = again._dataloaders
    model, optimizer = again._models[0], again._optimizers[0]
    for batch in loader:
        again.backward(model(batch).sum())
        optimizer.step()
    assert again.engine.step == 4
    assert again.statistics().began >= 1
    again.end_training()
    assert accelerator.statistics() is None


@pytest.mark.parametrize("make", [lazy, attached])
def test_a_prepared_loader_is_pickled_as_stock_ones_are(tmp_path, make):
    _, _, loader = prepared(make(tmp_path))
    assert len(list(loader)) == 4
    again = pickle.loads(pickle.dumps(loader))
    assert type(again) is DataLoaderShard
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]


def test_a_prepared_loader_is_freed_at_once_when_nobody_holds_it(tmp_path):
    accelerator = lazy(tmp_path)
    model, optimizer, loader = prepared(accelerator)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
    del batch
    freed = weakref.ref(loader)
    gc.disable()
    try:
        accelerator._dataloaders.clear()
        del loader
        assert freed() is None
    finally:
        gc.enable()
    other = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(4, 2), 2))
    for batch in other:
        accelerator.backward(model(batch).sum())
        optimizer.step()
    assert accelerator.engine.step == 6
    accelerator.end_training()
