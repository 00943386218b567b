"""A training on the software device as its users write it: ``device_trainings.py DIRECTORY INTEGRATION DIES_AT SEED``.

It writes DIRECTORY/trace: where it resumed, one line for each step, and a digest of its end. SIGKILL ends it at turn
DIES_AT (0: never) of the device's scheduler, counted from the restore on. SEED draws the order of work on the device,
and all numbers until a restore puts the generators back. DIRECTORY/races gets what the checker reports.
"""

import json
import os
import sys
from pathlib import Path

os.environ["ACCELERATE_TORCH_DEVICE"] = "software:0"  # which is Accelerate's own way to name a device

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from support import accelerator
from support.bits import digest
from support.traced import Augmented, Progress, draws, network, seed_all
from support.watching import Watch
from torch.utils.data import DataLoader, Dataset

from lazysnap import (
    LazyAccelerator,
    LazySnapshotCallback,
    LazyTrainerCallback,
    MemoryLevel,
    ResumableLoader,
    SnapshotConfig,
    SnapshotEngine,
)

DEVICE = torch.device("software", 0)
BATCH, EPOCHS = 6, 2
CONFIG = SnapshotConfig(job_id=sys.argv[1], memory=MemoryLevel(linger_s=60), verify_restart=False)
TIMEOUT_S = 60


class Trace:
    """Written line by line, so that nothing is lost when the process is killed."""

    def __init__(self, directory: Path, dies_at: int, seed: int) -> None:
        self.file, self.races = (directory / "trace").open("a"), (directory / "races").open("a")
        self.directory, self.dies_at, self.seed = directory, dies_at, seed

    def add(self, **line) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def begin(self, engine: SnapshotEngine, step: int | None) -> None:
        """Note that the training goes on behind ``step``. From here on it may die."""
        self.add(resumed=step)
        assert engine._wait_ready(TIMEOUT_S)
        torch.accelerator.synchronize()
        accelerator.SOFTWARE.configure(seed=self.seed, dies_at=self.dies_at, report_to=self.races.fileno())

    def step(self, step: int, numbers: torch.Tensor, loss: torch.Tensor) -> None:
        self.add(step=step, ids=numbers.tolist(), loss=loss.item().hex())

    def end(self, *facts: object) -> None:
        (self.directory / "turns").write_text(str(accelerator.SOFTWARE.counters()["turns"]))
        self.add(end=digest([*facts, draws(), torch.software.get_rng_state()]))


def loss_of(model: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
    return (model(values) - values + 0.1 * torch.randn_like(values)).square().mean()


def plain(trace: Trace) -> None:
    model = network().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    loader, progress = ResumableLoader(DataLoader(Augmented(), BATCH, shuffle=True)), {"epoch": 0}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "progress": progress}
    with SnapshotEngine(CONFIG, state) as engine:
        found = engine.restore("latest")
        trace.begin(engine, found and found.step)
        while progress["epoch"] < EPOCHS:
            for numbers, values in loader:
                loss = loss_of(model, values.to(DEVICE))
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                engine.boundary()
                trace.step(engine.step, numbers, loss)
            progress["epoch"] += 1
    trace.end(model.state_dict(), optimizer.state_dict()["state"], scheduler.last_epoch)


class Batches:
    """Whole batches with a position. One of them makes the loss NaN; the undisturbed run does not have that one."""

    is_data_position = True

    def __init__(self) -> None:
        never = Path(sys.argv[1]).name == "undisturbed"
        self.numbers = [number for number in range(12) if number != 5 or not never]
        self.at = 0

    def __iter__(self):
        while self.at < len(self.numbers):
            number = self.numbers[self.at]
            self.at += 1
            batch = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(number)).to(DEVICE)
            yield torch.tensor([number]), batch * float("nan") if number == 5 else batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def rollback(trace: Trace) -> None:
    """Train with one bad batch: the loop rolls back in place, and ends as one that never saw that batch."""
    model, data = network().to(DEVICE), Batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with SnapshotEngine(CONFIG, {"model": model, "optimizer": optimizer, "data": data}) as engine:
        found = engine.restore("latest")
        trace.begin(engine, found and found.step)
        step = found.step if found else 0
        watch = Watch(engine)
        for numbers, values in data:
            loss = loss_of(model, values)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch.see(loss):
                step = watch.last.step
                continue
            step += 1
            engine.boundary(step)
            trace.step(step, numbers, loss)
    trace.end(model.state_dict(), optimizer.state_dict()["state"])


