"""Tiny trainings that record everything, and an engine that keeps every snapshot in a list."""

import copy
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from support.bits import digest, rng_digest
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lazysnap import LazySnapshotCallback
from lazysnap.engine.statistics import Statistics
from lazysnap.integrations.arguments import place_beside
from lazysnap.integrations.session import Session
from lazysnap.restore.snapshot import Snapshot
from lazysnap.state.codec import decode
from lazysnap.state.walk import walk

BATCHES = 6
BATCH_SIZE = 4
SIZE = BATCHES * BATCH_SIZE


def _augment(x: torch.Tensor) -> torch.Tensor:
    return x + 0.01 * torch.randn(3) + 0.01 * random.random() + 0.01 * float(np.random.rand())


class Numbers(Dataset):
    """Samples that know their number, with random noise of all three kinds."""

    def __init__(self, size: int, *, noisy: bool = True) -> None:
        self.size, self.noisy = size, noisy
        self.data = torch.randn(size, 3, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, _augment(self.data[index]) if self.noisy else self.data[index]


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, size: int) -> None:
        self.numbers = Numbers(size)

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        step, start = (1, 0) if info is None else (info.num_workers, info.id)
        for index in range(start, self.numbers.size, step):
            yield self.numbers[index]


class Net(pl.LightningModule):
    """Batch norm, dropout, a metric object, values logged in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.average = torchmetrics.MeanMetric()
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.layers(batch[1]).squeeze(-1) - batch[1].sum(-1)).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.hidden += 1
        self.average(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss.detach() * self.hidden[0], on_step=False, on_epoch=True, reduce_fx="max")
        self.log("average", self.average, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + random.random() * 0.001)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class PlateauNet(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class OneCycleNet(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        total = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class ManualNet(Net):
    """Two optimizers, the second every other batch; steps are the program's."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.layers[:2].parameters(), lr=1e-2)
        second = torch.optim.SGD(self.layers[2:].parameters(), lr=1e-2, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 2)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
        self.lr_schedulers().step()


class Memory(Logger):
    """Keeps what is logged in the trace."""

    def __init__(self, trace: list[Any]) -> None:
        super().__init__()
        self.trace = trace

    name = "memory"
    version = "0"

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        if any(name.startswith("lazysnap/") for name in metrics):
            return  # of how long things took
        self.trace.append(("logged", step, repr(sorted(metrics.items()))))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Recorder(pl.Callback):
    """Everything that happens from the first batch on, bit for bit."""

    def __init__(self) -> None:
        self.trace: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def _rates(self, trainer: Any) -> list[float]:
        return [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.trace.append(("epoch start", trainer.current_epoch, rng_digest()))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.trace.append(("batch", trainer.current_epoch, batch_idx, trainer.global_step, digest(batch), rng_digest()))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = [module.state_dict(), module.hidden, [o.state_dict() for o in trainer.optimizers]]
        self.trace.append(("trained", batch[0].tolist(), digest(state), repr(outputs), self._rates(trainer)))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.trace.append(("validation start", trainer.global_step, rng_digest()))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *rest: Any) -> None:
        self.trace.append(("validated", digest(batch), digest(module.state_dict())))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.trace.append(("validation end", trainer.global_step, repr(trainer.callback_metrics)))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.trace.append(("epoch end", trainer.current_epoch, repr(trainer.callback_metrics), self._rates(trainer)))


@dataclass
class Kept:
    step: int
    text: str
    tensors: dict[str, torch.Tensor]
    trace_length: int


