"""A training that says on stdout where it is: ``preempted.py PROGRAM DIRECTORY PHASE STEP``.

At PHASE of STEP it stays: as a long step, evaluation or save would, until preemption ends it, or the test makes the
file ``go``; with a sign after STEP (``7+``) it goes on. ``boundary N`` is written when the boundary of step N is over.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import socket
import sys
import threading

import torch
import torch.distributed as dist

from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.engine import preemption, preemption_signals

PROGRAM, DIRECTORY, PHASE, AT = sys.argv[1:5]
STEPS, EVERY = 4000, 5
ROWS, EPOCHS = 64, STEPS // 8


def say(text):
    """Write a line at once: two ranks share the pipe, and ``print`` writes the end of a line apart."""
    os.write(1, f"{text}\n".encode())


def at(phase, step):
    say(f"{phase} {step}")
    if (phase, str(step)) == (PHASE, AT):
        if "LAZYSNAP_TEST_FILLS_PIPE" in os.environ:
            say("full")
            threading.Thread(target=fill_pipe, daemon=True).start()
        while not os.path.exists(os.path.join(DIRECTORY, "go")):
            sum(range(1000))


def fill_pipe():
    """Write until the reader's pipe is full; the last call does not return."""
    while True:
        os.write(1, b"-" * 4096)


def net():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


class State:
    """Asked for its state inside of each capture."""

    def state_dict(self):
        if STEP[0]:
            at("save_state", STEP[0])
        return {}

    def load_state_dict(self, state):
        pass


STEP = [0]


def make_ready(engine):
    """From here on every step is captured: none finds that its memory is still being made."""
    assert engine._wait_ready(60)


def config_of(url):
    """The settings that the test gives."""
    timeout_s = float(os.environ.get("LAZYSNAP_TEST_PREEMPTION_S", "25"))
    levels = [{"url": url, "every_n_steps": 1000}]
    if "LAZYSNAP_TEST_LEVELS" in os.environ:
        levels = json.loads(os.environ["LAZYSNAP_TEST_LEVELS"])
    for level in levels:
        level["url"] = level["url"].format(rank=os.environ.get("RANK", "0"))
    return SnapshotConfig(
        levels=tuple(PersistentLevel(**level) for level in levels),
        preemption_timeout_s=timeout_s,
        drain_timeout_s=5.0,
        verify_restart=False,
    )


@contextlib.contextmanager
def training(place):
    """An engine that is ready, and a function that trains a step. ``place``: its settings, or a URL."""
    model = net()
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters())
    engine = SnapshotEngine(place, {"model": model, "optimizer": optimizer, "state": State()})
    engine.restore("latest")
    with engine:
        make_ready(engine)
        yield engine, functools.partial(train, engine, wrapped, optimizer)


def train(engine, model, optimizer, step=None):
    """Train a step, and return its number: the next one if it is not given."""
    STEP[0] = step = engine.step + 1 if step is None else step
    at("step", step)
    if dist.is_initialized() and dist.get_rank() == 0:
        at("collective", step)  # the others wait in theirs
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.boundary(step)
    say(f"boundary {step}")
    return step


def plain(url):
    with training(config_of(url)) as (engine, train_step):
        at("before", 0)
        while engine.step < STEPS:
            step = train_step()
            if step % EVERY == 0:
                at("evaluation", step)


def beginning_again(url):
    """A program that counts its steps from one at each start, whatever it resumed."""
    with training(config_of(url)) as (_, train_step):
        for step in itertools.count(1):
            train_step(step)


def handling(url, *, is_for_one_time=False):
    """A program that handles the signal itself."""
    seen = []

    def handle(number, frame):
        seen.append(number)
        if is_for_one_time:
            signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)
    with training(url) as (_, train_step):
        while not seen:
            train_step()
    say(f"handled {seen[0]} {'once' if len(seen) == 1 else len(seen)}")
    sys.exit(5)


def handling_once(url):
    """A program whose handler puts the default back: a second signal ends it."""
    handling(url, is_for_one_time=True)


def printing(url):
    """A program that says something on SIGUSR1, and has no handler of SIGTERM."""
    signal.signal(signal.SIGUSR1, lambda number, frame: say("asked for figures"))
    plain(url)


def hanging(url):
    """A program that hangs while it cleans up behind its last step."""
    with training(config_of(url)) as (_, train_step):
        try:
            while True:
                train_step()
        finally:
            say("cleaning up")
            threading.Event().wait()


def forking(url):
    """A program whose forked child is ended by SIGTERM."""
    with training(url) as (_, train_step):
        while True:
            step = train_step()
            if step == 3:
                if not (child := os.fork()):
                    signal.pause()
                os.kill(child, signal.SIGTERM)
                say(f"child ended by {os.waitpid(child, 0)[1]}")


