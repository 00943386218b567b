"""Promises about snapshots of real Lightning trainings: stock Lightning goes on from what was exported."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
from cli_level import run, run_json
from plain_lightning import EPOCHS, STEPS_PER_EPOCH, Classifier, Record, data, trainer

from lazysnap import LazySnapshotCallback, PersistentLevel, SnapshotConfig

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("lightning export"),  # one training for all of them
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


class Wait(pl.Callback):
    """Before each step, lets the snapshot of the one before reach the disk: the training is too fast for all."""

    def __init__(self, snapshots: LazySnapshotCallback) -> None:
        self.snapshots = snapshots

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        engine = self.snapshots.engine
        if engine is None or not engine._wait_ready(60):
            pytest.fail("the keeper is not ready")
        if trainer.global_step and not engine.wait(trainer.global_step, timeout_s=60):
            pytest.fail("a snapshot did not reach the disk")


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """One training with snapshots and Lightning's own checkpoints every four steps: URL, directory, digests."""
    root = tmp_path_factory.mktemp("training")
    url, record = str(root / "level"), Record()
    level = PersistentLevel(url, every_n_steps=1, keep_last=20)
    snapshots = LazySnapshotCallback(config=SnapshotConfig(levels=(level,), job_id=f"export-{root}"))
    torch.manual_seed(3)
    fit = trainer(str(root / "stock"), record, Wait(snapshots), snapshots)
    fit.fit(Classifier(5, [0.01, 0.1]), data())
    assert fit.global_step == EPOCHS * STEPS_PER_EPOCH
    return url, root, record.steps


@pytest.fixture(scope="module")
def resumed(training, tmp_path_factory):
    """By step: what a process with stock Lightning, and without lazysnap, made of the exported checkpoint."""
    url, _, _ = training
    root = tmp_path_factory.mktemp("resumed")
    paths = {step: root / f"{step}.ckpt" for step in (8, 12)}
    for step, path in paths.items():
        assert run("export", url, str(step), "--to", path) == 0
    words = [sys.executable, str(HERE / "plain_lightning.py"), str(root), *map(str, paths.values())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(paths, json.loads(done.stdout[done.stdout.index("[{") :]), strict=True))


@pytest.mark.parametrize(("step", "epoch"), [(8, 1), (12, 2)], ids=["inside an epoch", "between epochs"])
def test_stock_lightning_goes_on_from_an_exported_checkpoint(training, resumed, step, epoch):
    _, _, digests = training
    result = resumed[step]
    assert result["lazysnap"] is False
    assert result["hparams"] == {"width": 5, "rates": [0.01, 0.1]}
    assert result["weights_equal"] is True
    assert result["start"] == [step, epoch, digests[step]]
    assert result["end"] == [EPOCHS * STEPS_PER_EPOCH, EPOCHS]
    assert sorted(map(int, result["steps"])) == list(range(step + 1, EPOCHS * STEPS_PER_EPOCH + 1))


def test_between_epochs_it_goes_on_bit_for_bit(training, resumed):
    """Inside an epoch, Lightning itself begins again with the first batch of it."""
    _, _, digests = training
    assert resumed[12]["steps"] == {str(at): digest for at, digest in digests.items() if at > 12}


def test_it_holds_what_lightnings_own_checkpoint_of_that_step_holds(training, tmp_path):
    url, root, _ = training
    assert run("export", url, "8", "--to", tmp_path / "exported.ckpt") == 0
    ours = torch.load(tmp_path / "exported.ckpt", weights_only=True)
    (path,) = (root / "stock").glob("*step=8.ckpt")
    theirs = torch.load(path, weights_only=True)
    assert set(ours) == set(theirs)
    for name in ("epoch", "global_step", "hparams_name", "hyper_parameters", "lr_schedulers", "seen"):
        assert ours[name] == theirs[name], name
    assert set(ours["callbacks"]) == set(theirs["callbacks"])
    for name, value in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], value), name
    for index, state in theirs["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            assert torch.equal(ours["optimizer_states"][0]["state"][index][name], value), (index, name)
    (callback,) = theirs["callbacks"]
    assert {name: type(value) for name, value in ours["callbacks"][callback].items()} == {
        name: type(value) for name, value in theirs["callbacks"][callback].items()
    }


def test_weights_are_loaded_into_the_module_without_lightning(training, tmp_path):
    url, _, _ = training
    assert run("export", url, "latest", "--to", tmp_path / "w.safetensors") == 0
    module = Classifier(5, [0.01])
    module.load_state_dict(safetensors.torch.load_file(tmp_path / "w.safetensors"))
    assert run("export", url, "latest", "--to", tmp_path / "w.ckpt") == 0
    expected = torch.load(tmp_path / "w.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


def test_a_dcp_directory_holds_the_checkpoint(training, tmp_path):
    url, _, _ = training
    assert run("export", url, "latest", "--to", tmp_path / "dcp") == 0
    found = {"state_dict": Classifier(5, [0.01]).state_dict(), "global_step": 0}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path / "dcp")
    assert found["global_step"] == EPOCHS * STEPS_PER_EPOCH
    assert run("export", url, "latest", "--to", tmp_path / "w.safetensors") == 0
    expected = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(value, found["state_dict"][name]) for name, value in expected.items())


def test_the_example_is_listed_verified_shown_copied_and_exported(forking_python, tmp_path, capsys, make_url):
    url = str(tmp_path / "level")
    environment = {**os.environ, "LAZYSNAP_JOB_ID": f"cli-{tmp_path}"}
    command = [forking_python, str(EXAMPLES / "lightning_gpt.py"), "--max-steps", "6", "--dirpath", url]
    subprocess.run(command, env=environment, capture_output=True, timeout=280, check=True)

    assert run_json(capsys, "ls", url)[1]["snapshots"][-1]["step"] == 6
    assert run("verify", url) == 0
    target = make_url("memory")
    assert run("copy", url, target, "--step", "latest") == 0
    shown = run_json(capsys, "show", target, "latest", "--all")[1]
    assert shown["state"]["global_step"] == 6
    assert "lightning" in shown["packages"]

    assert run("export", target, "latest", "--to", tmp_path / "gpt.ckpt") == 0
    checkpoint = torch.load(tmp_path / "gpt.ckpt", weights_only=True)
    assert run("export", target, "latest", "--to", tmp_path / "gpt.safetensors") == 0
    example = _import(EXAMPLES / "gpt.py")
    network = torch.nn.Module()
    network.network = example.GPT(example.GPTSize(**checkpoint["hyper_parameters"]["size"]))
    assert safetensors.torch.load_model(network, tmp_path / "gpt.safetensors") == (set(), [])
    for name, value in network.state_dict().items():
        assert torch.equal(value, checkpoint["state_dict"][name]), name


def _import(path: Path):
    spec = importlib.util.spec_from_file_location("example_gpt", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module
