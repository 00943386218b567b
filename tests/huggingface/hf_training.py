"""A tiny training by the ``Trainer`` that records everything: ``hf_training.py CASE DIRECTORY NAME [STEP [WHERE]]``.

``NAME`` is that of the record, a file of one JSON value a line: what happened, then how it ended. With ``stock`` in it
lazysnap is left out. At ``STEP`` the process kills itself: see ``Killed``.
"""

import json
import logging
import os
import random
import signal
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.bits import digest, rng_digest
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import lazysnap

SAMPLES, BATCH_SIZE = 22, 4
TIMES = ("runtime", "per_second")


def timeless(values: dict[str, Any]) -> str:
    """Without what a clock says, or lazysnap."""
    kept = {name: value for name, value in values.items() if not name.endswith(TIMES) and "lazysnap" not in name}
    return repr(sorted(kept.items()))


class Texts(Dataset):
    """Sequences of their own lengths that know their number, with random noise of all three kinds."""

    def __init__(self, size: int = SAMPLES, *, is_noisy: bool = True) -> None:
        self.is_noisy = is_noisy
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(5, 12, (size,), generator=generator)
        self.texts = [torch.randint(1, 32, (int(length),), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = self.texts[index].tolist()
        if self.is_noisy:
            ids = [*ids, int(torch.randint(1, 32, ())), random.randrange(1, 32), int(np.random.randint(1, 32))]
        return {"input_ids": [32 + index, *ids]}


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.texts = Texts(is_noisy=False)

    def __iter__(self) -> Any:
        return (self.texts[index] for index in range(len(self.texts)))


def collate(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(item["input_ids"]) for item in items)
    ids = torch.tensor([item["input_ids"] + [0] * (longest - len(item["input_ids"])) for item in items])
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "attention_mask": (ids != 0).long()}


def gpt2() -> Any:
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32 + SAMPLES, bos_token_id=1, eos_token_id=2, **sizes))


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, task_type="CAUSAL_LM"))


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": False,
}
CASES: dict[str, dict[str, Any]] = {
    "base": {},
    "accumulation": {"gradient_accumulation_steps": 4, "num_train_epochs": 4},
    "shaped": {
        "label_smoothing_factor": 0.1,
        "train_sampling_strategy": "group_by_length",
        "include_num_input_tokens_seen": "all",
        "neftune_noise_alpha": 1.0,
    },
    "best": BEST,
    "epochs": {**BEST, "eval_strategy": "epoch", "save_strategy": "epoch", "lr_scheduler_type": "reduce_lr_on_plateau"},
    "stopped": {**BEST, "learning_rate": 1.0},
    "lora": {"save_strategy": "steps", "save_steps": 3},
    "max_steps": {
        "max_steps": 15,
        "lr_scheduler_type": "cosine",
        "bf16": True,
        "dataloader_num_workers": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "eval_on_start": True,
    },
    "stream": {"max_steps": 15},
    "stream_accumulation": {"max_steps": 7, "gradient_accumulation_steps": 4},
    "not_skipping": {"ignore_data_skip": True},
    "two_ranks": {"ddp_backend": "gloo", "num_train_epochs": 4},
}
"""Arguments by case: each start takes seconds, so arguments that do not touch one another are in one case."""


