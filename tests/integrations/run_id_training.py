"""A training that writes down the ids of its run: ``run_id_training.py KIND PLACE HOW STEPS DIES_AT``.

``HOW``: ``latest`` to resume, ``fresh`` to begin a new training in the same place. At step ``DIES_AT``
(0: never) the process kills itself. It appends one line of JSON to PLACE/ids: the id that is known before the training,
``None`` where that kind knows none, and the id in the training.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import torch  # noqa: E402

import lazysnap  # noqa: E402


def note(place, before, during):
    with (place / "ids").open("a") as file:
        file.write(json.dumps([before, during]) + "\n")


def die_if_due(engine, step, dies_at):
    if dies_at and step == dies_at:
        assert engine.wait(until="captured", timeout_s=60), engine.statistics()
        os.kill(os.getpid(), signal.SIGKILL)


def dataset(steps):
    return torch.ones(steps, 4)


def loop(place, resumes, steps, dies_at):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = lazysnap.SnapshotEngine(place / "snapshots", {"model": model, "optimizer": optimizer})
    assert engine.run_id is None
    if resumes:
        engine.restore("latest")
    with engine:
        while engine.step < steps:
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.boundary()
            note(place, None, engine.run_id)
            die_if_due(engine, engine.step, dies_at)


def lightning(place, resumes, steps, dies_at):
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    class Dying(pl.Callback):
        def on_train_start(self, trainer, module):
            note(place, before, callback.run_id)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            # The boundary of a step comes just before the next batch.
            die_if_due(callback.engine, trainer.global_step, dies_at)

    callback = lazysnap.LazySnapshotCallback(place / "snapshots")
    before = callback.run_id
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback, Dying()],
    )
    loader = torch.utils.data.DataLoader(dataset(20))
    trainer.fit(Model(), loader, ckpt_path="latest" if resumes else None)


def accelerate(place, resumes, steps, dies_at):
    accelerator = lazysnap.LazyAccelerator(cpu=True, snapshots=place / "snapshots")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(dataset(20))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumes:
        accelerator.load_state("latest")
    else:
        accelerator.save_state()
    note(place, None, accelerator.run_id)
    for batch in loader:
        step = accelerator.engine.step
        die_if_due(accelerator.engine, step, dies_at)
        if step == steps:
            break
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def transformers(place, resumes, steps, dies_at):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, values):
            return {"loss": self.layer(values).sum()}

    class Dying(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            note(place, before, callback.run_id)

        def on_step_begin(self, args, state, control, **_):
            die_if_due(callback.engine, state.global_step, dies_at)

    arguments = TrainingArguments(
        str(place), max_steps=steps, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    data = [{"values": values} for values in dataset(20)]
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[Dying()])
    callback = lazysnap.LazyTrainerCallback(place / "snapshots")
    callback.attach(trainer)
    before = callback.run_id
    trainer.train(resume_from_checkpoint="latest" if resumes else None)


KINDS = {"loop": loop, "lightning": lightning, "accelerate": accelerate, "transformers": transformers}

if __name__ == "__main__":
    kind, place, how, steps, dies_at = sys.argv[1:]
    KINDS[kind](Path(place), how == "latest", int(steps), int(dies_at))
