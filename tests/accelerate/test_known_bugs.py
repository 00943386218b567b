"""Known bugs of stock Accelerate with directories, which lazysnap does not have.

Numbers are those of issues of huggingface/accelerate (and transformers for #35782 and #25136).
"""

import shutil

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from support import saving

from lazysnap import export
from lazysnap.data.streams import collect_rng
from lazysnap.exports import accelerate_folders as folders
from lazysnap.exports.folder import filled, mark_of
from lazysnap.state.walk import walk

pytestmark = pytest.mark.usefixtures("quick_exports")


class Script:
    """A prepared model and optimizer with automatic naming."""

    def __init__(self, root):
        project = ProjectConfiguration(str(root), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        model = torch.nn.Linear(4, 4)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.root = root / "checkpoints"

    def train(self):
        self.accelerator.backward(self.model(torch.ones(1, 4)).sum())
        self.optimizer.step()

    def weight(self):
        return self.model.weight.detach().clone()

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": collect_rng(),
            "accelerate": {"step": self.accelerator.step},
        }

    def copy(self, number, *states):
        """Export a snapshot of as many ranks as there are states, as the process of a background checkpoint does."""
        url, states = str(self.root.parent / "level"), states or (self.state(),)
        shutil.rmtree(url, ignore_errors=True)
        snapshot = saving.Snapshot(url, len(states), step=number)
        for rank, state in enumerate(states):
            walked = walk(state)
            boxes = {name: (tensor, None) for name, tensor in zip(walked.names, walked.tensors, strict=True)}
            saving.write(snapshot, rank, boxes, walked.skeleton)
        export(url, self.root / f"checkpoint_{number}", which=number, format="accelerate")


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
def test_an_incomplete_newest_folder_is_passed_over(script, caplog, name):
    """#35782, #35525, #29059: stock takes the highest number, complete or not."""
    for number in (0, 1):
        script.train()
        script.copy(number)
    (script.root / "checkpoint_1" / name).unlink()

    chosen = folders.newest_complete(str(script.root))
    assert chosen == str(script.root / "checkpoint_0")
    assert "checkpoint_1 is passed over" in caplog.text
    script.accelerator.load_state(chosen)


def test_names_that_are_no_checkpoints_do_no_harm(script):
    """Stock takes the last digits of any name: a backup is loaded, and "notes" is an IndexError."""
    script.train()
    script.accelerator.save_state()
    shutil.copytree(script.root / "checkpoint_0", script.root / "backup_of_checkpoint_9")
    (script.root / "notes").mkdir()
    assert folders.newest_complete(str(script.root)) == str(script.root / "checkpoint_0")
    assert folders.next_iteration([path.name for path in script.root.iterdir()], 0) == 1


def test_the_last_good_checkpoint_goes_only_when_the_next_is_complete(tmp_path, monkeypatch):
    """#25136, #1163: with total_limit=1 stock deletes the only checkpoint, then writes; a full disk leaves none."""
    script = Script(tmp_path)
    script.copy(0)
    with (
        pytest.raises(OSError, match="No space left"),
        filled(str(script.root / "checkpoint_1"), {}) as temp,
    ):
        full_disk([], [], temp)
    assert folders.newest_complete(str(script.root)) == str(script.root / "checkpoint_0")
    script.copy(1)
    assert folders.delete_superseded(str(script.root), 1) == [str(script.root / "checkpoint_0")]
    assert [path.name for path in script.root.iterdir()] == ["checkpoint_1"]


def full_disk(models, weights, directory):
    raise OSError(28, "No space left on device", directory)


def test_the_limit_counts_complete_checkpoints_only_and_deletes_nothing_else(tmp_path):
    """#1163: stock counts whatever lies there, and deletes what has the smallest number in its name."""
    script = Script(tmp_path)
    script.accelerator.save_state()  # of stock: nothing that lazysnap wrote
    (script.root / "thesis_0").mkdir()
    for number in (1, 2, 3, 4, 5):
        script.copy(number)
    (script.root / "checkpoint_2" / "model.safetensors").unlink()
    gone = folders.delete_superseded(str(script.root), 2)
    assert gone == [str(script.root / f"checkpoint_{number}") for number in (1, 3)]
    there = {path.name for path in script.root.iterdir()}
    assert there == {"thesis_0", *(f"checkpoint_{number}" for number in (0, 2, 4, 5))}


def test_a_save_after_a_load_goes_on_behind_the_existing_checkpoints(tmp_path):
    """#1601, #3306: a restarted script loads, saves, and stock says "already exists"."""
    first = Script(tmp_path)
    for _ in range(2):
        first.accelerator.save_state()
    again = Script(tmp_path)
    again.accelerator.load_state()
    names = [path.name for path in again.root.iterdir()]
    iteration = folders.next_iteration(names, again.accelerator.save_iteration)
    assert iteration == 2
    again.accelerator.project_configuration.iteration = iteration
    again.accelerator.save_state()
    assert folders.newest_complete(str(again.root)) == str(again.root / "checkpoint_2")


def test_a_save_that_dies_leaves_no_folder_under_that_name(script):
    """#688: stock writes into the final folder; what a death leaves there looks like a checkpoint."""
    with (
        pytest.raises(OSError, match="No space left"),
        filled(str(script.root / "checkpoint_1"), {}) as at,
    ):
        full_disk([], [], at)
    assert not (script.root / "checkpoint_1").exists()


def test_a_snapshot_without_a_random_state_is_refused_not_half_written(script):
    """Stock loads NumPy's state before torch's, and drops both without a word if one is missing."""
    state = script.state()
    del state["rng"]["numpy"]
    with pytest.raises(ValueError, match="no random state of \\['numpy'\\]"):
        script.copy(0, state)
    assert not (script.root / "checkpoint_0").exists()


def test_a_copy_has_the_random_states_and_the_step_of_every_rank(script):
    """#3080, #4165: all else is of rank 0; the layout has one file of it for all ranks."""
    first, second = script.state(), script.state()
    second["rng"]["torch"] = torch.Generator().manual_seed(77).get_state()
    script.copy(0, first, {"rng": second["rng"], "accelerate": {"step": 3}})
    names = sorted(path.name for path in (script.root / "checkpoint_0").glob("random_states_*"))
    assert names == ["random_states_0.pkl", "random_states_1.pkl"]
    of_second = torch.load(script.root / "checkpoint_0" / "random_states_1.pkl", weights_only=False)
    assert torch.equal(of_second["torch_manual_seed"], second["rng"]["torch"])
    assert of_second["step"] == 3
    assert mark_of(str(script.root / "checkpoint_0"))["files"].count("random_states_1.pkl") == 1