class Recorder(TrainerCallback):
    """Writes everything that happens, bit for bit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    def write(self, *event: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parts = [kwargs["model"].state_dict(), kwargs["optimizer"].state_dict(), kwargs["lr_scheduler"].state_dict()]
        rates = [group["lr"] for group in kwargs["optimizer"].param_groups]
        self.write("trained", state.global_step, repr(state.epoch), digest(parts), rates, rng_digest())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.write("epoch end", repr(state.epoch), rng_digest())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.write("logged", state.global_step, timeless(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.write("evaluated", state.global_step, timeless(metrics), rng_digest())

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        names = sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*"))
        self.write("saved", state.global_step, names[-1], state.best_model_checkpoint)


class Killed(TrainerCallback):
    """Kills the process at ``step``, ``where`` that is met: ``step`` (in the middle of the next one), ``evaluation``,
    ``save`` or ``epoch`` (at its end), when all captures before that are whole.
    """

    def __init__(self, lazy: Any, step: int, where: str) -> None:
        self.lazy, self.step, self.where = lazy, step, where

    def _meet(self, where: str, step: int) -> None:
        is_first = os.environ.get("RANK", "0") == "0"
        if where == self.where and step == self.step and is_first:
            captured = step if where == "step" else step - 1
            assert not captured or self.lazy.engine.wait(captured, until="captured", timeout_s=60)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The steps are over before there is memory to capture into.
        assert self.lazy.engine is None or self.lazy.engine._wait_ready(60)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meet("step", state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meet("evaluation", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meet("save", state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meet("epoch", state.global_step)


class Recorded(Trainer):
    """Records what a step is given and what it returns."""

    record: Recorder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.words, self.sizes = 0, {"train": defaultdict(list)}

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.record.write("batch", self.state.global_step, inputs["input_ids"].tolist(), rng_digest())
        self.words += inputs["input_ids"].numel()
        self.sizes["train"]["batch"].append(len(inputs["input_ids"]))
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.record.write("loss", repr(loss.item()))
        return loss

    def log(self, logs: dict[str, float], *args: Any) -> None:
        logs |= {"words": self.words, "batches": len(self.sizes["train"]["batch"])}
        self.sizes["train"].clear()
        super().log(logs, *args)


def make_trainer(case: str, directory: Path, record: Recorder, callbacks: list[Any], **changes: Any) -> Trainer:
    arguments = {
        "output_dir": str(directory / "out"),
        "num_train_epochs": 2.5,
        "per_device_train_batch_size": BATCH_SIZE,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
        **CASES[case],
        **changes,
    }
    if case in ("best", "epochs"):
        callbacks = [*callbacks, EarlyStoppingCallback(50)]
    if case == "stopped":
        callbacks = [*callbacks, EarlyStoppingCallback(2)]
    trainer = Recorded(
        model=lora() if case == "lora" else gpt2(),
        args=TrainingArguments(**arguments),
        data_collator=collate,
        train_dataset=Stream() if "stream" in case else Texts(),
        eval_dataset=Texts(6),
        callbacks=[*(one for one in callbacks if not isinstance(one, lazysnap.LazyTrainerCallback)), record],
    )
    for one in callbacks:
        if isinstance(one, lazysnap.LazyTrainerCallback):
            one.attach(trainer)
    trainer.record = record
    return trainer


def summary(trainer: Trainer, output: Any) -> list[Any]:
    """How a training ended."""
    state = {name: value for name, value in vars(trainer.state).items() if name != "log_history"}
    stateful = [item.state() for item in trainer.callback_handler.callbacks if hasattr(item, "state")]
    return [
        "ended",
        digest(trainer.model.state_dict()),
        digest(trainer.optimizer.state_dict()),
        repr(trainer.lr_scheduler.state_dict()),
        repr(state),
        [timeless(entry) for entry in trainer.state.log_history],
        repr(stateful),
        repr(trainer.control),
        repr([trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged, trainer.current_flos]),
        repr([output.global_step, output.training_loss]),
        rng_digest(),
    ]


def train(case: str, directory: Path, name: str, kill_at: int = -1, where: str = "step") -> Trainer:
    directory.mkdir(parents=True, exist_ok=True)
    is_fresh = kill_at >= 0 or "stock" in name
    set_seed(7 if is_fresh else 1000)
    rank = os.environ.get("RANK")
    record = Recorder(directory / (name if rank is None else f"{name}.{rank}"))
    callbacks: list[Any] = []
    if "stock" not in name:
        lazy = lazysnap.LazyTrainerCallback()
        callbacks = [lazy, Killed(lazy, kill_at, where)]
    trainer = make_trainer(case, directory, record, callbacks)
    if not is_fresh:  # a restart is to owe nothing to the seed
        set_seed(1001)
    output = trainer.train(resume_from_checkpoint=None if "stock" in name else "latest")
    record.write(*summary(trainer, output))
    return trainer


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    case, directory, name, *death = sys.argv[1:]
    train(case, Path(directory), name, *map(int, death[:1]), *death[1:])
