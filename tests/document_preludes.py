"""What the pages of the documentation take for granted: the reader's own model, data and loop.

As a program it runs one block of a page in the directory that is named: ``document_preludes.py DIRECTORY KEY``. Before
the block it runs the prelude of that block up to its ``yield``, which gives the block names of the reader's own: what a
block needs of a package, it imports. The rest of the prelude runs after the block, and uses what the block made.
"""

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from support.documents import all_blocks
from support.waiting import until

import lazysnap

NAN_AT = 5
"""The batch whose loss is not a number, in the preludes for going back."""


class Progress:
    """An object with a counter of epochs."""

    epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def loss_of(model, batch):
    return model(batch).square().mean()


def nothing():
    """No names at all."""
    yield {}


def plain(batches=10):
    """A plain loop: model, optimizer, dataset, loader."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    names = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "dataset": torch.randn(16 * batches, 8),
    }
    names["loader"] = torch.utils.data.DataLoader(names["dataset"], batch_size=16, shuffle=True)

    def train(batch=names["dataset"][:16]):
        loss_of(names["model"], batch).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()

    names |= {"train": train, "loss_of": loss_of}
    yield names


def _model_and_data(nan_at=0, batches=10):
    import lightning as L

    class Model(L.LightningModule):
        seen = 0

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            self.seen += 1
            return loss_of(self.layer, batch) * (float("nan") if self.seen == nan_at else 1)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", loss_of(self.layer, batch))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    samples = torch.randn(16 * batches + 32, 8, generator=torch.Generator().manual_seed(1))

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return torch.utils.data.DataLoader(samples[32:], batch_size=16, shuffle=True)

        def val_dataloader(self):
            return torch.utils.data.DataLoader(samples[:32], batch_size=16)

    L.seed_everything(7, verbose=False)
    return {"model": Model(), "data": Data()}


def lightning(batches=10):
    """Lightning: a module and a data module."""
    yield _model_and_data(batches=batches)


def lightning_nan():
    """A block that ends with a trainer: one loss of its training is not a number."""
    import lightning as L

    import lazysnap

    class Ready(L.Callback):
        """Waits for memory: the step that is gone back to is the last one then, however busy the machine is."""

        def on_train_batch_start(self, trainer, *_):
            [lazy] = (one for one in trainer.callbacks if isinstance(one, lazysnap.LazySnapshotCallback))
            assert lazy.engine._wait_ready(240)

    names = {}
    yield names
    trainer = names["trainer"]
    trainer.callbacks.append(Ready())
    trainer.fit_loop.max_epochs = 1
    trainer.fit(**_named(_model_and_data(nan_at=NAN_AT)))
    assert trainer.global_step == 9, trainer.global_step


def _named(names):
    return {"model": names["model"], "datamodule": names["data"]}


def accelerate(batches=10):
    """Accelerate: what a plain loop has, a schedule and an object that counts epochs."""
    names = next(plain(batches))
    scheduler = torch.optim.lr_scheduler.LinearLR(names["optimizer"], total_iters=100)

    def train(batch):
        names["accelerator"].backward(loss_of(names["model"], batch))
        names["optimizer"].step()
        names["scheduler"].step()
        names["optimizer"].zero_grad()

    names |= {"scheduler": scheduler, "progress": Progress(), "train": train}
    names["resume"] = Path("runs/a/step-500").exists()
    yield names


def accelerate_framework():
    """A framework that made an accelerator; it trains after the block."""
    from accelerate import Accelerator

    names = next(plain(batches=40))
    accelerator = Accelerator(project_dir="runs/a")
    model, optimizer, loader = accelerator.prepare(names["model"], names["optimizer"], names["loader"])
    yield {"framework": SimpleNamespace(accelerator=accelerator)}
    _accelerated_epoch(accelerator, model, optimizer, loader)


def accelerate_nan():
    """A block that ends with an accelerator: one loss of its training is not a number."""
    names = next(plain())
    yield names
    parts = names["accelerator"].prepare(names["model"], names["optimizer"], names["loader"])
    _accelerated_epoch(names["accelerator"], *parts, nan_at=NAN_AT, backward=names["backward"])
    assert all(parameter.isfinite().all() for parameter in parts[0].parameters())


def _accelerated_epoch(accelerator, model, optimizer, loader, nan_at=0, backward=None):
    for number, batch in enumerate(loader, start=1):
        (backward or accelerator.backward)(loss_of(model, batch) * (float("nan") if number == nan_at else 1))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def transformers():
    """The Trainer of Transformers: a tiny GPT-2 and texts of one line."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    size = {"vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 1}
    ids = torch.randint(0, 50, (160, 8))
    dataset = [{"input_ids": row, "labels": row} for row in ids]
    yield {"model": GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **size)), "dataset": dataset}


def transformers_stopped():
    """The same, where a training wrote a checkpoint before."""
    from transformers import Trainer, TrainingArguments

    names = next(transformers())
    arguments = TrainingArguments("runs/a", save_strategy="steps", save_steps=5, max_steps=5)
    Trainer(names["model"], arguments, train_dataset=names["dataset"]).train()
    yield names


