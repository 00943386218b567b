"""A ``Trainer`` killed in the middle of a step goes on bit for bit as if nothing had happened.

Compared with a training without lazysnap that nothing interrupts: batches, losses, random numbers before and after each
step, logs, learning rates, evaluations, stock checkpoints, weights, optimizer, and all state at the end.
"""

import json
import signal
from pathlib import Path

import pytest
from support.newest import PROVES
from support.ports import free_port
from support.zygote import ended

PROGRAM = str(Path(__file__).parent / "hf_training.py")
DEATHS = {
    "base": (0, 1, 4, (6, "epoch"), 6, 12, 14),
    "accumulation": (1, (4, "epoch"), 5),
    "shaped": (4, 6),
    "best": (1, (4, "evaluation"), (8, "save"), 9),
    "epochs": ((6, "evaluation"), (12, "save"), (15, "evaluation")),
    "stopped": (5,),
    "lora": (3, 11),
    "max_steps": (2, 11),
    "stream": (4, 13),
    "stream_accumulation": (4,),
    "not_skipping": (4,),
}
"""Each training dies at these in turn: inside the step behind a captured one, or at what is done between a step and the
next one. The base case has each place within an epoch, and the first step of all; the others die where they differ.
"""


class Trainings:
    """Runs the program, and reads what it recorded."""

    def __init__(self, zygote, directory):
        self.zygote, self.directory = zygote, directory
        self.references = {}

    def run(self, case, directory, name, *step, status=0):
        directory.mkdir(parents=True, exist_ok=True)
        output = directory / f"{name}.output"
        end = self.zygote.run([PROGRAM, case, str(directory), name, *map(str, step)], {}, output)
        assert end == status, output.read_text()[-6000:]
        return record_of(directory, name), output.read_text()

    def reference(self, case):
        if case not in self.references:
            self.references[case], _ = self.run(case, self.directory / case, "stock")
        return self.references[case]


@pytest.fixture(scope="session")
def trainings(zygote, tmp_path_factory):
    return Trainings(zygote, tmp_path_factory.mktemp("references"))


def record_of(directory, name):
    """What a start recorded."""
    lines = (directory / name).read_text().replace(str(directory), "…").splitlines()
    return [json.loads(line) for line in lines]


def from_step(record, step):
    """What happened from the first batch on that was trained behind ``step``."""
    return record[next(index for index, event in enumerate(record) if event[:2] == ["batch", step]) :]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.quick if case == "shaped" else ()) for case in DEATHS]
)
def test_killed_in_steps_of_a_training_of_any_kind_it_goes_on_exactly(trainings, case, tmp_path):
    """Killed between two steps it does the whole end of the step again."""
    whole, captured = trainings.reference(case), None
    for number, death in enumerate([*DEATHS[case], None]):
        words = death if isinstance(death, tuple) else (death,) * (death is not None)
        record, output = trainings.run(
            case, tmp_path, f"start{number}", *words, status=0 if death is None else -signal.SIGKILL
        )
        if captured == 0:
            assert "starting fresh" in output
        elif captured is not None:
            assert f"resumed step {captured} of run" in output, output
            assert "from memory" in output
        if captured is not None:
            first = next(event for event in record if event[0] == "batch")
            assert first[1] == captured
            got, wanted = from_step(record, captured), from_step(whole, captured)
            assert got == (wanted if death is None else wanted[: len(got)]), f"resumed behind step {captured}"
        captured = death[0] - 1 if isinstance(death, tuple) else death

    if case == "best":
        check_that_nothing_is_left(*trainings.run(case, tmp_path, "again"), whole)


def check_that_nothing_is_left(again, output, whole):
    """A training that is over and started again trains nothing, and ends the same."""
    assert "nothing is left to train" in output
    assert "raise that limit to continue" in output
    assert "is the last step of this training" in output
    assert not [event for event in again if event[0] in ("batch", "evaluated", "saved")]
    assert again[-1] == whole[-1]


def test_every_kind_of_training_is_cut():
    from hf_training import CASES  # Transformers takes seconds, in each worker

    assert set(DEATHS) | {"two_ranks"} == set(CASES)


def run_two_ranks(zygote, directory, name, *step):
    """Start both as a launcher does; what each recorded, and what they said."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", **PROVES}
    arguments = [PROGRAM, "two_ranks", str(directory), name, *map(str, step)]
    outputs = [directory / f"{name}.{rank}.output" for rank in range(2)]
    children = [
        zygote.start(arguments, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}, output)
        for rank, output in enumerate(outputs)
    ]
    statuses = ended(children)
    text = "\n".join(output.read_text() for output in outputs)
    assert statuses[0] == (-signal.SIGKILL if step else 0), text
    return [record_of(directory, f"{name}.{rank}") for rank in range(2)], text


def test_two_ranks_go_on_exactly_when_one_of_them_was_killed(zygote, tmp_path):
    (tmp_path / "out").mkdir()
    whole, _ = run_two_ranks(zygote, tmp_path, "stock")
    run_two_ranks(zygote, tmp_path, "killed", 5)
    resumed, output = run_two_ranks(zygote, tmp_path, "resumed")
    assert "resumed step 4 of run" in output
    assert "step 5 was trained again and is identical bit for bit" in output
    assert [from_step(record, 5) for record in resumed] == [from_step(record, 5) for record in whole]