class OnSoftwareDevice(Accelerator):
    """All that Lightning must know of the device."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index)

    def get_device_stats(self, device: torch.device) -> dict:
        return {}

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: int) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("software", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return accelerator.IS_THERE

    @staticmethod
    def name() -> str:
        return "software"


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Told(pl.Callback):
    def __init__(self, trace: Trace, lazy: LazySnapshotCallback) -> None:
        self.trace, self.lazy = trace, lazy

    def on_train_start(self, trainer, module):
        assert module.device == DEVICE
        self.trace.begin(self.lazy.engine, trainer.global_step or None)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.trace.step(trainer.global_step, batch[0], outputs["loss"])


def lightning(trace: Trace) -> None:
    module, lazy = Module(), LazySnapshotCallback(config=CONFIG)
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = pl.Trainer(
        accelerator=OnSoftwareDevice(),
        strategy=SingleDeviceStrategy(DEVICE),
        devices=1,
        max_epochs=EPOCHS,
        callbacks=[lazy, Told(trace, lazy)],
        default_root_dir=sys.argv[1],
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(module, DataLoader(Augmented(), BATCH, shuffle=True), ckpt_path="latest")
    trace.end(module.state_dict(), trainer.optimizers[0].state_dict()["state"])


def accelerated(trace: Trace) -> None:
    lazy = LazyAccelerator(snapshots=CONFIG, project_dir=sys.argv[1])
    model = network().to(lazy.device)  # before its optimizer: for such a device ``to`` makes new parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = lazy.prepare(model, optimizer, DataLoader(Augmented(), BATCH, shuffle=True))
    assert lazy.device == DEVICE
    progress = Progress(epoch=0, steps=0)
    lazy.register_for_checkpointing(progress)
    found = lazy.load_state("latest")
    trace.begin(lazy.engine, found and found.step)
    while progress["epoch"] < EPOCHS:
        for numbers, values in loader:
            loss = loss_of(model, values)
            lazy.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress["steps"] += 1
            trace.step(progress["steps"], numbers, loss)
        progress["epoch"] += 1
    lazy.end_training()
    trace.end(lazy.unwrap_model(model).state_dict(), optimizer.state_dict()["state"])


class Items(Dataset):
    def __len__(self):
        return len(Augmented())

    def __getitem__(self, index):
        number, values = Augmented()[index]
        return {"numbers": number, "values": values}


class Losing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, numbers, values):
        return {"loss": loss_of(self.net, values)}


class Recorded(transformers.Trainer):
    trace: Trace

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.trace.step(self.state.global_step + 1, inputs["numbers"], loss)
        return loss


class Begun(transformers.TrainerCallback):
    def __init__(self, trace: Trace, lazy: LazyTrainerCallback) -> None:
        self.trace, self.lazy = trace, lazy

    def on_train_begin(self, args, state, control, **_):
        self.trace.begin(self.lazy.engine, state.global_step or None)


def trainer(trace: Trace) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=f"{sys.argv[1]}/out",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    assert arguments.device == DEVICE
    lazy = LazyTrainerCallback(config=CONFIG)
    made = Recorded(Losing(), arguments, train_dataset=Items(), callbacks=[Begun(trace, lazy)])
    lazy.attach(made)
    made.trace = trace
    made.train(resume_from_checkpoint="latest")
    trace.end(made.model.state_dict(), made.optimizer.state_dict()["state"])


INTEGRATIONS = {function.__name__: function for function in (plain, rollback, lightning, accelerated, trainer)}


def main() -> None:
    directory, integration, dies_at, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    seed_all(seed)
    INTEGRATIONS[integration](Trace(directory, dies_at, seed))


if __name__ == "__main__":
    main()
