"""The training that ``scoreboard`` strikes, with each method as its own documentation uses it.

    python -m benchmarks.rivals METHOD DIRECTORY [--steps 120] [--without]

It resumes by itself, prints its steps, and leaves ``result.pt``. If it is long enough, and did not resume, it prints a
line ``figures {json}``, too. ``--without`` is the same loop without snapshots. The model has dropout: a training that
goes on exactly needs its random generators, too.
"""

import argparse
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import SIZES
from benchmarks.scoreboard import EVERY, START
from benchmarks.training import Training
from benchmarks.workers import Line

JOB: Line = {"size": SIZES["small"], "device": "cpu", "dropout": 0.1}


class Clock:
    """Measures the time of the loop after its start, and the time for which snapshots block it."""

    def __init__(self, last: int, *, is_saving: bool) -> None:
        self.last, self.is_saving = last, is_saving
        self.counters: Callable[[], tuple[int, float]] = lambda: (self._calls, self._blocked_s)
        """Return the number of snapshots, and the seconds for which they blocked."""
        self._calls, self._blocked_s = 0, 0.0
        self._times_s: dict[int, float] = {}
        self._at_start, self._first_s = (0, 0.0), 0.0

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._blocked_s += time.perf_counter() - started

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            with self.blocked():
                answer = call(*args, **kwargs)
            self._calls += answer is not False  # a capture that lazysnap skipped
            self._first_s = self._first_s or self._blocked_s
            return answer

        return clocked

    def step(self, number: int) -> None:
        self._times_s[number] = time.perf_counter()
        if number == START:
            self._at_start = self.counters()
        print(f"step {number}", flush=True)

    def report(self, state_bytes: int) -> None:
        if 1 not in self._times_s or self.last not in self._times_s or self.last <= START:
            return  # it resumed, or is too short
        found: Line = {"state_mb": state_bytes / 1e6, "loop_s": self._times_s[self.last] - self._times_s[START]}
        count, blocked_s = (now - then for now, then in zip(self.counters(), self._at_start, strict=True))
        if count:
            found |= {"blocked_ms": 1e3 * blocked_s / count, "first_ms": 1e3 * self._first_s or None}
        print("figures", json.dumps(found), flush=True)


# ------------------------------------------------------------------------------------------------ plain loops


class TorchSave:
    """A draft and a rename: https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html."""

    every = EVERY

    def __init__(self, training: Training, directory: Path) -> None:
        self.training, self.directory = training, directory

    def state(self) -> Line:
        return {name: one.state_dict() for name, one in self.training.objects().items()}

    def load_state(self, state: Line) -> None:
        for name, one in self.training.objects().items():
            one.load_state_dict(state[name])

    def resume(self) -> int:
        path = self.directory / "checkpoint.pt"
        if not path.exists():
            return 0
        saved = torch.load(path)
        self.load_state(saved)
        return int(saved["step"])

    def save(self, step: int) -> bool | None:
        """Take a snapshot. Return False if this step was skipped."""
        draft = self.directory / "checkpoint.tmp"
        torch.save({**self.state(), "step": step}, draft)
        draft.rename(self.directory / "checkpoint.pt")
        return None

    def gate(self) -> None:
        """Until the weights may change."""

    def end(self) -> None:
        """Drain."""

    def newest(self, mark: str = ".") -> Path | None:
        """The newest directory of a step that has the file ``mark``; all but two go."""
        found = sorted(self.directory.glob("step_*"), key=lambda path: int(path.name[5:]))
        for path in found[:-3]:
            shutil.rmtree(path)
        return next((path for path in reversed(found) if (path / mark).exists()), None)


