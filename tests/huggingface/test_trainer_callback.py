"""What ``LazyTrainerCallback`` and ``attach_trainer`` promise beside exact restarts."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_training import BATCH_SIZE, SAMPLES, Recorded, Recorder, Texts, collate, digest, gpt2, make_trainer
from huggingface_hub.utils import filter_repo_objects
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import lazysnap
from lazysnap.errors import ConfigError
from lazysnap.integrations.transformers import attach_trainer


def trainers_in(directory):
    """Makes trainers in one directory; the same model each time."""

    def make(*callbacks, case="base", **changes):
        set_seed(7)
        return make_trainer(case, directory, Recorder(directory / "record"), [*callbacks], **changes)

    return make


@pytest.fixture
def new_trainer(tmp_path):
    return trainers_in(tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The end of the base case, without lazysnap."""
    trainer = trainers_in(tmp_path_factory.mktemp("uninterrupted"))()
    trainer.train()
    return final(trainer)


class Fail(TrainerCallback):
    """Ends the training by an exception, when the capture before is whole."""

    def __init__(self, lazy, step):
        self.lazy, self.step = lazy, step

    def on_step_begin(self, args, state, control, **_):
        assert self.lazy.engine._wait_ready(60)  # the steps are over before there is memory to capture into

    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step == self.step:
            assert self.lazy.engine.wait(self.step, until="captured", timeout_s=60)
            raise ZeroDivisionError


class Logs(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **_):
        self.seen.append(dict(logs))


def final(trainer):
    return digest([trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()])


def test_attach_trainer_gives_the_same_to_a_trainer_that_was_made_already(new_trainer, uninterrupted, caplog):
    first = new_trainer()
    callback = attach_trainer(first)
    first.add_callback(Fail(callback, 8))
    with pytest.raises(ZeroDivisionError):
        first.train(resume_from_checkpoint="latest")
    second = new_trainer()
    attach_trainer(second)
    with caplog.at_level("INFO", "lazysnap"):
        second.train("latest")
    assert "resumed step 8" in caplog.text
    assert final(second) == uninterrupted


def test_attaching_twice_is_attaching_once(new_trainer):
    trainer = new_trainer()
    assert attach_trainer(trainer) is attach_trainer(trainer)
    with pytest.raises(ConfigError, match="already"):
        attach_trainer(trainer, "elsewhere")


def test_a_callback_that_is_not_attached_says_what_to_do(new_trainer, tmp_path):
    trainer = new_trainer()
    trainer.add_callback(lazysnap.LazyTrainerCallback())
    with pytest.raises(ConfigError, match=r"lazysnap\.attach\(trainer\)"):
        trainer.train()
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ConfigError, match=r"no argument of the constructor .*lazysnap\.attach\(trainer\)"):
        Recorded(model=gpt2(), args=arguments, callbacks=[lazysnap.LazyTrainerCallback()])


def test_a_callback_belongs_to_one_trainer(new_trainer):
    callback = lazysnap.LazyTrainerCallback()
    new_trainer(callback)
    with pytest.raises(ConfigError, match="another Trainer"):
        new_trainer(callback)


def test_trials_of_a_search_for_hyperparameters_run_without_snapshots_and_say_so(
    new_trainer, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("transformers.integrations.hp_params", dict)  # as where Optuna or Ray is installed
    trainer = new_trainer(lazysnap.LazyTrainerCallback(), max_steps=3)
    trainer.train(trial={"learning_rate": 1e-3})
    assert trainer.state.global_step == 3
    assert not list(tmp_path.rglob("*lazysnap"))
    said = [record for record in caplog.records if "no snapshots are taken of its trials" in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]


def test_after_a_training_the_methods_of_the_trainer_are_its_own_again(new_trainer):
    trainer = new_trainer(lazysnap.LazyTrainerCallback(), max_steps=3)
    trainer.train()
    assert {name for name, value in vars(trainer).items() if hasattr(value, "__wrapped__")} == {"train"}
    assert not hasattr(sys.modules["transformers.trainer"].skip_first_batches, "__wrapped__")


def test_loggers_get_what_snapshots_cost_and_the_history_does_not(new_trainer):
    logs = Logs()
    trainer = new_trainer(lazysnap.LazyTrainerCallback(), logs)
    result = trainer.train()
    names = {"lazysnap/stall_ms", "lazysnap/skipped", "lazysnap/torn", "lazysnap/copy_gb_per_s"}
    assert names | {"lazysnap/lag_steps/memory"} <= logs.seen[-1].keys()
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("lazysnap")]
    assert not [name for name in result.metrics if name.startswith("lazysnap")]


