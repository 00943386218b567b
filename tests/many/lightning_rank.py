"""One rank of a Lightning fit that resumes from "latest"; started as a process, or starting its ranks itself.

usage: lightning_rank.py SETTINGS_JSON    (strategy, world, rank, port, directory, place, die_at, epochs)

With ``rank`` it is one that torchrun would start, else Lightning's own launcher starts the others. ``place`` gets, for
each rank, ``trace.R`` (a line per batch: step, the samples' numbers, loss), ``log.R`` and at the end ``result.R``.
"""

import hashlib
import json
import logging
import os
import pathlib
import signal
import sys
import warnings

warnings.simplefilter("ignore")

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

from lazysnap import KeepBest, LazySnapshotCallback, MemoryLevel, PersistentLevel, SnapshotConfig  # noqa: E402

SAMPLES, BATCH = 48, 3


class Numbers(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.data = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.data[index]


class Net(pl.LightningModule):
    """A buffer that differs from rank to rank, dropout, a rate that changes."""

    def __init__(self, place: pathlib.Path, *, is_zero: bool) -> None:
        super().__init__()
        self.place, self.is_zero = place, is_zero
        self.first = torch.nn.Linear(5, 10)
        self.drop = torch.nn.Dropout(0.3)
        self.second = torch.nn.Linear(10, 1)
        self.register_buffer("seen", torch.zeros(5))

    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, ModelParallelStrategy) or isinstance(self.first.weight, DTensor):
            return
        across, within = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if within.size() > 1:
            parallelize_module(self, within, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        if across.size() > 1:
            for part in (self.first, self.second, self):
                fully_shard(part, mesh=across)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        numbers, values = batch
        self.seen += values.sum(0)
        guess = self.second(self.drop(torch.relu(self.first(values)))).squeeze(-1)
        loss = (guess - values.sum(-1)).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        with (self.place / f"trace.{self.global_rank}").open("a") as file:
            file.write(json.dumps([self.global_step, numbers.tolist(), float(loss)]) + "\n")
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.is_zero:
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class DieAt(pl.Callback):
    def __init__(self, deaths: dict[str, int]) -> None:
        self.deaths = deaths

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if self.deaths.get(str(trainer.global_rank)) == trainer.global_step:
            os.kill(os.getpid(), signal.SIGKILL)


class Ready(pl.Callback):
    """So few steps are over before there is memory to capture into, and again when the optimizer has its state."""

    def __init__(self, lazy: LazySnapshotCallback) -> None:
        self.lazy = lazy

    def on_train_batch_start(self, *_: object) -> None:
        assert self.lazy.engine._wait_ready(60)


class Ending(pl.Callback):
    """Writes down what a rank ended with, and where it logs."""

    def __init__(self, place: pathlib.Path) -> None:
        self.place = place

    def setup(self, trainer: pl.Trainer, pl_module: Net, stage: str) -> None:
        logger = logging.getLogger("lazysnap")
        logger.setLevel("INFO")
        logger.addHandler(logging.FileHandler(self.place / f"log.{trainer.global_rank}"))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Net) -> None:
        [optimizer] = trainer.optimizers
        state = optimizer.state_dict()
        tensors = {**pl_module.state_dict(), **{f"{n}.{k}": v for n, s in state["state"].items() for k, v in s.items()}}
        total = hashlib.sha256(json.dumps([state["param_groups"], trainer.global_step], default=str).encode())
        total.update(torch.get_rng_state().numpy().tobytes())
        for name, tensor in sorted(tensors.items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            total.update(name.encode() + whole.numpy().tobytes())
        (self.place / f"result.{trainer.global_rank}").write_text(total.hexdigest())


def make_strategy(name: str, world: int) -> object:
    within = {"fsdp2": 1, "tp": world, "fsdp2+tp": 2}
    if name in within:
        sizes = {"data_parallel_size": world // within[name], "tensor_parallel_size": within[name]}
        return ModelParallelStrategy(save_distributed_checkpoint=False, **sizes)
    if name in ("ddp", "zero"):
        return DDPStrategy(find_unused_parameters=True)
    return "auto" if world == 1 else name


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.executable = os.environ.get("LAZYSNAP_TEST_PYTHON", sys.executable)  # by which Lightning starts further ranks
    place, world = pathlib.Path(settings["place"]), settings["world"]
    if "rank" in settings:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": settings["port"], "TORCHELASTIC_RUN_ID": "test"}
        ranks = {"RANK": settings["rank"], "LOCAL_RANK": settings["rank"], "GROUP_RANK": 0}
        sizes = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in (meeting | ranks | sizes).items()})
    pl.seed_everything(7, verbose=False)
    config = SnapshotConfig(
        levels=tuple(PersistentLevel(url, every_n_steps=1, keep_last=2) for url in settings["levels"]),
        memory=MemoryLevel(linger_s=200),
        collective_timeout_s=20,
        verify_restart=False,
    )
    keep_best = KeepBest(settings["keep_best"]) if "keep_best" in settings else None
    lazy = LazySnapshotCallback(config=config, keep_best=keep_best)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=make_strategy(settings["strategy"], world),
        max_epochs=settings.get("epochs", 2),
        callbacks=[Ready(lazy), DieAt(settings.get("die_at", {})), Ending(place), lazy],
        default_root_dir=settings["directory"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(11 + int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))))
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    trainer.fit(Net(place, is_zero=settings["strategy"] == "zero"), loader, ckpt_path="latest")
    if settings.get("save"):
        trainer.save_checkpoint(place / "stock.ckpt")


if __name__ == "__main__":
    main()
