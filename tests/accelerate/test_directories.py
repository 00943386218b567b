"""save_state(directory) and automatic naming of LazyAccelerator: what stock reads, made beside training."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from support.catalogue import newest_directory

from lazysnap import LazyAccelerator, MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.exports.folder import begin
from lazysnap.integrations.accelerate import saving
from lazysnap.integrations.accelerate.state import AcceleratorState

pytestmark = pytest.mark.usefixtures("quick_exports")


@pytest.fixture
def in_background(monkeypatch):
    """Any state counts as large."""
    monkeypatch.setattr(saving, "SMALL_BYTES", 0)


class Script:
    def __init__(self, root, lazy=True, levels=True, max_bytes_per_s=None, **project):
        configuration = ProjectConfiguration(project_dir=str(root), **project)
        level = PersistentLevel(str(root / "level"), every_n_steps=100, max_bytes_per_s=max_bytes_per_s)
        config = SnapshotConfig(job_id=str(root), levels=(level,) * levels, memory=MemoryLevel(linger_s=5))
        made = {"cpu": True, "project_config": configuration}
        self.accelerator = LazyAccelerator(**made, snapshots=config) if lazy else Accelerator(**made)
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(3, 600), torch.nn.Linear(600, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = torch.utils.data.DataLoader(torch.randn(40, 3), 2, shuffle=True)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.batches = iter(self.loader)
        if lazy:
            assert self.accelerator.engine._wait_ready(60)

    def train(self, steps=1):
        for _ in range(steps):
            self.accelerator.backward(self.model(next(self.batches)).square().mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def facts(self):
        tensors = [*self.model.state_dict().values()]
        tensors += [one for state in self.optimizer.state_dict()["state"].values() for one in state.values()]
        numbers = [one.numpy().tobytes() for one in tensors]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return numbers, rates, self.schedule.scheduler.last_epoch, torch.get_rng_state().numpy().tobytes()


def test_stock_reads_a_named_copy_that_was_made_while_training_went_on(tmp_path, in_background):
    script = Script(tmp_path)
    script.train(3)
    wanted = script.facts()
    place = tmp_path / "named"
    assert script.accelerator.save_state(place) == str(place)
    script.train(4)
    script.accelerator.end_training()

    stock = Script(tmp_path, lazy=False)
    stock.accelerator.load_state(str(place))
    assert stock.facts() == wanted


def test_checkpoints_in_quick_succession_hold_the_steps_at_which_they_were_asked_for(tmp_path, in_background):
    """The level takes the first snapshot at once, and each other one half a second after the one before."""
    script, wanted = Script(tmp_path, max_bytes_per_s=100_000), []
    for number in range(3):
        script.train()
        wanted.append(script.facts())
        script.accelerator.save_state(tmp_path / f"{number}")
    script.train(15)
    script.accelerator.end_training()

    for number, facts in enumerate(wanted):
        stock = Script(tmp_path, lazy=False)
        stock.accelerator.load_state(str(tmp_path / f"{number}"))
        assert stock.facts() == facts


def test_a_checkpoint_is_never_of_an_earlier_training_at_the_same_step(tmp_path, in_background, monkeypatch):
    """That one could not be made, so its snapshot keeps its name; the new one is stored seconds later."""

    def saved(script, place):
        for number in range(2):
            script.train()
            wanted = script.facts()
            script.accelerator.save_state(place / f"{number}")
        script.accelerator.end_training()
        return wanted

    monkeypatch.setenv("LAZYSNAP_FAULT", "export.accelerate.file:1:kill")
    saved(Script(tmp_path), tmp_path / "failed")
    monkeypatch.delenv("LAZYSNAP_FAULT")
    second = Script(tmp_path, max_bytes_per_s=20_000)
    second.model[0].weight.data.mul_(2)
    wanted = saved(second, tmp_path)

    stock = Script(tmp_path, lazy=False)
    stock.accelerator.load_state(str(tmp_path / "1"))
    assert stock.facts() == wanted


def test_without_a_level_and_within_an_accumulation_stock_writes_it_at_once(tmp_path, in_background):
    script = Script(tmp_path, levels=False)
    script.train(2)
    wanted = script.facts()
    script.accelerator.save_state(tmp_path / "named")
    assert (tmp_path / "named" / "model.safetensors").exists()
    script.accelerator.end_training()

    stock = Script(tmp_path, lazy=False)
    stock.accelerator.load_state(str(tmp_path / "named"))
    assert stock.facts() == wanted


def test_hooks_are_called_and_what_they_wrote_is_part_of_the_copy(tmp_path, in_background):
    def save(models, weights, directory):
        torch.save(models[0].state_dict(), f"{directory}/own.pt")
        weights.pop()

    def load(models, directory):
        models.pop().load_state_dict(torch.load(f"{directory}/own.pt"))

    script = Script(tmp_path)
    script.accelerator.register_save_state_pre_hook(save)
    script.train(3)
    wanted = script.facts()
    script.accelerator.save_state(tmp_path / "named")
    script.train()
    script.accelerator.end_training()
    assert not (tmp_path / "named" / "model.safetensors").exists()

    again = Script(tmp_path)
    again.accelerator.register_load_state_pre_hook(load)
    again.accelerator.load_state(tmp_path / "named")
    assert again.facts() == wanted
    again.accelerator.end_training()


def test_automatic_naming_keeps_its_limit_and_goes_on_behind_what_it_loads(tmp_path, in_background):
    def script():
        return Script(tmp_path, automatic_checkpoint_naming=True, total_limit=2)

    first = script()
    facts = []
    for _ in range(3):
        first.train(2)
        facts.append(first.facts())
        first.accelerator.save_state()
    first.accelerator.end_training()
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    (root / "checkpoint_7").mkdir()  # a save of stock that died

    again = script()
    again.accelerator.load_state()
    assert again.facts() == facts[-1]
    again.train()
    assert again.accelerator.save_state() == str(root / "checkpoint_8")
    again.accelerator.end_training()
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint_2", "checkpoint_7", "checkpoint_8"]


def test_behind_an_epochs_last_batch_a_checkpoint_holds_what_is_there_then(tmp_path):
    """The step was captured at the end of the loop, and much has changed since."""
    script = Script(tmp_path)
    script.train(20)
    assert next(script.batches, None) is None
    script.schedule.step()
    torch.rand(5)
    script.model[0].weight.data.mul_(2)
    wanted = script.facts()
    script.accelerator.save_state(tmp_path / "named", safe_serialization=False)
    script.batches = iter(script.loader)
    script.train(2)
    script.accelerator.end_training()
    assert (tmp_path / "named" / "pytorch_model.bin").exists()

    stock = Script(tmp_path, lazy=False)
    stock.accelerator.load_state(str(tmp_path / "named"))
    assert stock.facts() == wanted


class WithMore(torch.optim.SGD):
    """Keeps more beside the state of each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", torch.zeros(1)) + 1
        self.state["losses"] = [torch.zeros(4)]
        self.state["seen"] = 3
        return super().step(closure)