def left_open(url):
    """A training beside the engine of an earlier one, which nobody closed."""
    earlier = SnapshotEngine(SnapshotConfig(job_id=f"{os.environ['LAZYSNAP_JOB_ID']}-1"), {"model": net()})
    earlier.boundary(1)
    with training(url) as (_, train_step):
        while True:
            train_step()


def waking(url):
    """A program with a wake-up descriptor of its own, as one in a loop of asyncio."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    try:
        with training(url) as (_, train_step):
            while True:
                train_step()
    finally:
        kept = signal.set_wakeup_fd(-1) == writer
        say(f"woken by {os.read(reader, 1)[0]}, descriptor {'kept' if kept else 'lost'}")


def closing(url):
    """A training that is closed while its level does not answer."""
    with training(config_of(url)) as (_, train_step):
        train_step()
        say("closing 0")


class SignalAtLine:
    """Counts the lines that preemption executes on this thread, and raises SIGTERM before one of them."""

    FILES = (preemption.__file__, preemption_signals.__file__)

    def __init__(self, number):
        """``number``: of the line; 0: no signal is raised."""
        self.num_lines = 0
        self._number = number

    def trace(self, frame, event, argument):
        if frame.f_code.co_filename not in self.FILES:
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._number:
                signal.raise_signal(signal.SIGTERM)
        return self.trace


def ending(url):
    """A training that ends as PHASE says, ``close`` or ``abandon``; a signal comes before line STEP of preemption."""
    signal_at_line = SignalAtLine(int(AT))
    with training(config_of(url)) as (engine, train_step):
        train_step()
        sys.settrace(signal_at_line.trace)
        getattr(engine, PHASE)()
        sys.settrace(None)
    say(f"lines {signal_at_line.num_lines}")


def twice(url):
    """Two trainings, one after the other; then the default action."""
    for number in range(2):
        before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
        with training(f"{url}{number}") as (_, train_step):
            train_step()
        after = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
        say(f"handlers {'as before' if before == after else after}")
    signal.raise_signal(signal.SIGTERM)


def lightning(url):
    import lightning.pytorch as pl

    from lazysnap import LazySnapshotCallback

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            at("step", self.trainer.global_step + 1)
            return self.net(batch[0]).pow(2).mean()

        def validation_step(self, batch, index):
            at("evaluation", self.trainer.global_step)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    class Says(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            say(f"boundary {trainer.global_step}")

        def on_train_start(self, trainer, module):
            make_ready(lazy.engine)
            at("before", 0)

        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["said_at"] = trainer.global_step  # a slow hook that gives the same twice is not called each time
            if trainer.global_step:
                at("save_state", trainer.global_step)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(ROWS, 8)), batch_size=8)
    lazy = LazySnapshotCallback(url)
    trainer = pl.Trainer(
        max_steps=STEPS, default_root_dir=DIRECTORY, callbacks=[Says(), lazy], accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        val_check_interval=EVERY, check_val_every_n_epoch=None, num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(Model(), loader, loader, ckpt_path="latest")


def accelerate(url):
    from lazysnap.integrations.accelerate import LazyAccelerator

    accelerator = LazyAccelerator(cpu=True, snapshots=url)
    model = net()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(ROWS, 8)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    accelerator.register_for_checkpointing(State())
    accelerator.load_state("latest")
    make_ready(accelerator.engine)
    at("before", 0)
    step = 0
    for _ in range(EPOCHS):
        for [batch] in loader:
            STEP[0] = step = step + 1
            at("step", step)
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state()
            say(f"boundary {step}")
            if step % EVERY == 0:
                at("evaluation", step)


def transformers(url):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from lazysnap import LazyTrainerCallback

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x=None, labels=None):
            return {"loss": (self.net(x) - labels).pow(2).mean()}

    class Says(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            make_ready(lazy.engine)
            at("before", 0)

        def on_step_begin(self, args, state, control, **_):
            say(f"boundary {state.global_step}")
            at("step", state.global_step + 1)

        def on_prediction_step(self, args, state, control, **_):
            at("evaluation", state.global_step)

    rows = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(ROWS)]
    arguments = TrainingArguments(
        output_dir=DIRECTORY, max_steps=STEPS, per_device_train_batch_size=8, eval_strategy="steps", eval_steps=EVERY,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[Says()])
    lazy = LazyTrainerCallback(url)
    lazy.attach(trainer)
    trainer.train(resume_from_checkpoint="latest")


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        if "LAZYSNAP_TEST_NODES" in os.environ:
            socket.gethostname = lambda: f"node-{os.environ['RANK']}"
        dist.init_process_group("gloo")
        say(f"rank {dist.get_rank()} {os.getpid()}")
    globals()[PROGRAM](str(pathlib.Path(DIRECTORY) / "snapshots"))
    say("over")