class DCPAsync(TorchSave):
    """https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html."""

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        import torch.distributed as dist

        torch.manual_seed(0)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.pending: Any = None

    def state(self) -> Line:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def resume(self) -> int:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        if (path := self.newest(".metadata")) is None:
            return 0
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        objects = (self.training.model, self.training.optimizer)
        set_state_dict(*objects, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(path.name[5:])

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.end()
        self.newest(".metadata")
        self.pending = dcp.async_save(self.state(), checkpoint_id=self.directory / f"step_{step}")

    def end(self) -> None:
        if self.pending is not None:
            self.pending.result()


class TorchCheckpointing(TorchSave):
    """Its tutorial, with what its troubleshooting page gives for hosts without a GPU.

    Without ``use_direct_io=False`` each save fails with EINVAL on ext4.
    """

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        save = AsyncCheckpointSaverConfig(staging_config=staging)
        place = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(save=save, storage_config=place))

    def resume(self) -> int:
        if (path := self.newest()) is None:
            return 0
        into = {"model": self.training.model.state_dict(), "optimizer": None, "step": 0}
        restored = self.manager.load(str(path), into=into)
        self.training.optimizer.load_state_dict(restored["optimizer"])
        return int(restored["step"])

    def save(self, step: int) -> None:
        self.newest()
        self.manager.save(str(self.directory / f"step_{step}"), {**self.state(), "step": step})

    def gate(self) -> None:
        with self.manager.lock():
            pass

    def end(self) -> None:
        self.manager.close()


class LMResiliency(TorchSave):
    """Its page on GEMINI, "Public Integration": the manager alone, without peers."""

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        from lm_resiliency import InMemoryCkptConfig
        from lm_resiliency.experimental import InMemoryCheckpointManager

        cadence = {"interval": EVERY, "disk_flush_interval": EVERY, "verify_integrity": True}
        place = {"disk_folder": str(directory), "run_id": "scoreboard"}
        self.manager = InMemoryCheckpointManager(InMemoryCkptConfig(**cadence, **place, pin_memory=False))

    def resume(self) -> int:
        if self.manager.find_latest() < 0 or (found := self.manager.load()) is None:
            return 0
        self.load_state(found[0])
        return int(found[1])

    def save(self, step: int) -> None:
        self.manager.save(self.state(), step)

    def gate(self) -> None:
        self.manager.maybe_wait()

    def end(self) -> None:
        self.manager.close()


class Lazysnap(TorchSave):
    """docs/doors.md; stored as often as the others save."""

    every = 1

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine

        config = SnapshotConfig(levels=(PersistentLevel(str(directory / "lazysnap"), every_n_steps=EVERY),))
        self.engine = SnapshotEngine(config, training.objects())

    def resume(self) -> int:
        self.engine.restore("latest")
        return int(self.engine.step)

    def save(self, step: int) -> bool:
        return bool(self.engine.boundary())

    def gate(self) -> None:
        self.engine.gate()

    def end(self) -> None:
        self.engine.close()


def plainly(kind: type[TorchSave], directory: Path, clock: Clock) -> None:
    training = Training(JOB)
    saver = kind(training, directory) if clock.is_saving else None
    step = saver.resume() if saver else 0
    while step < clock.last:
        training.backward(step)
        if saver:
            with clock.blocked():
                saver.gate()
        training.update()
        step += 1
        if saver and step % saver.every == 0:
            clock.around(saver.save)(step)
        clock.step(step)
    if saver:
        saver.end()
    finish(training, directory, clock)


def finish(training: Training, directory: Path, clock: Clock) -> None:
    clock.report(training.state_bytes())
    torch.save(training.model.state_dict(), directory / "result.pt")


# ------------------------------------------------------------------------------------------------ frameworks