class ListEngine:
    """The engine's calls, over a list: what is collected passes through the encoding and is copied."""

    def __init__(self, config: Any, state: Any, kept: list[Kept], trace: list[Any]) -> None:
        self._config, self.state, self.kept, self.trace = config, state, kept, trace
        self.choice: Kept | None = None
        self.ended = ""
        self._run = self._boundaries = self._preemption = self
        self.listens = True

    def boundary(self, step: int, **_: Any) -> bool:
        if self.kept and self.kept[-1].step == step:
            return False  # a step is captured once
        before = rng_digest()
        walked = walk(self.state.collect())
        assert rng_digest() == before, "collecting must not draw random numbers"
        tensors = {name: tensor.detach().clone() for name, tensor in zip(walked.names, walked.tensors, strict=True)}
        self.kept.append(Kept(step, json.dumps(walked.skeleton, allow_nan=False), tensors, len(self.trace)))
        return True

    def _last_boundary(self, step: int) -> bool:
        return self.boundary(step, force=True)

    def _fetch(self, which: str = "latest") -> Snapshot | None:
        if self.choice is None:
            return None
        for name, tensor in self.state.expected().items():
            assert self.choice.tensors[name].shape == tensor.shape
        copies = {name: tensor.clone() for name, tensor in self.choice.tensors.items()}
        state = decode(json.loads(self.choice.text), tensor=copies.__getitem__)
        return Snapshot(state, self.choice.step, "0" * 16, 1, "list", 0.0)

    def _load(self, snapshot: Snapshot, **_: Any) -> None:
        self.state.load(snapshot.state)

    def tell_start(self, line: str | None = None) -> None:
        pass

    def rename(self, run_id: str) -> None:
        pass

    def statistics(self) -> Statistics:
        return Statistics()

    def _together(self, what: str, work: Any) -> None:
        work()

    def check_memory(self) -> None:
        pass

    def _prepare(self) -> None:
        pass

    def gate(self) -> None:
        pass

    def close(self, **_: Any) -> bool:
        self.ended = "closed"
        return True

    def abandon(self, error: BaseException | None = None) -> None:
        self.ended = self.ended or "abandoned"


class ListCallback(LazySnapshotCallback):
    """The callback over ``ListEngine``."""

    def __init__(self, kept: list[Kept], trace: list[Any], choice: Kept | None = None) -> None:
        super().__init__()
        self.kept, self.trace, self.choice = kept, trace, choice
        self.engines: list[ListEngine] = []

    def _begin(self, state: Any, directory: object, **_: Any) -> Session:
        config = self._arguments.config_for(place_beside(directory))
        engine = ListEngine(config, state, self.kept, self.trace)
        engine.choice = self.choice
        self.engines.append(engine)
        self._session = Session(engine)  # type: ignore[arg-type]
        return self._session


class Case:
    """How one kind of training is built; subclasses change one thing."""

    module: type[Net] = Net
    cuts = slice(2, None, 3)
    """Of the captures: some within an epoch, and one at the end of an epoch."""
    dies_at = 8

    def settings(self) -> dict[str, Any]:
        return {"max_epochs": 2}

    def train_loader(self) -> Any:
        return DataLoader(Numbers(BATCHES * BATCH_SIZE), BATCH_SIZE, shuffle=True)

    def validation_loader(self) -> Any:
        return DataLoader(Numbers(8), 4, shuffle=True)

    def callbacks(self, directory: Path) -> list[Any]:
        return []


@dataclass
class Run:
    trace: list[Any]
    kept: list[Kept]
    final: dict[str, Any]


class Shuffled(Case):
    pass


class Accumulated(Case):
    cuts = slice(None)
    dies_at = 3

    def settings(self):
        return {"max_epochs": 2, "accumulate_grad_batches": 4, "val_check_interval": 2}


class Plateau(Case):
    module = PlateauNet

    def settings(self):
        return {"max_epochs": 3}


class OneCycle(Case):
    module = OneCycleNet


class Manual(Case):
    module = ManualNet


class Unsized(Case):
    def train_loader(self):
        return DataLoader(Stream(SIZE), BATCH_SIZE)


class Stateful(Case):
    def train_loader(self):
        return StatefulDataLoader(Numbers(SIZE), BATCH_SIZE, shuffle=True)


KINDS = (Shuffled, Accumulated, Plateau, OneCycle, Manual, Unsized, Stateful)
"""What every supported version of Lightning has: test_versions.py."""


class Dying(pl.Callback):
    """Waits until captures can begin, and ends the training at a step."""

    def __init__(self, lazy: LazySnapshotCallback, at_step: int) -> None:
        self.lazy, self.at_step = lazy, at_step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        assert self.lazy.engine._wait_ready(240)
        if trainer.global_step >= self.at_step:
            raise ZeroDivisionError