@pytest.mark.parametrize("metric", ["loss", "eval_loss"])
def test_the_best_snapshots_by_a_metric_of_the_evaluations_are_kept(new_trainer, tmp_path, metric):
    trainer = new_trainer(eval_strategy="steps", eval_steps=3)
    assert lazysnap.attach(trainer, keep_best=lazysnap.KeepBest(metric)) is trainer
    trainer.train()

    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = min(losses, key=losses.get)
    place = tmp_path / "out" / "_lazysnap"
    assert lazysnap.export(place, tmp_path / "best.safetensors", which="best").step == best


def test_a_metric_that_no_evaluation_gives_is_named(new_trainer):
    trainer = new_trainer(eval_strategy="steps", eval_steps=3)
    lazysnap.attach(trainer, keep_best=lazysnap.KeepBest("accuracy"))
    with pytest.raises(ConfigError, match=r"no evaluation gives 'accuracy'; there are \[.*'eval_loss'"):
        trainer.train()


class LogsTensor(TrainerCallback):
    """Adds tensors to the log, as forks of training scripts do with auxiliary losses."""

    def on_step_end(self, args, state, control, **_):
        entry = {"aux": torch.tensor(1.5), "parts": [torch.tensor([1, 2])], "step": state.global_step}
        state.log_history.append(entry)


def test_a_tensor_in_the_log_is_stored_as_a_number_and_training_goes_on(new_trainer):
    lazy = lazysnap.LazyTrainerCallback()
    with pytest.raises(ZeroDivisionError):
        new_trainer(lazy, LogsTensor(), Fail(lazy, 4), max_steps=6).train()
    again = new_trainer(lazysnap.LazyTrainerCallback(), max_steps=6)
    again.train(resume_from_checkpoint="latest")
    logged = [entry for entry in again.state.log_history if "aux" in entry]
    assert logged == [{"aux": 1.5, "parts": [[1, 2]], "step": step} for step in range(1, 5)]


def test_completions_that_several_steps_train_are_resumed(new_trainer):
    """Trainers of TRL that generate (GRPO) keep them in this attribute."""
    generated = [{"ids": torch.tensor([[1, 2], [3, 4]]), "texts": ["a", "b"], "images": None}]
    lazy = lazysnap.LazyTrainerCallback()
    trainer = new_trainer(lazy, Fail(lazy, 4), max_steps=6)
    trainer._buffered_inputs = generated
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    again = new_trainer(lazysnap.LazyTrainerCallback(), max_steps=6)
    again._buffered_inputs = None
    again.train(resume_from_checkpoint="latest")
    assert digest([again._buffered_inputs]) == digest([generated])


class Hub:
    """In place of the Hub: records the files that it would get."""

    def __init__(self):
        self.uploaded = []

    def upload_folder(self, *, folder_path, ignore_patterns, **_):
        root = Path(folder_path)
        names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
        self.uploaded += filter_repo_objects(names, ignore_patterns=ignore_patterns)


def test_no_snapshot_is_uploaded_to_the_hub(new_trainer, monkeypatch):
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    trainer = new_trainer(max_steps=2)
    lazysnap.attach(trainer)
    trainer.train()
    trainer.hub_model_id = "someone/model"

    trainer.push_to_hub()

    assert "model.safetensors" in hub.uploaded
    assert not [name for name in hub.uploaded if "lazysnap" in name]


def test_the_directory_of_a_snapshot_is_refused_with_what_resumes_it(new_trainer, tmp_path):
    new_trainer(lazysnap.LazyTrainerCallback(), max_steps=2).train()
    directory = next((tmp_path / "out" / "_lazysnap").glob("step-*[!n]"))
    if directory.is_file():
        directory = directory.with_suffix("")
    trainer = new_trainer(lazysnap.LazyTrainerCallback(), max_steps=2)
    with pytest.raises(ConfigError, match='resume_from_checkpoint="latest" resumes the newest snapshot'):
        trainer.train(resume_from_checkpoint=str(directory))


