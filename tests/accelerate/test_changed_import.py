"""A script does with one changed import what it did with a stock Accelerator: without a place, and without waiting."""

import gc
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from support.keepers import stopped

from lazysnap import JobBusy, LazyAccelerator, PersistentLevel, SnapshotConfig
from lazysnap.integrations.accelerate.numbering import Numbering
from lazysnap.shard.manifest import EXTRAS, PRETRAINED


class Progress:
    def __init__(self):
        self.epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class Numbers(torch.utils.data.IterableDataset):
    """Without a length."""

    def __iter__(self):
        yield from torch.arange(8.0).reshape(8, 1)


class Script:
    def __init__(self, data=None, **settings):
        torch.manual_seed(1)
        self.accelerator = LazyAccelerator(cpu=True, **settings)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        data = torch.arange(8.0).reshape(8, 1) if data is None else data
        is_sized = not isinstance(data, torch.utils.data.IterableDataset)
        loader = torch.utils.data.DataLoader(data, 2, shuffle=is_sized)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)

    def step(self, batch):
        self.accelerator.backward(self.model(batch).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self):
        for batch in self.loader:
            self.step(batch)

    def weights(self):
        return [one.sum().item() for one in self.model.parameters()]


@pytest.fixture
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # of torchdata
@pytest.mark.parametrize("is_dispatching", [False, True], ids=["each rank reads", "rank 0 reads"])
@pytest.mark.parametrize("is_stateful", [False, True], ids=["loader", "stateful loader"])
def test_the_random_numbers_of_a_training_are_those_of_a_stock_accelerator(is_stateful, is_dispatching, tmp_path):
    """Asked for its state when it is prepared, a stateful loader draws the seed of its first epoch then."""

    def numbers(kind):
        torch.manual_seed(1)
        loading = DataLoaderConfiguration(use_stateful_dataloader=is_stateful, dispatch_batches=is_dispatching)
        accelerator = kind(cpu=True, project_dir=tmp_path, dataloader_config=loading)
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(6), 2, shuffle=True))
        return [(batch.tolist(), torch.rand(1).item()) for _ in range(2) for batch in loader]

    assert numbers(LazyAccelerator) == numbers(Accelerator)


def test_without_a_place_snapshots_go_below_the_working_directory_and_a_line_says_so(in_empty_directory, caplog):
    with caplog.at_level("INFO", "lazysnap"):
        script = Script()
        assert not os.listdir(), "nothing is chosen before it has to be"
        script.epoch()
        script.accelerator.end_training()
    assert os.listdir() == ["lazysnap"]
    said = [record.getMessage() for record in caplog.records if "no project_dir is set" in record.getMessage()]
    assert len(said) == 1
    assert f"{in_empty_directory}/lazysnap" in said[0]

    again = Script()
    assert again.accelerator.load_state("latest").step == 4
    assert again.weights() == script.weights()
    again.accelerator.end_training()


def test_a_directory_is_loaded_from_its_snapshot_where_the_script_names_no_other_place(in_empty_directory):
    script = Script()
    engine = script.accelerator.engine
    assert engine._wait_ready(60)
    script.epoch()
    assert engine.wait(1, timeout_s=60)  # memory and storage can take the next step
    script.step(torch.ones(2, 1))
    script.accelerator.save_state("runs/first")
    script.accelerator.end_training()

    again = Script()
    assert again.accelerator.load_state("runs/first").step == 5
    assert again.weights() == script.weights()
    again.accelerator.end_training()
    assert sorted(os.listdir()) == ["lazysnap", "runs"]


def test_a_logging_directory_decides_where_snapshots_go(in_empty_directory):
    script = Script(project_config=ProjectConfiguration(logging_dir="runs"))
    script.accelerator.save_state("runs/first")
    assert script.accelerator.wait_for_checkpoints()
    assert Path("runs/first/model.safetensors").exists()
    script.epoch()
    script.accelerator.end_training()
    assert os.listdir() == ["runs"]
    assert sorted(os.listdir("runs")) == ["first", "lazysnap"]


def test_a_last_step_that_cannot_be_captured_since_the_accelerator_is_gone_is_named(tmp_path, caplog):
    config = SnapshotConfig(every_n_steps=10, levels=(PersistentLevel(str(tmp_path)),))

    def main():
        script = Script(snapshots=config)
        assert script.accelerator.engine._wait_ready(60)
        script.epoch()

    main()
    gc.collect()

    assert (
        "step 4 is not captured: the accelerator does not exist any more; call accelerator.end_training()"
        in caplog.text
    )


class Config:
    def __init__(self, name):
        self.name = name

    def to_json_string(self):
        return self.name

    def save_pretrained(self, directory):
        Path(directory, "config.json").write_text(self.name)


