"""A directory of save_state is a name of a snapshot, and gets what stock Accelerate reads, beside training."""

import functools
import os
import shutil
import signal

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from fillers import TIMEOUT_S, stopped_in
from support.listing import files_below
from support.stored import newest_directory
from support.waiting import until

import lazysnap
from lazysnap import LazyAccelerator, MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_exports")

until = functools.partial(until, timeout_s=TIMEOUT_S)


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


def test_a_directory_is_loaded_at_once_from_its_snapshot(tmp_path):
    """And stock reads the copy that was made while training went on."""
    script = Script(tmp_path)
    script.train(3)
    wanted = script.facts()
    place = tmp_path / "named"
    assert script.accelerator.save_state(place) == str(place)
    script.train(2)

    assert script.accelerator.load_state(place).step == 3
    assert script.facts() == wanted
    script.train(2)
    script.accelerator.end_training()

    stock = Script(tmp_path, lazy=False)
    stock.accelerator.load_state(str(place))
    assert stock.facts() == wanted
    again = Script(tmp_path)
    with pytest.raises(ConfigError, match=r'not a checkpoint file of Accelerate: load_state\("latest"\) resumes'):
        again.accelerator.load_state(newest_directory(tmp_path / "level"))
    assert again.accelerator.load_state("latest").step == 5
    again.accelerator.end_training()


@pytest.mark.parametrize("directory", ["_last", ".ckpt", "état", "-"])
def test_a_directory_may_have_any_name(tmp_path, directory):
    script = Script(tmp_path)
    script.train(2)
    wanted = script.facts()
    script.accelerator.save_state(tmp_path / directory)
    script.train()
    script.accelerator.save_state(tmp_path / "next")

    assert script.accelerator.load_state(tmp_path / directory).step == 2
    assert script.facts() == wanted
    script.accelerator.end_training()


def test_checkpoints_in_quick_succession_hold_the_steps_at_which_they_were_asked_for(tmp_path):
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


def test_without_a_level_and_within_an_accumulation_stock_writes_it_at_once(tmp_path):
    script = Script(tmp_path, levels=False)
    script.train(2)
    wanted = script.facts()
    script.accelerator.save_state(tmp_path / "named")
    assert (tmp_path / "named" / "model.safetensors").exists()
    script.accelerator.end_training()

    stock = Script(tmp_path, lazy=False)
    stock.accelerator.load_state(str(tmp_path / "named"))
    assert stock.facts() == wanted


def test_hooks_are_called_and_what_they_wrote_is_part_of_the_copy(tmp_path):
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


def test_automatic_naming_keeps_its_limit_and_goes_on_behind_what_it_loads(tmp_path, monkeypatch):
    """What is beyond the limit is deleted beside the training, not by it."""

    def script():
        return Script(tmp_path, automatic_checkpoint_naming=True, total_limit=2)

    deleted = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: deleted.append(str(path)))
    first = script()
    facts = []
    for _ in range(3):
        first.train(2)
        facts.append(first.facts())
        first.accelerator.save_state()
        # Else an export that deletes a directory may meet one that still fills it.
        assert first.accelerator.wait_for_checkpoints(TIMEOUT_S)
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    first.train(2)
    first.accelerator.save_state()
    first.accelerator.end_training()
    assert len(files_below(tmp_path / "level", "keep-*")) == 3, "those of deleted directories go at the next call"

    again = script()
    (root / "checkpoint_3" / "lazysnap.json").unlink()
    (root / "checkpoint_7").mkdir()  # a save that died
    again.accelerator.load_state(root / "checkpoint_2")
    assert again.facts() == facts[2]
    again.train()
    assert again.accelerator.save_state() == str(root / "checkpoint_8")
    again.accelerator.end_training()
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint_7", "checkpoint_8"]
    assert not [path for path in deleted if "checkpoint_" in path]


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


def test_an_optimizer_may_keep_more_than_a_state_per_parameter(tmp_path):
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