@pytest.mark.parametrize(
    ("limit", "short", "long"),
    [("max_steps", 8, 10), ("num_train_epochs", 1, 2)],
    ids=["in mid-epoch", "with an epoch"],
)
def test_a_training_that_reached_its_limit_goes_on_exactly_when_it_is_raised(new_trainer, limit, short, long):
    constant = {"lr_scheduler_type": "constant"}
    whole = new_trainer(**{limit: long}, **constant)
    whole.train()
    new_trainer(lazysnap.LazyTrainerCallback(), **{limit: short}, **constant).train()
    longer = new_trainer(lazysnap.LazyTrainerCallback(), **{limit: long}, **constant)
    longer.train(resume_from_checkpoint="latest")
    assert final(longer) == final(whole)


def test_a_training_that_stopped_early_stays_stopped(new_trainer, caplog):
    first = new_trainer(lazysnap.LazyTrainerCallback(), case="stopped")
    first.train()
    assert first.state.global_step < first.state.max_steps
    again = new_trainer(lazysnap.LazyTrainerCallback(), case="stopped")
    with caplog.at_level("WARNING", "lazysnap"):
        again.train(resume_from_checkpoint="latest")
    assert "EarlyStoppingCallback had stopped it" in caplog.text
    assert again.state.global_step == first.state.global_step


class Stop(TrainerCallback):
    """Stops the training behind ``step``, as a limit of time does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_training_stop = True


class Terminated(TrainerCallback):
    """Asks for a checkpoint just in time, as SIGTERM does when its time of grace is over."""

    def __init__(self, trainer, step):
        self.trainer, self.step = trainer, step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            [jit] = [one for one in self.trainer.callback_handler.callbacks if isinstance(one, JITCheckpointCallback)]
            jit.jit_manager._enable_checkpoint()


@pytest.mark.parametrize(("way", "step"), [("by a callback", 6), ("by a signal", 3)])
def test_a_training_that_was_stopped_from_outside_goes_on_exactly(new_trainer, uninterrupted, way, step):
    """Within an epoch, and at the end of one."""
    handler = signal.getsignal(signal.SIGTERM)
    first = new_trainer(lazysnap.LazyTrainerCallback(), enable_jit_checkpoint=way == "by a signal")
    first.add_callback(Stop(step) if way == "by a callback" else Terminated(first, step - 1))
    first.train()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert first.state.global_step == step
    again = new_trainer(lazysnap.LazyTrainerCallback())
    set_seed(1000)
    again.train(resume_from_checkpoint="latest")
    assert final(again) == uninterrupted


def test_the_state_of_a_callback_that_the_program_no_longer_has_is_named(new_trainer, caplog):
    lazy = lazysnap.LazyTrainerCallback()
    first = new_trainer(lazy, Fail(lazy, 3), case="best")
    with pytest.raises(ZeroDivisionError):
        first.train()
    again = new_trainer(lazysnap.LazyTrainerCallback(), case="best")
    again.pop_callback(EarlyStoppingCallback)
    again.train(resume_from_checkpoint="latest")
    said = [record.getMessage() for record in caplog.records if "which this Trainer does not have" in record.message]
    assert said == [
        "the snapshot has the state of EarlyStoppingCallback, which this Trainer does not have: that state is dropped"
    ]


def test_checkpoints_of_transformers_are_resumed_as_ever(new_trainer, caplog):
    new_trainer(lazysnap.LazyTrainerCallback(), max_steps=8, save_strategy="steps", save_steps=4).train()
    trainer = new_trainer(lazysnap.LazyTrainerCallback(), max_steps=10)
    with caplog.at_level("INFO", "lazysnap"):
        output = trainer.train(resume_from_checkpoint=True)
    assert output.global_step == 10
    assert "starting a new run from the checkpoint" in caplog.text


def test_what_cannot_be_captured_is_refused_by_name(new_trainer):
    trainer = new_trainer(lazysnap.LazyTrainerCallback(), auto_find_batch_size=True)
    with pytest.raises(ConfigError, match="auto_find_batch_size"):
        trainer.train()


def test_a_training_loop_of_its_own_is_refused(tmp_path):
    class Own(Recorded):
        def _inner_training_loop(self, *args, **kwargs):
            pass

    trainer = Own(model=gpt2(), args=TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    with pytest.raises(ConfigError, match="Own has a training loop of its own"):
        attach_trainer(trainer)


PROGRAM = """
import sys
sys.modules["transformers"] = None
import lazysnap
try:
    lazysnap.LazyTrainerCallback
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_without_transformers_it_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert "ModuleNotFoundError" in done.stdout
    assert 'run `pip install "lazysnap[transformers]"`' in done.stdout


