"""``lazysnap advise``: what is said before a training is what it takes; of a run, what it measured."""

import pytest
import torch
from cli_level import run, run_json
from support.waiting import until

from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine, events
from lazysnap.shard.names import events_file_name


@pytest.mark.slow
def test_what_is_planned_is_what_a_training_takes(capsys, tmp_path):
    model = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    config = SnapshotConfig(levels=(PersistentLevel(str(tmp_path), every_n_steps=1),))
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    model(torch.ones(2, 1000)).sum().backward()
    optimizer.step()
    assert engine._wait_ready(60)
    assert engine.boundary(1)
    assert engine.wait(1, until="captured", timeout_s=60)

    code, planned = run_json(capsys, "advise", "--params", "1m")

    assert code == 0
    assert planned["captured_bytes"] == pytest.approx(engine.statistics().shard_bytes, rel=0.01)
    assert planned["slots_per_rank"] == len(engine._client.slots())
    assert engine.close()
    until(lambda: bool(events.read(str(tmp_path))))
    _, told = run_json(capsys, "advise", str(tmp_path))
    assert "20 needed" in told["too_young"][0]  # one step tells nothing of the time of a step
    assert list(told["snapshots"]) == ["memory", str(tmp_path)]


def test_ranks_of_a_node_share_one_copy_and_sharded_ones_split_it_between_nodes(capsys):
    words = ["advise", "--params", "7b", "--ranks", "16"]
    _, alone = run_json(capsys, *words)
    _, ddp = run_json(capsys, *words, "--nodes", "2")
    _, fsdp = run_json(capsys, *words, "--nodes", "2", "--sharding", "fsdp")

    assert alone["captured_bytes"] == ddp["captured_bytes"] == fsdp["captured_bytes"] == 84e9
    assert alone["memory_per_node_bytes"] == ddp["memory_per_node_bytes"] == 5 * 84e9
    # Of what each node has alone also the parity of two steps.
    assert (fsdp["memory_per_node_bytes"], fsdp["parity_per_node_bytes"]) == ((5 + 2) * 42e9, 2 * 42e9)
    _, sgd = run_json(capsys, *words, "--bytes-per-param", "4")
    assert sgd["captured_bytes"] == 28e9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--params", "seven"], "such as 7b"),
        (["--params", "7b", "--ranks", "7", "--nodes", "2"], "as many on every node"),
        (["--params", "7b", "--nodes", "0"], "at least one rank"),
        (["--params", "1m", "--mtbf", "often"], "such as 0.4s"),
        ([], "name the directory of a run"),
    ],
)
def test_numbers_that_make_no_sense_are_one_clear_error(capsys, words, said):
    try:
        code = run("advise", *words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err


# A run

RUN = "0123456789abcdef"


class Journal:
    """The file of events of a run: what keepers would have written."""

    def __init__(self, directory, nodes=1):
        self.directory, self.now, self.found = directory, 1000.0, []
        self.add(events.KeeperStarted, nodes=nodes)
        self.starts = 0

    def add(self, kind, **fields):
        self.found.append(kind(t=self.now, **fields))
        name = events_file_name(RUN, 0)
        (self.directory / name).write_bytes(b"".join(map(events.encode, self.found)))

    def start(self, first, last, *, step_s, stall_s, every=1, down_s=3.0, own_s=7.0):
        """A start that begins ``down_s`` after the last end, takes ``own_s`` to its first step, and then dies."""
        self.starts += 1
        start, began = f"s{self.starts}", self.now + down_s
        self.now = began + own_s
        of = {"rank": 0, "start": start}
        self.add(events.TrainerStarted, **of, step=first, world_size=4, every_n_steps=every, began=began)
        waited = 0.0
        for step in range(first + 1, last + 1):
            is_due = step % every == 0
            waited += stall_s * is_due
            self.now += step_s + stall_s * is_due
            taken = {"captured": step // every * every, "taken": self.now, "copy_s": 0.5}
            self.add(events.Progress, **of, step=step, waited_s=waited, **taken)
        self.add(events.Stored, level="/level", step=last, bytes=10**9, seconds=20.0)
        self.add(events.TrainerEnded, **of, step=last, how="died")


def test_on_more_nodes_a_run_keeps_its_ranks(capsys, tmp_path):
    journal = Journal(tmp_path)
    journal.start(0, 50, step_s=2.0, stall_s=0.06)

    words = ["advise", str(tmp_path), "--params", "1m"]
    _, one = run_json(capsys, *words)
    _, two = run_json(capsys, *words, "--nodes", "2")

    for result in (one, two):
        ranks = result["memory_per_node_bytes"] / result["memory_per_rank_bytes"]
        assert ranks == pytest.approx(4 if result is one else 2)


def test_a_run_is_told_from_what_it_measured(capsys, tmp_path):
    journal = Journal(tmp_path, nodes=2)
    for first in range(0, 200, 50):
        journal.start(first, first + 50, step_s=2.0, stall_s=0.06)

    code, told = run_json(capsys, "advise", str(tmp_path))

    assert code == 0
    assert told["too_young"] is None
    memory = told["snapshots"]["memory"]
    level = told["snapshots"]["/level"]
    assert memory["every_n_steps"] == 3  # 0.06 s of 6.06 s
    assert told["overhead"] == pytest.approx(0.06 / 6.06)
    trained_s = 4 * (7 + 50 * 2.06)
    assert told["mtbf_s"] == pytest.approx(trained_s / 3)
    assert level["every_n_steps"] % 3 == 0
    assert level["every_s"] >= 2 * 20, "storage is busy for at most half of the time"
    # A failure costs the 12 s until the first boundary after it, half an interval, and the copy.
    rate = 1 / told["mtbf_s"]
    expected = (2 / 2.02) * (1 - rate * (3 * 2.02 / 2 + 0.5)) / (1 + rate * 12.06)
    assert memory["goodput"] == pytest.approx(expected, rel=0.01)
    assert level["goodput"] < memory["goodput"]
    assert level["lost_s"] > memory["lost_s"]

    assert run("advise", str(tmp_path)) == 0
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 24
    assert {word for word in ("memory", "goodput", "/level") if word not in screen} == set()


def test_a_run_that_is_too_young_to_say_is_told_so(capsys, tmp_path):
    Journal(tmp_path).start(0, 5, step_s=2.0, stall_s=0.06)

    code, told = run_json(capsys, "advise", str(tmp_path))
    assert (code, told["snapshots"]["memory"]["goodput"]) == (0, None)
    assert "4 steps timed, 20 needed" in " ".join(told["too_young"])
    assert "0 restarts" in " ".join(told["too_young"])

    _, told = run_json(capsys, "advise", str(tmp_path), "--step-time", "2s", "--mtbf", "5h", "--persist", "1min")
    assert told["snapshots"]["memory"]["goodput"] > 0.97
    assert told["snapshots"]["/level"]["lost_s"] > 60


@pytest.mark.parametrize("command", ["advise", "report"])
def test_a_level_without_events_is_an_error_that_says_what_to_name(capsys, tmp_path, command):
    assert run(command, str(tmp_path)) == 2
    assert "name the first level of a job" in capsys.readouterr().err
    assert run(command, str(tmp_path / "misspelt")) == 2
    assert "does not exist" in capsys.readouterr().err


def test_of_a_model_alone_no_empty_table_is_shown(capsys):
    assert run("advise", "--params", "7b") == 0
    assert "lost per failure" not in capsys.readouterr().out
    assert run("advise", "--params", "7b", "--persist", "30s") == 0
    assert "lost per failure" in capsys.readouterr().out