class Storing(pl.Callback):
    """Waits once, before the next step, until storage has the step that was captured last."""

    def __init__(self, at_step: int | None) -> None:
        self.at_step = at_step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at_step:
            self.at_step = None
            [lazy] = [one for one in trainer.callbacks if isinstance(one, LazySnapshotCallback)]
            assert lazy.engine.wait(timeout_s=240)


def run(case: Case, directory: Path, *, snapshots: bool = True, choice: Kept | None = None) -> Run:
    """One training over ``ListEngine``; from ``choice`` on if one is given, with generators that stand anywhere."""
    kept: list[Kept] = []
    recorder = Recorder()
    lazy = ListCallback(kept, recorder.trace, choice)
    return _run(case, directory, 1 if choice is None else 1000 + choice.step, recorder, [lazy] if snapshots else [])


def check_cuts(case: Case, directory: Path, choose: Callable[[list[Kept]], Iterable[Kept]] = list) -> Run:
    """Cut at the chosen captures, a training goes on as the one that was not cut, which is returned."""
    whole = run(case, directory)
    assert len(whole.kept) >= 3
    for kept in choose(whole.kept[:-1]):
        resumed = run(case, directory, choice=kept)
        assert resumed.trace == whole.trace[kept.trace_length :], f"cut after step {kept.step}"
        assert resumed.final == whole.final, f"cut after step {kept.step}"
    return whole


def next_batch_of_epoch(kept: Kept, trace: list[Any]) -> int:
    """Return the number, within its epoch, of the first batch after a capture."""
    for event, *facts in trace[kept.trace_length :]:
        if event == "batch":
            return facts[1]
    raise AssertionError(f"no batch follows step {kept.step}")


def check_exact(case: Case, directory: Path, cuts: slice | None = None) -> None:
    """The same at these cuts, by default those of the case; and snapshots change nothing."""
    chosen: list[Kept] = []

    def choose(kept: list[Kept]) -> list[Kept]:
        chosen.extend(kept[cuts or case.cuts])
        return chosen

    plain = run(case, directory, snapshots=False)
    whole = check_cuts(case, directory, choose)
    places = {next_batch_of_epoch(kept, whole.trace) == 0 for kept in chosen}
    assert places == {True, False}, "cuts must be at the end of an epoch and within one"
    assert whole.trace == plain.trace
    assert {**whole.final, "callbacks": None} == {**plain.final, "callbacks": None}


def run_real(case: Case, directory: Path, *, seed: int, die_at: int = 1 << 30) -> Run:
    """One training over the real engine."""
    lazy = LazySnapshotCallback(directory / "snapshots")
    return _run(case, directory, seed, Recorder(), [lazy, Dying(lazy, die_at)])


def _run(case: Case, directory: Path, seed: int, recorder: Recorder, first: list[Any]) -> Run:
    pl.seed_everything(seed, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=Memory(recorder.trace),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        log_every_n_steps=2,
        callbacks=[
            *first,
            recorder,
            ModelCheckpoint(directory / "ckpt", monitor="val_loss", save_top_k=2, enable_version_counter=False),
            EarlyStopping("val_loss", patience=50),
            *case.callbacks(directory),
        ],
        **case.settings(),
    )
    module = case.module()
    trainer.fit(module, case.train_loader(), case.validation_loader(), ckpt_path="latest" if first else None)
    callbacks = {item.state_key: copy.deepcopy(item.state_dict()) for item in trainer.callbacks}
    final = {
        "weights": digest(module.state_dict()),
        "hidden": digest(module.hidden),
        "optimizers": [digest(item.state_dict()) for item in trainer.optimizers],
        "schedulers": [repr(item.scheduler.state_dict()) for item in trainer.lr_scheduler_configs],
        "callbacks": repr(callbacks),
        "averages": [
            digest(item._average_model.state_dict()) for item in trainer.callbacks if hasattr(item, "_average_model")
        ],
        "callback_metrics": repr(trainer.callback_metrics),
        "logged_metrics": repr(trainer.logged_metrics),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "loops": repr(trainer.fit_loop.state_dict()),
        "rng": rng_digest(),
    }
    return Run(recorder.trace, getattr(first[0], "kept", []) if first else [], final)