def test_the_snapshot_of_a_directory_stays_and_a_lost_one_leaves_what_stock_loads(tmp_path):
    script = Script(tmp_path)
    script.train(2)
    wanted = script.facts()
    script.accelerator.save_state(tmp_path / "named")
    for _ in range(4):
        script.train()
        script.accelerator.engine.wait(timeout_s=TIMEOUT_S)
    script.accelerator.end_training()
    for path in (tmp_path / "named").glob("*.*in"):
        path.unlink()

    again = Script(tmp_path)
    assert again.accelerator.load_state(tmp_path / "named").step == 2
    assert again.facts() == wanted
    again.accelerator.end_training()

    lazysnap.export(tmp_path / "level", tmp_path / "named", which=2, format="accelerate")
    shutil.rmtree(tmp_path / "level")
    last = Script(tmp_path)
    assert last.accelerator.load_state(tmp_path / "named") is None
    assert last.facts() == wanted
    last.accelerator.end_training()


def test_a_directory_that_is_deleted_stays_so_and_its_snapshot_is_released(tmp_path):
    script = Script(tmp_path, max_bytes_per_s=20_000)
    script.train()
    script.accelerator.save_state(tmp_path / "first")
    shutil.rmtree(tmp_path / "first")
    script.train()
    script.accelerator.save_state(tmp_path / "second")
    assert script.accelerator.wait_for_checkpoints(TIMEOUT_S)
    script.accelerator.end_training()
    assert not (tmp_path / "first").exists()
    [name] = files_below(tmp_path / "level", "keep-*")
    assert name.name.startswith("keep-second-")


@pytest.mark.parametrize(
    ("point", "before"),
    [
        ("export.accelerate.file:2", "nothing"),
        ("export.whole:1", "a checkpoint"),
        ("export.named.move:2", "a checkpoint"),
    ],
)
def test_a_killed_export_leaves_no_mixture_and_the_snapshot_is_loaded(tmp_path, monkeypatch, caplog, point, before):
    place = tmp_path / "named"
    script = Script(tmp_path)
    script.train()
    earlier = script.facts()
    if before != "nothing":
        script.accelerator.save_state(place)
        assert script.accelerator.wait_for_checkpoints(TIMEOUT_S)
    script.train()
    wanted = script.facts()
    monkeypatch.setenv("LAZYSNAP_FAULT", f"{point}:kill")
    script.accelerator.save_state(place)
    assert not script.accelerator.wait_for_checkpoints(TIMEOUT_S)
    monkeypatch.delenv("LAZYSNAP_FAULT")
    [said] = [record.getMessage() for record in caplog.records if "no checkpoint was written" in record.getMessage()]
    assert f"--to {place} --format accelerate" in said

    stock = Script(tmp_path, lazy=False)
    if before == "nothing" or "move" in point:
        with pytest.raises(FileNotFoundError):
            stock.accelerator.load_state(str(place))
    else:
        stock.accelerator.load_state(str(place))
        assert stock.facts() == earlier
    script.train()
    script.accelerator.load_state(place)
    assert script.facts() == wanted

    script.train()
    script.accelerator.save_state(place)
    assert script.accelerator.wait_for_checkpoints(TIMEOUT_S)
    assert not list(place.glob(".lazysnap*"))
    script.accelerator.end_training()


def test_an_export_goes_on_without_the_training_unless_the_directory_got_another_snapshot(tmp_path, monkeypatch):
    place = tmp_path / "named"
    script = Script(tmp_path)
    for number in range(2):
        script.train()
        monkeypatch.setenv("LAZYSNAP_FAULT", "export.whole:1:stop")
        script.accelerator.save_state(place)
        assert not script.accelerator.wait_for_checkpoints(0.0)
        assert script.accelerator.engine.wait(timeout_s=TIMEOUT_S)
        assert not script.accelerator.wait_for_checkpoints(0.0)
        if not number:
            pid = stopped_in(place)
    wanted = script.facts()
    script.accelerator._lazysnap_integration.abandon()
    os.kill(pid, signal.SIGCONT)
    os.kill(until(lambda: stopped_in(place) != pid and stopped_in(place)), signal.SIGCONT)
    until(lambda: (place / "model.safetensors").exists())

    stock = Script(tmp_path, lazy=False)
    stock.accelerator.load_state(str(place))
    assert stock.facts() == wanted
