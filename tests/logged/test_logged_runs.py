"""After a kill and a restart, loggers go on with the run that they had: the same id, and no step twice."""

import csv
import importlib.util
import pathlib
import shutil
import signal

import pytest
from logged_training import CAPTURED, DIES_IN, STEPS, rows_of
from support.zygote import Zygote

for package in ("tensorboard", "mlflow", "wandb"):
    if importlib.util.find_spec(package) is None:  # an import takes seconds, and every worker collects this
        pytest.skip(f"needs {package}", allow_module_level=True)

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

pytestmark = pytest.mark.slow
PROGRAM = str(pathlib.Path(__file__).with_name("logged_training.py"))
FINISHED = 3
"""The status of a run of MLflow in its file."""
IMPORTED = (
    "torch._dynamo",
    "torch.utils.tensorboard",
    "lightning.pytorch",
    "transformers.trainer",
    "transformers.integrations",
    "accelerate",
    "mlflow",
    "wandb",
    "lazysnap.engine.engine",
    "lazysnap.integrations.accelerate",
    "lazysnap.integrations.lightning",
    "lazysnap.integrations.transformers",
)


@pytest.fixture(scope="module")
def logging_zygote():
    zygote = Zygote(IMPORTED)
    yield zygote
    zygote.close()


class Training:
    """Starts of one training, and what its loggers wrote."""

    def __init__(self, zygote, framework, directory):
        self._zygote, self._framework, self.directory = zygote, framework, directory
        self.output = ""

    def start(self, dies_in=0, change="none"):
        output = self.directory / "output"
        environment = {
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "MLFLOW_TRACKING_URI": f"file:{self.directory}/ml",
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(self.directory),
            "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL": "0.05",
            "WANDB_SILENT": "true",
            "WANDB_ERROR_REPORTING": "false",
        }
        arguments = [PROGRAM, self._framework, str(self.directory), str(dies_in), change]
        status = self._zygote.run(arguments, environment, output)
        self.output = output.read_text()
        assert status == (-signal.SIGKILL if dies_in else 0), self.output[-5000:]
        if not dies_in:
            assert f"resumed step {CAPTURED}" in self.output

    def csv(self):
        (path,) = self.directory.glob("lightning_logs/*/metrics.csv")
        with path.open(newline="") as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]

    def tensorboard(self, directory, tag):
        (place,) = {path.parent for path in self.directory.glob(f"{directory}/events*")}
        found = EventAccumulator(str(place))
        found.Reload()
        return [event.step for event in found.Scalars(tag)]

    def mlflow_runs(self):
        """By id, the last status of each run that is not deleted."""
        found = {}
        for path in (self.directory / "ml").glob("*/*/meta.yaml"):
            lines = dict(line.split(": ", 1) for line in path.read_text().splitlines() if ": " in line)
            if lines["lifecycle_stage"] == "active":
                found[path.parent.name] = int(lines["status"])
        return found

    def mlflow(self):
        (run,), (status,) = self.mlflow_runs().keys(), self.mlflow_runs().values()
        assert status == FINISHED
        (path,) = (self.directory / "ml").glob(f"*/{run}/metrics/loss")
        return [int(line.split()[2]) for line in path.read_text().splitlines()]

    def wandb_ids(self):
        return {path.name.rpartition("-")[2] for path in (self.directory / "wandb").glob("offline-run-*")}

    def wandb(self, loss, step):
        """By start, the mark of the restart, and the steps of rows that have a loss."""
        found = []
        for path in sorted((self.directory / "wandb").glob("offline-run-*/*.wandb")):
            rows = list(rows_of(path.read_bytes()))
            marks = [row["lazysnap/resumed_step"] for row in rows if "lazysnap/resumed_step" in row]
            found.append(((marks or [0])[0], [row[step] for row in rows if loss in row]))
        return found


def joined(starts):
    """The steps of all starts; the mark of a restart replaces those behind it."""
    steps = []
    for first, found in starts:
        steps = [step for step in steps if step < first] + found
    return steps


def test_lightning(logging_zygote, tmp_path):
    """Also where another hyperparameter is logged, which MLflow refuses."""
    training, wanted = Training(logging_zygote, "lightning", tmp_path), list(range(STEPS))
    training.start(DIES_IN)
    training.start(change="rate")

    assert training.csv() == wanted
    assert training.tensorboard("tb/*", "loss") == wanted
    assert training.mlflow() == wanted
    assert len(training.wandb_ids()) == 1
    assert joined(training.wandb("loss", "trainer/global_step")) == wanted
    assert training.output.count("MLflow keeps the parameters of the first start") == 1
    (checkpoints,) = tmp_path.glob("**/checkpoints")
    assert checkpoints.parent.name in training.mlflow_runs()


def test_a_run_of_lightning_that_cannot_go_on_is_named_and_training_does(logging_zygote, tmp_path):
    """W&B is used before the fit, the run of MLflow was removed."""
    training = Training(logging_zygote, "lightning", tmp_path)
    training.start(DIES_IN)
    (removed,), (earlier,) = training.mlflow_runs(), training.wandb_ids()
    (path,) = (tmp_path / "ml").glob(f"*/{removed}")
    shutil.rmtree(path)
    training.start(change="early")

    assert training.output.count(f"not to that of the snapshot ({earlier})") == 1
    assert len(training.wandb_ids()) == 2
    assert training.output.count(f"MLFlowLogger does not go on with its run: MlflowException: Run '{removed}'") == 1
    assert training.mlflow() == list(range(CAPTURED, STEPS))
    assert training.csv() == list(range(STEPS))


@pytest.mark.parametrize("change", ["none", "first", "held"])
def test_accelerate(logging_zygote, tmp_path, change):
    """``first``: the snapshot is loaded before the trackers are initialised, else behind that. ``held``: the program
    gets the tracker of W&B between the two, and may hold its run.
    """
    training, wanted = Training(logging_zygote, "accelerate", tmp_path), list(range(1, STEPS + 1))
    training.start(DIES_IN, change)
    training.start(change=change)

    assert training.tensorboard("project", "loss") == wanted
    assert training.mlflow() == wanted
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    if change == "held":
        assert training.output.count("wandb logs to a new run") == 1
        assert len(training.wandb_ids()) == 2
    else:
        assert len(training.wandb_ids()) == 1
        assert joined(training.wandb("loss", "_step")) == wanted


def test_transformers(logging_zygote, tmp_path):
    """Also where another argument is logged, which MLflow refuses."""
    training, wanted = Training(logging_zygote, "transformers", tmp_path), list(range(1, STEPS + 1))
    training.start(DIES_IN)
    training.start(change="rate")

    assert training.tensorboard("runs/*", "train/loss") == wanted
    assert training.mlflow() == wanted
    assert len(training.wandb_ids()) == 1
    assert joined(training.wandb("train/loss", "train/global_step")) == wanted