class Pretrained(torch.nn.Linear):
    """As far as an export needs it, a model of Transformers."""

    dtype = torch.float32

    def __init__(self, name):
        super().__init__(1, 1)
        self.config = Config(name)

    def save_pretrained(self, directory):
        raise AssertionError("its weights are in the snapshot")

    def can_generate(self):
        return False


def test_another_training_of_an_accelerator_has_the_config_of_its_own_model(tmp_path):
    accelerator = LazyAccelerator(cpu=True, project_dir=tmp_path)
    for name in ("first", "second"):
        accelerator.prepare(Pretrained(name))
        state = accelerator.engine._source.collect()
        assert name in state[EXTRAS][PRETRAINED]
        accelerator.free_memory()
    accelerator.end_training()


def test_a_directory_that_the_program_named_supersedes_no_numbered_one(tmp_path):
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    for number in (0, 1, 2):
        (tmp_path / "checkpoints" / f"checkpoint_{number}").mkdir(parents=True)
    numbering = Numbering(project)

    assert numbering.superseded(str(tmp_path / "mine")) == []
    assert len(numbering.superseded(str(tmp_path / "checkpoints" / "checkpoint_2"))) == 2


def test_of_two_programs_without_a_place_in_one_directory_the_second_is_refused(in_empty_directory, forking_python):
    program = "import sys; sys.path.insert(0, sys.argv[1]); from test_changed_import import Script; script = Script(); "
    program += "script.epoch(); print('trained', flush=True); sys.stdin.read()"
    command = [forking_python, "-c", program, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"trained\n"
        second = Script()
        with pytest.raises(JobBusy, match="give this one a directory of its own"):
            second.epoch()
        second.accelerator._lazysnap_integration.abandon()
        other.stdin.close()


def test_a_program_may_remove_its_directory_before_it_ends(tmp_path):
    """As tests do that train in a temporary one: nothing fails, and nothing comes back."""
    root = tmp_path / "run"
    script = Script(project_dir=str(root))
    engine = script.accelerator.engine
    assert engine._wait_ready(60)
    script.epoch()
    assert engine.wait(1, timeout_s=60)  # nothing else is being stored
    script.accelerator.save_state(root / "last")
    assert script.accelerator.wait_for_checkpoints()
    with stopped(engine._client.keeper_pid):  # else files come while others are removed
        shutil.rmtree(root)
    script.accelerator.end_training()
    del script
    assert not root.exists()


def test_states_that_are_saved_and_loaded_in_turns_give_the_same_training(tmp_path):
    """From the directory that was just saved, also under automatic naming, where the newest is found."""
    naming = {"project_config": ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)}
    whole = Script(project_dir=str(tmp_path / "whole"))
    for _ in range(3):
        whole.epoch()

    script = Script(**naming)
    script.accelerator.save_state()
    script.epoch()
    script.accelerator.load_state()
    for _ in range(2):
        script.epoch()
    assert script.accelerator.save_state() == str(tmp_path / "checkpoints" / "checkpoint_1")
    script.epoch()
    script.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_1"))
    script.epoch()
    assert script.weights() == whole.weights()
    script.accelerator.end_training()
    whole.accelerator.end_training()


def test_eleven_checkpoints_in_a_row_keep_the_limit_at_every_moment(tmp_path):
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    script = Script(project_config=project)
    for number in range(11):
        script.accelerator.save_state()
        wanted = {f"checkpoint_{one}" for one in (number - 1, number) if one >= 0}
        assert set(os.listdir(tmp_path / "checkpoints")) == wanted
    script.accelerator.end_training()


def counted_at_the_last_batch(script, epochs, trained):
    """The body counts, before the loop knows that the epoch is over."""
    for epoch in range(script.progress.epoch, epochs):
        for batch in script.loader:
            script.step(batch)
            trained.append((epoch, batch.flatten().tolist()))
            if script.loader.end_of_dataloader:
                script.progress.epoch += 1
                script.accelerator.save_state()


def counted_at_every_batch(script, epochs, trained):
    """The body says which epoch it is in."""
    for epoch in range(script.progress.epoch, epochs):
        for batch in script.loader:
            script.progress.epoch = epoch
            script.step(batch)
            trained.append((epoch, batch.flatten().tolist()))
            script.accelerator.save_state()


@pytest.mark.parametrize(
    ("train", "data"), [(counted_at_the_last_batch, None), (counted_at_every_batch, Numbers())], ids=["last", "every"]
)
def test_wherever_a_script_counts_its_epochs_a_restart_loses_and_repeats_none(tmp_path, train, data):
    whole, expected = Script(data, project_dir=str(tmp_path / "whole")), []
    train(whole, 4, expected)
    whole.accelerator.end_training()
    assert len(expected) == 16

    trained = []
    for epochs in (1, 2, 4):
        script = Script(data, project_dir=str(tmp_path / "cut"))
        script.accelerator.load_state("latest")
        assert script.accelerator.engine._wait_ready(60)
        train(script, epochs, trained)
        script.accelerator.end_training()
    assert trained == expected
    assert script.weights() == whole.weights()


