"""The benchmark runs, judges what it measured, and compares with another checkout."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import compare, gpu, levels, scale, stall
from benchmarks.__main__ import parser
from benchmarks.report import Report

ROOT = Path(__file__).parent.parent
NOTHING = ("boundary_ms", "longest_boundary_ms", "blocked_ms", "lost_ms", "start_lost_ms")


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path, "made-up")


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    how = {"capture_output": True, "text": True, "timeout": 880, "check": False, "cwd": ROOT}
    done = subprocess.run(command, **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


@pytest.fixture
def measured(report, forking_python, monkeypatch):
    """Run a benchmark here, and return its lines of a measure. Its workers are forked, their frameworks imported."""
    monkeypatch.setattr(sys, "executable", forking_python)

    def measured(what, measure, *arguments):
        args = parser().parse_args([what, *map(str, arguments)])
        assert args.run(args, report) is None
        assert not report.of("left out")
        return report.of(measure)

    return measured


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_was_not_measured_is_not_called_met(report):
    report.target("below", "<= {} s", 2, 1.9)
    report.target("above", ">= {} times", 2, 1.9)
    report.target("missing", "<= {} s", 2, report.find(measure="nothing")["seconds"])

    assert [line["verdict"] for line in report.of("target")] == ["met", "NOT MET", "not measured"]


def made_up():
    """A state of 1 GB, rates of 10 and 2 GB/s, steps of one second."""
    found = {"none": 0.0, "torch-save": 3.0, "lightning-async": 0.8, "dcp-thread": 0.4}
    found |= {"lazysnap-memory": 0.004, "lazysnap-disk": 0.004}
    made = {}
    for method, blocked_s in found.items():
        figures = dict.fromkeys(NOTHING, 1e3 * blocked_s)
        made[method] = {"method": method, "plain_step_ms": 1e3, "state_mb": 1e3, "peak_mb": 1e3, **figures}
    for method in ("lazysnap-memory", "lazysnap-disk"):
        made[method] |= {"raw_populate_ms": 1.5e3, "slots_mb": 2e3, "peak_mb": 3e3}
    made["lazysnap-disk"] |= {"durable_s": [0.55, 0.55], "idle_s": [0.55]}
    return made


def judged(report, made):
    for name, rate in (("memcpy, 1 thread", 8.0), ("memcpy, 2 threads", 10.0), ("O_DIRECT", 2.0)):
        report.note({"measure": "limit", "limit": name, "gb_per_s": rate})
    for line in made.values():
        report.note({"measure": "stall", **line})
    stall.targets(report)
    return [(line["target"], line["verdict"]) for line in report.of("target")]


def test_good_figures_meet_every_target(report):
    assert {verdict for _, verdict in judged(report, made_up())} == {"met"}


@pytest.mark.parametrize(
    ("method", "change", "line"),
    [
        ("torch-save", {"blocked_ms": 300.0}, "against torch-save"),
        ("dcp-thread", {"blocked_ms": 50.0}, "best peer"),
        ("lazysnap-memory", {"longest_boundary_ms": 6.0}, "boundary"),
        ("lazysnap-memory", {"start_lost_ms": 3100.0}, "lost at the start"),
        ("lazysnap-memory", {"lost_ms": 210.0}, "lost per snapshot"),
        ("lazysnap-memory", {"peak_mb": 3300.0}, "memory beyond"),
        ("lazysnap-disk", {"durable_s": [0.7, 0.7]}, "durable, during training"),
        ("lazysnap-disk", {"idle_s": [0.7]}, "durable, idle"),
    ],
)
def test_a_figure_beyond_its_target_is_not_met(report, method, change, line):
    made = made_up()
    made[method] |= change

    missed = [text for text, verdict in judged(report, made) if verdict == "NOT MET"]

    assert missed
    assert all(line in text for text in missed)


def test_a_method_that_failed_is_not_measured(report):
    made = made_up()
    del made["torch-save"], made["lazysnap-disk"]

    verdicts = [verdict for _, verdict in judged(report, made)]

    assert verdicts.count("not measured") == 1 + 7
    assert "NOT MET" not in verdicts


def test_each_round_is_compared_with_its_own_raw_one():
    # The machine was three times slower in the last two rounds: no rate of ours is below 85 % of its neighbour.
    assert levels.ratio([1.1, 1.1, 3.3, 3.3], [1.0, 1.0, 3.0, 3.0]) == pytest.approx(1 / 1.1)


def test_who_comes_first_in_a_round_has_no_advantage():
    # First is three times as fast as second, whoever it is; the fifth round has no other to make up for it.
    assert levels.ratio([3.0, 1.0, 3.0, 1.0, 3.0], [1.0, 3.0, 1.0, 3.0, 1.0]) == 1.0
    assert levels.ratio([1.25], [1.0]) == 0.8


def test_figures_of_two_checkouts_are_paired_by_what_they_are_of():
    line = {"measure": "stall", "method": "none", "plain_step_ms": 1.0, "durable_s": [1.0, 2.0], "lost_ms": None}
    counted = {"measure": "counted", "kind": "ddp", "ranks": 2, "collectives_close": 0}
    assert compare.figures([line, line, counted, {"measure": "machine", "cores": 2}]) == {
        ("stall none", "plain_step_ms"): [1.0, 1.0],
        ("stall none", "durable_s"): [1.0, 2.0, 1.0, 2.0],
        ("counted ddp 2", "collectives_close"): [0],
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rates_of_a_level_are_measured(measured, report, monkeypatch, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    how = ("--levels", "local", "--size-mb", 2, "--rounds", 1)

    rates = measured("levels", "rate", *how)

    of_rates = [(rate["level"], rate["direction"], rate["raw_limit"]) for rate in rates]
    assert of_rates == [("local", "write", "O_DIRECT"), ("local", "read", "O_DIRECT")]
    assert all(len(rate["raw_mb_per_s"]) == len(rate["lazysnap_mb_per_s"]) == 1 for rate in rates)
    assert not list(disk.iterdir())
    assert report.of("target")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stalls_are_measured(measured):
    how = ("--params", "tiny", "--threads", 1, "--snapshots", 2, "--every", 20, "--methods", "lazysnap-disk")

    [line] = measured("stall", "stall", *how)

    assert line["method"] == "lazysnap-disk"
    assert len(line["idle_s"]) == 3  # those of the training may be skipped: its steps take milliseconds
    assert all(line[name] is not None for name in NOTHING)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_cost_of_several_ranks_is_counted(measured, monkeypatch):
    monkeypatch.setattr(scale, "KINDS", ("fsdp",))  # each is a dozen processes

    [line] = measured("scale", "counted", "--counted", 2)

    assert line["collectives_per_snapshot"] == 0 < line["collectives_planning"]
    assert line["messages_per_snapshot_and_rank"] > 0
    assert line["files_per_snapshot"] == 2
    # Together one copy: each half of it, and what is each rank's own.
    assert max(line["mb_per_rank"]) < 0.51 * line["mb_per_snapshot"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_restarts_are_measured_phase_by_phase_and_are_exact_here_and_in_another_checkout(tmp_path):
    """As a command. The other checkout is this one, seen from elsewhere."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "lazysnap").symlink_to(ROOT / "lazysnap")
    how = ("--size", "tiny", "--levels", "local", "--methods", "lazysnap", "--ranks", 1, "--rounds", 1)

    done = run("compare", "--against", other, "--out", tmp_path / "out", "restore", *how)

    for name in ("before", "after"):
        found = lines(tmp_path / "out" / f"{name}-0" / "restore.jsonl")
        [line] = [line for line in found if line["measure"] == "restore"]
        assert (line["level"], line["method"], line["exact"]) == ("local", "lazysnap", "yes")
        phases = ("imports_s", "build_s", "load_s", "step_s")
        assert line["total_s"][0] == pytest.approx(sum(line[phase][0] for phase in phases))
    row = next(row for row in done.stdout.splitlines() if "lazysnap" in row and " load_s" in row)
    assert row.count(" - ") == 0  # both have it, and a ratio
    assert "target:" in (tmp_path / "out" / "after-0" / "restore.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_protection_between_nodes_is_measured_and_a_lost_node_is_computed(measured, report):
    """What is restored is compared by the benchmark itself."""
    [lost] = measured("parity", "lost node", "--nodes", 3, "--megabytes", 5, "--rounds", 1)

    for what in ("encode", "rebuild"):
        [found] = report.of(what)
        assert (found["nodes"], found["may_be_lost"]) == (3, 1)
        assert [len(found[name]) for name in ("gb_per_s", "tcp_gb_per_s")] == [1, 1]
    phases = ("imported_s", "built_s", "met_s", "fetched_s", "loaded_s", "step_s")
    assert lost["total_s"][0] == pytest.approx(sum(lost[name][0] for name in phases))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gpu_benchmark_resumes_what_it_captured_from_memory(measured, report, monkeypatch):
    """On a CPU: the program is the same, the figures mean nothing. How a disk is read, is tried with ``restore``."""
    monkeypatch.setattr(gpu, "MOST_ON_DISK_GB", 0.0)

    [restored] = measured("gpu", "restore", "--device", "cpu", "--sizes-gb", "0.005")

    assert (restored["level"], restored["exact"]) == ("memory", "yes")
    [capture] = report.of("stall")
    assert capture["torn"] == 0


@pytest.mark.slow
def test_the_gpu_benchmark_without_a_device_says_what_to_do(report, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert "make gpu PYTHON=" in gpu.run(parser().parse_args(["gpu"]), report)