class Odd:
    """``facts``: its state; an error is raised."""

    def __init__(self, facts):
        self.facts = facts

    def state_dict(self):
        if isinstance(self.facts, Exception):
            raise self.facts
        return self.facts

    def load_state_dict(self, state):
        self.facts = state


@pytest.mark.parametrize("size", ["small", "large"])
def test_an_optimizer_may_keep_more_than_a_state_per_parameter(tmp_path, monkeypatch, size):
    monkeypatch.setattr(saving, "SMALL_BYTES", 0 if size == "large" else saving.SMALL_BYTES)
    config = SnapshotConfig(
        job_id=str(tmp_path), levels=(PersistentLevel(str(tmp_path / "level")),), memory=MemoryLevel(linger_s=5)
    )
    accelerator = LazyAccelerator(cpu=True, project_dir=str(tmp_path), snapshots=config)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, WithMore(model.parameters(), lr=0.1, momentum=0.9))
    assert accelerator.engine._wait_ready(60)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
    place = accelerator.save_state(tmp_path / "named")
    assert accelerator.wait_for_checkpoints()
    saved = torch.load(tmp_path / "named" / "optimizer.bin", weights_only=False)["state"]
    assert (saved["steps"], saved["seen"]) == (2, 3)
    optimizer.step()
    accelerator.load_state(place)
    assert optimizer.state["steps"] == 2
    accelerator.end_training()


def test_all_tensors_count_for_the_size_of_a_state_however_deep_they_lie():
    model = torch.nn.Linear(4, 4)
    optimizer = WithMore(model.parameters())
    before = _size(model, optimizer)
    optimizer.step()
    assert _size(model, optimizer) - before == 4 * 5
    nested = Odd({"a": [{"b": torch.zeros(100)}]})
    assert _size(model, optimizer, nested, Odd(ValueError("not now"))) - before == 4 * 105


def _size(model, optimizer, *registered):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(*registered)
    return AcceleratorState(accelerator, list).size_bytes()


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_directory_that_was_asked_for_can_be_read_at_once(tmp_path, monkeypatch, size):
    """A small one is complete when the call returns; a large one is there, counts, and a load waits for it."""
    monkeypatch.setattr(saving, "SMALL_BYTES", 0 if size == "large" else saving.SMALL_BYTES)
    script = Script(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    root, facts = tmp_path / "checkpoints", []
    for number in range(2):
        script.train()
        facts.append(script.facts())
        assert script.accelerator.save_state() == str(root / f"checkpoint_{number}")
        assert (root / f"checkpoint_{number}").is_dir()
    assert {path.name for path in root.iterdir()} >= {"checkpoint_1"}
    script.train(3)
    script.accelerator.load_state(str(root / "checkpoint_1"))
    assert script.facts() == facts[-1]
    assert script.accelerator.wait_for_checkpoints()
    assert [path.name for path in root.iterdir()] == ["checkpoint_1"]
    script.accelerator.end_training()


def test_a_checkpoint_that_nobody_finishes_is_refused_and_passed_over(tmp_path):
    script = Script(tmp_path, automatic_checkpoint_naming=True)
    script.train()
    wanted = script.facts()
    script.accelerator.save_state()
    script.train()
    unfinished = tmp_path / "checkpoints" / "checkpoint_1"
    begin(str(unfinished))
    with pytest.raises(SnapshotNotFound, match="not finished"):
        script.accelerator.load_state(str(unfinished))
    script.accelerator.load_state()
    assert script.facts() == wanted
    script.accelerator.end_training()


def test_the_directory_of_a_snapshot_is_refused_with_what_to_do_instead(tmp_path):
    script = Script(tmp_path)
    script.train()
    script.accelerator.save_state()
    script.accelerator.end_training()

    with pytest.raises(ConfigError, match=r'not a checkpoint file of Accelerate: load_state\("latest"\) resumes'):
        Script(tmp_path).accelerator.load_state(newest_directory(tmp_path / "level"))
