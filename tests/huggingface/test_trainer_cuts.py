"""A ``Trainer`` killed in the middle of a step goes on bit for bit as if nothing had happened.

Compared with a training without lazysnap that nothing interrupts: batches, losses, random numbers before and after each
step, logs, learning rates, evaluations, stock checkpoints, weights, optimizer, and all state at the end.
"""

import json
import signal
from pathlib import Path

import pytest
from support.programs import TWO_RANKS, output_of

PROGRAM = str(Path(__file__).parent / "hf_training.py")
NEVER = 1000
DEATHS = {
    "base": (1, 2, 4, (6, "epoch"), 6, 7, 9, 12, 14),
    "accumulation": (1, 3, (4, "epoch"), 5),
    "smoothing": (4, 6),
    "grouped": (1, 9),
    "best": (1, (4, "evaluation"), 5, (8, "save"), 9, 14),
    "epochs": ((6, "evaluation"), 6, (12, "save"), 12, 14, (15, "evaluation")),
    "stopped": (3, 5),
    "eval_on_start": (2, 6),
    "stock_saves": (3, 7),
    "lora": (3, 11),
    "workers": (2, 11),
    "max_steps": (5, 14),
    "stream": (4, 13),
    "stream_accumulation": (1, 4),
    "tokens": (3, 7),
    "bf16": (4, 9),
    "not_skipping": (4, 6),
}
"""Each training dies at these in turn: inside the step behind a captured one, or at what is done between a step and the
next one. The base case has each place within an epoch, the others those at which they differ from it.
"""


class Trainings:
    """Runs the program, and reads what it recorded."""

    def __init__(self, zygote, directory):
        self.zygote, self.directory = zygote, directory
        self.references = {}

    def run(self, case, directory, name, *step, status=0):
        directory.mkdir(parents=True, exist_ok=True)
        output = directory / f"{name}.output"
        ended = self.zygote.run([PROGRAM, case, str(directory), name, *map(str, step)], {}, output)
        assert ended == status, output.read_text()[-6000:]
        lines = (directory / name).read_text().replace(str(directory), "…").splitlines()
        return [json.loads(line) for line in lines], output.read_text()

    def reference(self, case):
        if case not in self.references:
            self.references[case], _ = self.run(case, self.directory / case, "stock")
        return self.references[case]


@pytest.fixture(scope="session")
def trainings(zygote, tmp_path_factory):
    return Trainings(zygote, tmp_path_factory.mktemp("references"))


def from_step(record, step):
    """What happened from the first batch on that was trained behind ``step``."""
    return record[next(index for index, event in enumerate(record) if event[:2] == ["batch", step]) :]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.quick if case == "smoothing" else ()) for case in DEATHS]
)
def test_killed_in_steps_of_a_training_of_any_kind_it_goes_on_exactly(trainings, case, tmp_path):
    """Killed between two steps it does the whole end of the step again."""
    whole, captured = trainings.reference(case), None
    for number, death in enumerate([*DEATHS[case], None]):
        words = death if isinstance(death, tuple) else (death,) * (death is not None)
        record, output = trainings.run(
            case, tmp_path, f"start{number}", *words, status=0 if death is None else -signal.SIGKILL
        )
        if captured is not None:
            assert f"resumed step {captured} of run" in output, output
            assert "from memory" in output
            first = next(event for event in record if event[0] == "batch")
            assert first[1] == captured
            got, wanted = from_step(record, captured), from_step(whole, captured)
            assert got == (wanted if death is None else wanted[: len(got)]), f"resumed behind step {captured}"
        captured = death[0] - 1 if isinstance(death, tuple) else death


def test_every_kind_of_training_is_cut():
    from hf_training import CASES  # Transformers takes seconds, in each worker

    assert set(DEATHS) | {"two_ranks"} == set(CASES)


def test_a_finished_training_that_is_started_again_trains_nothing_and_ends_the_same(trainings, tmp_path):
    whole = trainings.reference("best")
    trainings.run("best", tmp_path, "first", NEVER)
    again, output = trainings.run("best", tmp_path, "again")
    assert "nothing is left to train" in output
    assert "is the last step of this training" in output
    assert not [event for event in again if event[0] in ("batch", "evaluated", "saved")]
    assert again[-1] == whole[-1]


def test_killed_in_the_first_step_it_starts_fresh(trainings, tmp_path):
    trainings.run("base", tmp_path, "killed", 0, status=-signal.SIGKILL)
    _, output = trainings.run("base", tmp_path, "resumed")
    assert "starting fresh" in output


def torchrun(directory, name, *step, status=0):
    said = output_of(*TWO_RANKS, PROGRAM, "two_ranks", str(directory), name, *map(str, step), code=status)
    ranks = [directory / f"{name}.{rank}" for rank in range(2)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in ranks], said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_go_on_exactly_when_one_of_them_was_killed(tmp_path):
    (tmp_path / "out").mkdir()
    whole, _ = torchrun(tmp_path, "stock")
    torchrun(tmp_path, "killed", 5, status=1)
    resumed, output = torchrun(tmp_path, "resumed")
    assert "resumed step 4 of run" in output
    assert "step 5 was trained again and is identical bit for bit" in output
    assert [from_step(record, 5) for record in resumed] == [from_step(record, 5) for record in whole]