def dcp():
    """Where torch.distributed.checkpoint has written a step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    names = next(plain())
    names["train"]()
    model, optimizer = get_state_dict(names["model"], names["optimizer"])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id="runs/a/step-500")
    yield names
    names["future"].result()
    assert Path("runs/a/step-1000/.metadata").exists()


def pretrained():
    """Where another tool wrote weights."""
    names = next(plain())
    weights = {name: torch.full_like(value, 0.5) for name, value in names["model"].state_dict().items()}
    torch.save(weights, "pretrained.pt")
    yield names
    assert all(bool((parameter == 0.5).all()) for parameter in names["model"].parameters())


def rollback_loop():
    """A plain loop under an engine; one loss is not a number."""
    from lazysnap import ResumableLoader, SnapshotEngine

    names = next(plain())
    seen = []

    def train_on(batch):
        seen.append(batch)
        loss = loss_of(names["model"], batch) * (float("nan") if len(seen) == NAN_AT else 1)
        loss.backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
        return loss.detach()

    names["loader"] = ResumableLoader(names["loader"])
    state = {name: names[name] for name in ("model", "optimizer", "loader")}
    with SnapshotEngine("runs/a", state) as engine:
        names |= {"engine": engine, "train_on": train_on, "torch": torch}
        assert engine._wait_ready(240)  # else the step that is gone back to may be an earlier one
        yield names
        assert (engine.step, len(seen)) == (9, 10), engine.step


def trained(url="runs/lazysnap", kind=plain):
    """A run whose snapshots are there, of ten steps."""
    from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine

    names = next(kind())
    if "optimizer" not in names:
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    config = SnapshotConfig(levels=(PersistentLevel(url, every_n_steps=5),))
    with SnapshotEngine(config, {"model": names["model"], "optimizer": names["optimizer"]}) as engine:
        for _ in range(10):
            for parameter in names["model"].parameters():
                parameter.grad = torch.ones_like(parameter)
            names["optimizer"].step()
            engine.boundary()
        engine.wait(until="durable", timeout_s=60)
    yield names


def trained_transformer():
    """A run of a model of Transformers."""
    yield next(trained(kind=transformers))
    assert {path.name for path in Path("model").iterdir()} >= {"config.json", "model.safetensors"}


def exported(to):
    """The same run, exported."""
    import lazysnap

    names = next(trained())
    lazysnap.export("runs/lazysnap", to, which="latest")
    yield names


def on_s3():
    """A run whose first level is a bucket, and whose keeper has written what happened."""
    from lazysnap import events

    names = next(trained("s3://bucket/run"))
    until(lambda: events.read("s3://bucket/run"))
    yield names
    assert names["event"] == names["file"].events[-1]


class Manager:
    """A stand-in for that of torchft, which commits each step."""

    step = 0

    def current_step(self):
        return self.step

    def state_dict(self):
        return {"step": self.step, "batches_committed": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def torchft():
    """A replica group of torchft, without the others."""
    names = next(plain())
    manager, step = Manager(), names["train"]

    def train():
        step()
        manager.step += 1

    names |= {"manager": manager, "group": 0, "train": train}
    yield names
    assert manager.step == names["engine"].step == 1_000


def lightning_wandb():
    """W&B without a server: each start has a directory of its own, which ends with the id of the run."""
    os.environ["WANDB_MODE"] = "offline"
    yield from lightning()
    ids = {directory.name.rpartition("-")[2] for directory in Path("wandb").glob("offline-run-*")}
    assert ids == {lazysnap.run_id("runs/a")}


def lightning_mlflow():
    """MLflow without a server."""
    os.environ |= {"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    yield from lightning()
    import mlflow

    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("a").experiment_id])
    assert run.info.run_name == lazysnap.run_id("runs/a")


def lightning_tensorboard():
    yield from lightning()
    assert [directory.name for directory in Path("logs/lightning_logs").iterdir()] == [lazysnap.run_id("runs/a")]


PRELUDES = {
    "README.md#start": lightning,
    "README.md#every-kind-of-training-loop": accelerate,
    "README.md#every-kind-of-training-loop-2": transformers,
    "cli.md#export": trained_transformer,
    "cli.md#safetensors": lambda: exported("model.safetensors"),
    "cli.md#dcp": lambda: exported("DIRECTORY/"),
    "coming-from.md#modelcheckpoint-of-lightning": lambda: lightning(batches=60),
    "coming-from.md#modelcheckpoint-of-lightning-2": lightning,
    "coming-from.md#save_state-of-accelerate": lambda: accelerate(batches=501),
    "coming-from.md#save_state-of-accelerate-2": accelerate,
    "coming-from.md#the-trainer-of-transformers-and-trl": transformers_stopped,
    "coming-from.md#the-trainer-of-transformers-and-trl-2": transformers,
    "coming-from.md#torchdistributedcheckpoint": dcp,
    "coming-from.md#torchdistributedcheckpoint-2": plain,
    "coming-from.md#torchft": torchft,
    "coming-from.md#weights-that-you-have": pretrained,
    "lightning.md#lightning": lightning,
    "accelerate.md#accelerate": accelerate,
    "accelerate.md#attach-an-existing-accelerator": accelerate_framework,
    "transformers.md#the-trainer-of-transformers": transformers,
    "plain-loop.md#fabric": plain,
    "plain-loop.md#plain-loops-and-fabric": plain,
    "format.md#events": on_s3,
    "index.md#lazysnap": lightning,
    "loggers.md#wb": lightning_wandb,
    "loggers.md#mlflow": lightning_mlflow,
    "loggers.md#tensorboard": lightning_tensorboard,
    "rollback.md#lightning": lightning_nan,
    "rollback.md#accelerate": accelerate_nan,
    "rollback.md#plain-loops": rollback_loop,
}
"""Of the blocks that do not run by themselves."""


def run(key):
    [block] = [block for block in all_blocks("python") if block.key == key]
    with contextlib.closing(PRELUDES.get(key, nothing)()) as prelude:
        names = next(prelude)
        names["__name__"] = "__main__"
        exec(compile(block.code, key, "exec"), names)
        next(prelude, None)


if __name__ == "__main__":
    sys.executable = os.environ.get("PYTHON_OF_RANKS", sys.executable)
    os.makedirs(sys.argv[1], exist_ok=True)
    os.chdir(sys.argv[1])
    run(sys.argv[2])
