"""What shards its state in ways of its own is refused, with one process as with several, before anything is trained."""

import lightning.pytorch as pl
import pytest
import torch
from harness import BATCH_SIZE, Net, Numbers
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader

from lazysnap import LazySnapshotCallback
from lazysnap.errors import ConfigError


class Stub:
    """What is asked of a trainer before it starts anything."""

    fast_dev_run = False

    def __init__(self, strategy, world_size):
        # Not made: some need packages that are not here, or devices.
        self.strategy, self.world_size = strategy.__new__(strategy), world_size


class OwnDeepSpeed(DeepSpeedStrategy):
    """A program's own."""


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        (SingleDeviceStrategy, 2),
        *((kind, size) for kind in (FSDPStrategy, DeepSpeedStrategy, OwnDeepSpeed) for size in (1, 2)),
    ],
)
def test_processes_that_share_their_state_in_other_ways_are_refused_before_anything_starts(strategy, world_size):
    message = f"{world_size} process(es)? of {strategy.__name__} are not supported.*ModelParallel"

    with pytest.raises(ConfigError, match=message):
        LazySnapshotCallback().setup(Stub(strategy, world_size), Net(), "fit")


def test_averaging_of_weights_is_refused_before_anything_starts():
    trainer = Stub(DDPStrategy, 2)
    trainer.strategy._model_averaging_period = 4

    with pytest.raises(ConfigError, match=r"DDPStrategy\(model_averaging_period=...\) is not supported: .*local SGD"):
        LazySnapshotCallback().setup(trainer, Net(), "fit")


class Zero(Net):
    def configure_optimizers(self):
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW)


class Cut(Net):
    def __init__(self):
        super().__init__()
        self.layer = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.parametrize(("model", "where"), [(Zero, "optimizer 0: Zero"), (Cut, r"module\.layer: FullySharded")])
def test_what_is_cut_inside_one_process_is_refused_before_anything_is_trained(tmp_path, group, model, where):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, callbacks=[LazySnapshotCallback()], **quiet
    )

    with pytest.raises(ConfigError, match=f"{where}.*cannot be captured.*FSDP2"):
        trainer.fit(model(), DataLoader(Numbers(24), BATCH_SIZE))

    assert not list(tmp_path.rglob("step-*"))