def test_attach_finds_a_trainer_by_its_class(new_trainer):
    trainer = new_trainer()
    assert lazysnap.attach(trainer) is trainer
    assert any(isinstance(item, lazysnap.LazyTrainerCallback) for item in trainer.callback_handler.callbacks)


class Batches:
    """Gives batches in a new order at each iteration, without a ``DataLoader``."""

    def __init__(self):
        self.texts = Texts()

    def __len__(self):
        return -(-len(self.texts) // BATCH_SIZE)

    def __iter__(self):
        order = torch.randperm(len(self.texts)).split(BATCH_SIZE)
        return (collate([self.texts[index] for index in part]) for part in order)


def test_training_data_from_no_data_loader_are_trained_with_one_warning_and_resumed(new_trainer, caplog):
    def make(*callbacks):
        trainer = new_trainer(*callbacks)
        trainer.get_train_dataloader = Batches
        return trainer

    whole = make()
    whole.train()
    lazy = lazysnap.LazyTrainerCallback()
    with pytest.raises(ZeroDivisionError):
        make(lazy, Fail(lazy, 8)).train()
    said = [record.getMessage() for record in caplog.records if "Batches, which is no" in record.getMessage()]
    again = make(lazysnap.LazyTrainerCallback())
    set_seed(1000)
    again.train(resume_from_checkpoint="latest")
    assert len(said) == 1
    assert "a restart iterates it again" in said[0]
    assert "use a DataLoader" in said[0]
    assert final(again) == final(whole)


class EvaluateAtOnce(TrainerCallback):
    """Evaluates behind the boundary of ``step``, while that is copied."""

    def __init__(self, trainer, step):
        self.trainer, self.step = trainer, step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            self.trainer.evaluate()


def test_averages_that_are_swapped_in_for_an_evaluation_are_never_captured(new_trainer):
    def make(*callbacks):
        trainer = new_trainer(*callbacks, max_steps=8)
        # Copied last; that takes longer than to get to the evaluation.
        trainer.model.large = torch.nn.Parameter(torch.zeros(1 << 11, 1 << 12).t())
        evaluate = trainer.evaluate

        def with_averages(*args, **kwargs):
            parameters = list(trainer.model.parameters())
            trained = [one.data.clone() for one in parameters]
            for one in parameters:
                one.data.fill_(0.5)
            result = evaluate(*args, **kwargs)
            assert not callbacks or callbacks[0].engine.wait(until="captured", timeout_s=60)
            for one, value in zip(parameters, trained, strict=True):
                one.data.copy_(value)
            return result

        trainer.evaluate = with_averages
        trainer.add_callback(EvaluateAtOnce(trainer, 7))
        return trainer

    whole = make()
    whole.train()
    lazy = lazysnap.LazyTrainerCallback()
    with pytest.raises(ZeroDivisionError):
        make(lazy, Fail(lazy, 7)).train()
    again = make(lazysnap.LazyTrainerCallback())
    again.train(resume_from_checkpoint="latest")
    assert final(again) == final(whole)


def test_with_another_batch_size_each_sample_of_the_epoch_is_trained_once(new_trainer, caplog):
    size = 8

    def run(*callbacks, **changes):
        trainer, seen = new_trainer(*callbacks, **changes), []

        def note(model, args, kwargs):
            seen.append((trainer.state.global_step, (kwargs["input_ids"][:, 0] - 32).tolist()))

        trainer.model.register_forward_pre_hook(note, with_kwargs=True)
        return trainer, seen

    lazy = lazysnap.LazyTrainerCallback()
    first, before = run(lazy, Fail(lazy, 4), num_train_epochs=2)
    with pytest.raises(ZeroDivisionError):
        first.train()
    second, after = run(lazysnap.LazyTrainerCallback(), num_train_epochs=2, per_device_train_batch_size=size)
    second.train("latest")

    trained = [index for step, batch in before if step < 4 for index in batch]
    rest = [index for _, batch in after[: -(-6 // size)] for index in batch]
    assert after[0][0] == 4
    assert sorted(trained + rest) == list(range(SAMPLES))
    assert f"a batch has {size} samples, in the snapshot 4" in caplog.text
