"""The benchmark runs, judges what it measured, and compares with another checkout."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compare, levels, stall
from benchmarks.frame import Report, Targets, cell, table

ROOT = Path(__file__).parent.parent
NOTHING = {"boundary_s": 0.0, "longest_boundary_s": 0.0, "blocked_s": 0.0, "lost_s": 0.0, "start_lost_s": 0.0}


@pytest.fixture
def report(tmp_path):
    return Report("made-up", argparse.Namespace(out=tmp_path, json=False))


def run(*arguments, code=0, **environment):
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    how = {"capture_output": True, "text": True, "timeout": 880, "check": False, "cwd": ROOT}
    done = subprocess.run(command, env={**os.environ, **environment}, **how)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestTables:
    def test_numbers_stand_right_and_texts_left(self):
        made = table("Title", ("who", "ms"), [("a", 1234.5), ("bcd", None)])

        assert made.splitlines() == [
            "Title:", "", "| who |    ms |", "| --- | ----: |", "| a   | 1,234 |", "| bcd |     - |",
        ]  # fmt: skip

    def test_of_several_values_the_median_and_the_range_are_shown(self):
        assert cell([3.0, 1.0, 2.0]) == "2 (1 to 3)"
        assert cell([5.0, 5.0]) == "5"

    def test_what_was_not_measured_is_not_called_met(self):
        made = Targets()
        made.check("below", "<= {} s", 2, 1.9)
        made.check("above", ">= {} times", 2, 1.9)
        made.check("missing", "<= {} s", 2, float("nan"))

        assert [verdict for *_, verdict in made.rows] == ["met", "NOT MET", "not measured"]


def made_up():
    """A state of 1 GB, rates of 10 and 2 GB/s, steps of one second."""
    found = {"none": 0.0, "torch-save": 3.0, "lightning-async": 0.8, "dcp-thread": 0.4}
    found |= {"lazysnap-memory": 0.004, "lazysnap-disk": 0.004}
    made = {}
    for method, blocked_s in found.items():
        seconds = dict.fromkeys(NOTHING, blocked_s)
        made[method] = {"method": method, "base_step_s": 1.0, "state_bytes": 10**9, "peak_bytes": 10**9, **seconds}
    for method in ("lazysnap-memory", "lazysnap-disk"):
        made[method] |= {"populate_s": 1.5, "slot_bytes": 2 * 10**9, "peak_bytes": 3 * 10**9}
    made["lazysnap-disk"] |= {"durable_s": [0.9, 0.55, 0.55], "durable_when_idle_s": [0.55]}
    return made


def judged(report, made):
    for name, rate in (("memcpy_1_thread", 8e9), ("memcpy_all_threads", 10e9), ("o_direct", 2e9)):
        report.note({"measure": "limit", "name": name, "bytes_per_s": rate})
    for line in made.values():
        report.note({"measure": "method", **line})
    return stall.targets(report).rows


def test_good_figures_meet_every_target(report):
    assert {verdict for *_, verdict in judged(report, made_up())} == {"met"}


@pytest.mark.parametrize(
    ("method", "change", "line"),
    [
        ("torch-save", {"blocked_s": 0.3}, "against torch-save"),
        ("dcp-thread", {"blocked_s": 0.05}, "best asynchronous peer"),
        ("lazysnap-memory", {"longest_boundary_s": 0.006}, "boundary"),
        ("lazysnap-memory", {"start_lost_s": 3.1}, "lost at the start"),
        ("lazysnap-memory", {"lost_s": 0.21}, "lost per snapshot"),
        ("lazysnap-memory", {"peak_bytes": 3.3 * 10**9}, "memory beyond"),
        ("lazysnap-disk", {"durable_s": [0.5, 0.7, 0.7]}, "durable, beside"),
        ("lazysnap-disk", {"durable_when_idle_s": [0.7]}, "durable, idle"),
    ],
)
def test_a_figure_beyond_its_target_is_not_met(report, method, change, line):
    made = made_up()
    made[method] |= change

    missed = [text for text, *_, verdict in judged(report, made) if verdict == "NOT MET"]

    assert missed
    assert all(line in text for text in missed)


def test_a_method_that_failed_is_not_measured(report):
    made = made_up()
    del made["torch-save"], made["lazysnap-disk"]

    verdicts = [verdict for *_, verdict in judged(report, made)]

    assert verdicts.count("not measured") == 1 + 7
    assert "NOT MET" not in verdicts


def rates(report, level, seconds):
    """The same times for writing and reading."""
    for direction in ("write", "read"):
        for who, taken in seconds.items():
            facts = {"measure": "rate", "level": level, "direction": direction, "who": who, "bytes": 1 << 30}
            report.note({**facts, "seconds": taken, "cpu_s": [0.1] * len(taken)})
    return [levels.ratio(ours, raw) for _, _, ours, raw in levels.comparisons(report)]


def test_each_round_is_compared_with_its_own_raw_one(report):
    # The machine was three times slower in the last two rounds: no rate of ours is below 85 % of its neighbour.
    found = rates(report, "local", {"O_DIRECT": [1.0, 1.0, 3.0, 3.0], "lazysnap": [1.1, 1.1, 3.3, 3.3]})
    assert found == [pytest.approx(1 / 1.1)] * 2


def test_who_comes_first_in_a_round_has_no_advantage(report):
    # First is three times as fast as second, whoever it is; the fifth round has no other to make up for it.
    seconds = {"O_DIRECT": [1.0, 3.0, 1.0, 3.0, 1.0], "lazysnap": [3.0, 1.0, 3.0, 1.0, 3.0]}
    assert rates(report, "nfs", seconds) == [1.0, 1.0]


def test_the_faster_of_two_raw_ways_is_the_limit(report):
    assert rates(report, "nfs", {"O_DIRECT": [2.0], "buffered": [1.0], "lazysnap": [1.25]}) == [0.8, 0.8]


def test_figures_of_two_checkouts_are_paired_by_what_they_are_of():
    line = {"measure": "method", "method": "none", "base_step_s": 1.0, "durable_s": [1.0, 2.0], "lost_s": None}
    before = [[{**line, "durable_when_idle_s": []}]] * 2
    assert compare.figures(stall, before) == {
        ("method none", "base_step_s"): [1.0, 1.0],
        ("method none", "durable_s"): [1.0, 2.0, 1.0, 2.0],
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_levels_are_measured(tmp_path):
    how = ("--levels", "memory,local", "--size-mb", 2, "--rounds", 2, "--repeats", 0)
    run("levels", *how, "--out", tmp_path / "out", "--directory", tmp_path / "disk")

    machine, *found = lines(tmp_path / "out" / "levels.jsonl")
    assert machine["size_mb"] == 2
    measured = [(one["measure"], one["level"], one["direction"], one["who"]) for one in found]
    ways = {"memory": ("memcpy", "lazysnap"), "local": ("O_DIRECT", "lazysnap")}
    assert measured == [("rate", level, how, who) for level in ways for how in ("write", "read") for who in ways[level]]
    assert all(len(one["seconds"]) == len(one["cpu_s"]) == 2 for one in found)
    assert not list((tmp_path / "disk").iterdir())
    assert "Targets" in (tmp_path / "out" / "levels.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_death_of_training_and_keeper_is_measured(tmp_path):
    how = ("--rounds", 0, "--repeats", 1, "--train-mb", 1, "--kill-at", 4, "--step-s", 0.05)
    run("levels", "--levels", "local", *how, "--out", tmp_path)

    _, line = lines(tmp_path / "levels.jsonl")
    assert (line["measure"], line["level"]) == ("loss", "local")
    # It may have gone on a little while the order to kill it was on its way. What it resumed came from the disk.
    [killed_at, resumed, lost] = [line[name][0] for name in ("killed_at", "resumed", "lost")]
    assert killed_at >= 4
    assert 1 <= resumed <= killed_at
    assert lost == killed_at - resumed
    assert line["restore_s"][0] < line["first_step_s"][0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stalls_are_measured_here_and_in_another_checkout(tmp_path):
    """The other one is this one, seen from elsewhere."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "lazysnap").symlink_to(ROOT / "lazysnap")
    methods = ["none", "lazysnap-disk"]
    how = ["--params", "tiny", "--threads", 1, "--snapshots", 2, "--every", 20, "--methods", *methods]

    done = run("compare", "--against", other, "--out", tmp_path / "out", "stall", *how)

    for name in ("before", "after"):
        found = lines(tmp_path / "out" / f"{name}-0" / "stall.jsonl")
        assert [line["method"] for line in found if line["measure"] == "method"] == methods
    row = next(row for row in done.stdout.splitlines() if "lazysnap-disk" in row and " blocked_s" in row)
    assert row.count(" - ") == 0  # both have it, and a ratio


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_cost_of_many_ranks_is_counted_and_simulated(tmp_path):
    run("scale", "--counted", 2, "--steps", 1, "--simulated", 8, 16, "--out", tmp_path)

    found = lines(tmp_path / "scale.jsonl")
    assert not [line for line in found if line["measure"] == "left out"]
    counted = [line for line in found if line["measure"] == "counted"]
    assert [line["kind"] for line in counted] == ["ddp", "fsdp"]
    for line in counted:
        assert line["collectives"]["per_snapshot"] == 0 < line["collectives"]["planning"]
        assert line["messages_per_snapshot_and_rank"] > 0
        assert line["files_per_snapshot"] == 4
        # Together one copy: each half of it, and what is each rank's own.
        assert max(line["shard_bytes"]) < 0.51 * line["bytes_per_snapshot"]
    assert {line["ranks"] for line in found if line["measure"] == "restart"} == {8, 16}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_restarts_are_measured_phase_by_phase_and_are_exact(tmp_path):
    how = ("--levels", "memory,local", "--methods", "dcp,lazysnap", "--ranks", 1, "--rounds", 1)
    run("restore", "--size", "tiny", *how, "--out", tmp_path)

    found = [line for line in lines(tmp_path / "restore.jsonl") if line["measure"] == "restore"]
    assert [(line["level"], line["method"]) for line in found] == [
        ("memory", "lazysnap"), ("local", "dcp"), ("local", "lazysnap"),
    ]  # fmt: skip
    for line in found:
        assert line["total"][0] == pytest.approx(sum(line[phase][0] for phase in ("imports", "build", "load", "step")))
        assert line["exact"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rollbacks_are_measured(tmp_path):
    run("rollback", "--megabytes", 13, "--repeats", 2, "--out", tmp_path)

    _, *found = lines(tmp_path / "rollback.jsonl")
    assert [(line["case"], len(line["seconds"])) for line in found] == [("newest", 2), ("older", 2)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gpu_benchmark_resumes_what_it_captured_from_memory_and_from_disk(tmp_path):
    """On a CPU: the program is the same, the figures mean nothing."""
    run("gpu", "--device", "cpu", "--sizes-gb", 0.005, "--no-tests", "--out", tmp_path)

    found = lines(tmp_path / "gpu.jsonl")
    [capture] = [line for line in found if line["measure"] == "method"]
    assert capture["torn"] == 0
    restores = [line for line in found if line["measure"] == "restore"]
    assert [(line["level"], line["exact"]) for line in restores] == [("memory", True), ("local", True)]


def test_the_gpu_benchmark_without_a_device_says_what_to_do(tmp_path):
    done = run("gpu", "--out", tmp_path, code=1, CUDA_VISIBLE_DEVICES="")

    assert "make gpu PYTHON=" in done.stderr