ONE = torch.arange(2.0).reshape(2, 1)
"""One batch."""


def counted_behind_the_loop(script, epochs, trained):
    for epoch in range(script.progress.epoch, epochs):
        for batch in script.loader:
            script.step(batch)
            trained.append((epoch, batch.flatten().tolist()))
        script.progress.epoch += 1


@pytest.mark.parametrize("train", [counted_at_the_last_batch, counted_at_every_batch, counted_behind_the_loop])
def test_with_one_batch_per_epoch_a_restart_loses_and_repeats_none(tmp_path, train):
    trained = []
    for epochs in (1, 4):
        script = Script(ONE, project_dir=tmp_path)
        script.accelerator.load_state("latest")
        assert script.accelerator.engine._wait_ready(60)
        train(script, epochs, trained)
        script.accelerator.end_training()
    assert [epoch for epoch, _ in trained] == [0, 1, 2, 3]


def train_until(script, most, trained):
    """As with ``max_train_steps``."""
    while script.progress.epoch < 4:
        for batch in script.loader:
            script.step(batch)
            trained.append((script.progress.epoch, batch.flatten().tolist()))
            if len(trained) == most:
                return
        script.progress.epoch += 1


@pytest.mark.parametrize("most", [4, 6])
def test_a_loop_that_is_left_by_break_goes_on_behind_the_batches_that_were_trained(tmp_path, most):
    whole, expected = Script(project_dir=tmp_path / "whole"), []
    train_until(whole, 16, expected)
    whole.accelerator.end_training()

    trained = []
    for steps in (most, 16):
        script = Script(project_dir=tmp_path / "cut")
        evaluation = script.accelerator.prepare_data_loader(torch.utils.data.DataLoader(torch.arange(8.0), 2))
        if trained:  # nothing is owed to the seed
            torch.manual_seed(5)
        script.accelerator.load_state("latest")
        assert script.accelerator.engine._wait_ready(60)  # the last step is captured
        train_until(script, steps, trained)
        for number, batch in enumerate(evaluation):  # is left, too, and begins anew in each evaluation
            if number == 1:
                assert batch.tolist() == [2.0, 3.0]
                break
        script.accelerator.end_training()
    assert trained == expected
    assert script.weights() == whole.weights()


def train_limited(script, epochs, trained):
    """Three of four batches in each epoch."""
    while script.progress.epoch < epochs:
        for number, batch in enumerate(script.loader, 1):
            script.step(batch)
            trained.append((script.progress.epoch, batch.flatten().tolist()))
            if number == 3:
                break
        script.progress.epoch += 1


def test_epochs_that_are_left_early_and_counted_are_not_gone_on_with(tmp_path):
    whole, expected = Script(project_dir=tmp_path / "whole"), []
    train_limited(whole, 4, expected)
    whole.accelerator.end_training()

    trained = []
    for epochs in (1, 3, 4):
        script = Script(project_dir=tmp_path / "cut")
        if trained:
            torch.manual_seed(5)
        script.accelerator.load_state("latest")
        train_limited(script, epochs, trained)
        script.accelerator.end_training()
    assert trained == expected
    assert script.weights() == whole.weights()


@pytest.fixture
def with_large(tmp_path):
    """Makes scripts whose last tensor takes a while to be copied."""

    def make():
        script = Script(project_dir=tmp_path)
        script.model.large = torch.nn.Parameter(torch.zeros(1 << 12, 1 << 13).t())
        script.optimizer.add_param_group({"params": [script.model.large]})
        return script

    return make


def test_a_checkpoint_that_is_loaded_right_behind_a_step_does_not_tear_its_snapshot(with_large, tmp_path):
    script = with_large()
    batches = iter(script.loader)
    script.step(next(batches))
    script.accelerator.save_state(tmp_path / "first")
    script.accelerator.wait_for_checkpoints()
    (tmp_path / "first" / "lazysnap.json").unlink()  # stock loads it
    script.step(next(batches))
    assert script.accelerator.save_state() == 2

    script.accelerator.load_state(tmp_path / "first")

    assert script.accelerator.engine.wait(2, until="captured", timeout_s=60)
    script.accelerator._lazysnap_integration.abandon()


def test_averages_that_are_swapped_in_behind_an_epoch_are_never_captured(with_large):
    script = with_large()
    script.epoch()
    assert script.accelerator.engine._wait_ready(60)  # memory for every step from here on
    script.epoch()
    trained = script.weights()
    for one in script.model.parameters():
        one.data.fill_(0.5)
    engine = script.accelerator.engine
    assert engine.wait(until="captured", timeout_s=60)
    script.accelerator._lazysnap_integration.abandon()

    again = with_large()
    assert again.accelerator.load_state("latest").step == 8
    assert again.weights() == trained
    again.accelerator.end_training()
