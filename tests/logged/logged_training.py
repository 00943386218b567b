"""A training that logs: ``logged_training.py FRAMEWORK DIRECTORY DIES_IN CHANGE``.

Every third step is captured. In step DIES_IN (0: in none) the program kills itself, ten steps are all. CHANGE: what
this start does otherwise than the others.
"""

import json
import os
import pathlib
import signal
import struct
import sys
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from support.waiting import until  # noqa: E402

import lazysnap  # noqa: E402
from lazysnap import SnapshotConfig  # noqa: E402

STEPS, EVERY, DIES_IN = 10, 3, 9
CAPTURED = 6


def data():
    torch.manual_seed(0)
    return [(one, one.sum(0, keepdim=True)) for one in torch.randn(STEPS * 2, 4)]


def rows_of(data):
    """The rows of a file of W&B: records in blocks of 32 KiB, as in LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, whole = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                yield {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}


def has_written():
    """True when W&B has written more steps than were captured: what it still buffers dies with the program."""
    (path,) = pathlib.Path("wandb").glob("offline-run-*/*.wandb")
    return sum("loss" in name for row in rows_of(path.read_bytes()) for name in row) > CAPTURED


def die_in(step, dies_in):
    """``step`` counts from 1."""
    if step == dies_in:
        until(has_written)
        os.kill(os.getpid(), signal.SIGKILL)


def lightning(directory, dies_in, change):
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

    class Module(pl.LightningModule):
        def __init__(self, rate):
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            die_in(self.trainer.global_step + 1, dies_in)
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    loggers = [  # where checkpoints are stored, the first one says, by the id of its run
        MLFlowLogger(tracking_uri=os.environ["MLFLOW_TRACKING_URI"]),
        CSVLogger(directory),
        TensorBoardLogger(directory, name="tb"),
        WandbLogger(save_dir=directory, offline=True),
    ]
    if change == "early":
        print("began", loggers[3].experiment.id)
    trainer = pl.Trainer(
        default_root_dir=directory,
        logger=loggers,
        callbacks=[lazysnap.LazySnapshotCallback(config=SnapshotConfig(every_n_steps=EVERY))],
        max_steps=STEPS,
        log_every_n_steps=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(data(), batch_size=2)
    trainer.fit(Module(2 if change == "rate" else 1), loader, ckpt_path="latest")


def accelerate(directory, dies_in, change):
    accelerator = lazysnap.LazyAccelerator(
        cpu=True,
        log_with=["tensorboard", "mlflow", "wandb"],
        project_dir=directory,
        snapshots=SnapshotConfig(every_n_steps=EVERY),
    )
    net = torch.nn.Linear(4, 1)
    parts = net, torch.optim.SGD(net.parameters(), lr=0.01), torch.utils.data.DataLoader(data(), batch_size=2)
    net, optimizer, loader = accelerator.prepare(*parts)

    def load():
        snapshot = accelerator.load_state("latest")
        return 0 if snapshot is None else snapshot.step

    step = load() if change == "first" else 0
    accelerator.init_trackers("project", {"rate": 1}, {"wandb": {"dir": directory}})
    if change == "held":
        accelerator.get_tracker("wandb", unwrap=True)
    step = step if change == "first" else load()
    assert accelerator.engine._wait_ready(60)  # ten steps may be over before there is memory for a second capture
    for inputs, targets in loader:
        step += 1
        die_in(step, dies_in)
        loss = (net(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
    accelerator.end_training()


def transformers(directory, dies_in, change):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def forward(self, x, y):
            return {"loss": (self.net(x) - y).square().mean()}

    class Dies(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            die_in(state.global_step + 1, dies_in)

    arguments = TrainingArguments(
        directory,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=0.02 if change == "rate" else 0.01,
        report_to=["tensorboard", "wandb", "mlflow"],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        label_names=["y"],
    )
    samples = [{"x": x, "y": y} for x, y in data()]
    trainer = Trainer(model=Net(), args=arguments, train_dataset=samples, callbacks=[Dies()])
    lazysnap.attach(trainer, SnapshotConfig(every_n_steps=EVERY))
    trainer.train(resume_from_checkpoint="latest")


if __name__ == "__main__":
    framework, directory, dies_in, change = sys.argv[1:]
    os.chdir(directory)
    globals()[framework](directory, int(dies_in), change)
    sys.modules["wandb"].finish()  # a forked program calls no handlers of the exit