def with_lightning(directory: Path, clock: Clock, *, is_ours: bool) -> None:
    """``ModelCheckpoint`` and ``ckpt_path="last"``; or the callback of lazysnap."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lazysnap import LazySnapshotCallback, PersistentLevel, SnapshotConfig

    class Steps(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            clock.step(trainer.global_step)

    tempfile.tempdir = str(directory / "drafts")  # Lightning's: on the disk that faults strike
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    training, path = Training(JOB), str(directory / "checkpoints")
    saver: list[Any]
    how: Line = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    resume: Line = {"ckpt_path": "latest"} if is_ours else {"ckpt_path": "last", "weights_only": False}
    how["enable_checkpointing"] = clock.is_saving and not is_ours
    if not clock.is_saving:
        saver, resume = [], {}
    elif is_ours:
        ours = LazySnapshotCallback(config=SnapshotConfig(levels=(PersistentLevel(path, every_n_steps=EVERY),)))
        saver, clock.counters = [ours], lambda: counted(ours.statistics())
    else:
        saver = [ModelCheckpoint(dirpath=path, every_n_train_steps=EVERY, save_last="link")]
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=clock.last, callbacks=[*saver, Steps()], **how)
    trainer.save_checkpoint = clock.around(trainer.save_checkpoint)
    training.fit(trainer, clock.last, **resume)
    finish(training, directory, clock)


def counted(own: Any) -> tuple[int, float]:
    """Return the number of captures, and the seconds for which they blocked, from the statistics of an engine."""
    return own.boundary.count, own.boundary.total_s + own.gate.total_s


def with_transformers(directory: Path, clock: Clock) -> None:
    """``resume_from_checkpoint`` with the newest checkpoint."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.step(state.global_step)

    training = Training(JOB)
    layers, heads, width, context, vocabulary = JOB["size"]
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": context, "vocab_size": vocabulary}
    training.model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    ids = [training.batch_of(step)[0, :context] for step in range(clock.last)]
    how = {"max_steps": clock.last, "per_device_train_batch_size": 1, "report_to": [], "disable_tqdm": True}
    how |= {"save_steps": EVERY, "save_total_limit": 2, "logging_strategy": "no", "use_cpu": True}
    how["save_strategy"] = "steps" if clock.is_saving else "no"
    arguments = TrainingArguments(str(directory / "trainer"), **how)
    data: Any = [{"input_ids": one, "labels": one} for one in ids]
    trainer = Trainer(training.model, arguments, train_dataset=data, callbacks=[Steps()])
    trainer._save_checkpoint = clock.around(trainer._save_checkpoint)
    found = (directory / "trainer").is_dir() and get_last_checkpoint(str(directory / "trainer"))
    trainer.train(resume_from_checkpoint=found or None)
    training.optimizer = trainer.optimizer
    finish(training, directory, clock)


def with_ravex(directory: Path, clock: Clock) -> None:
    """Its README: the decorator. Its step counts are those of the data, which it puts back."""

    def train() -> Training:
        training = Training(JOB)
        data = [(step, training.batch_of(100 * step)) for step in range(clock.last)]
        for step, ids in torch.utils.data.DataLoader(data, batch_size=None):  # type: ignore[arg-type]
            training.model(ids).backward()
            training.update()
            clock.step(step + 1)
        return training

    if clock.is_saving:
        import ravex

        place = {"type": "local", "path": str(directory / "ravex")}
        train = ravex.train_loop(checkpoint_every=EVERY, max_steps=clock.last, storage=place)(train)
    finish(train(), directory, clock)


METHODS: dict[str, Callable[[Path, Clock], None]] = {
    "none": lambda directory, clock: plainly(TorchSave, directory, clock),
    "torch.save": lambda directory, clock: plainly(TorchSave, directory, clock),
    "dcp-async": lambda directory, clock: plainly(DCPAsync, directory, clock),
    "lightning": lambda directory, clock: with_lightning(directory, clock, is_ours=False),
    "transformers": with_transformers,
    "torch-checkpointing": lambda directory, clock: plainly(TorchCheckpointing, directory, clock),
    "lm-resiliency": lambda directory, clock: plainly(LMResiliency, directory, clock),
    "ravex": with_ravex,
    "lazysnap": lambda directory, clock: plainly(Lazysnap, directory, clock),
    "lazysnap-lightning": lambda directory, clock: with_lightning(directory, clock, is_ours=True),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--without", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.directory.mkdir(exist_ok=True)
    is_saving = not args.without and args.method != "none"
    METHODS[args.method](args.directory, Clock(args.steps, is_saving=is_saving))
