"""The benchmark runs, and judges what it measured."""

import copy
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    return report


def per_snapshot(blocked_s: float) -> dict[str, float]:
    return {
        "boundary_s": blocked_s / 2,
        "longest_boundary_s": blocked_s / 2,
        "blocked_s": blocked_s,
        "lost_s": blocked_s,
    }


def made_up() -> dict[str, dict]:
    """A state of 1 GB, rates of 10 and 2 GB/s, steps of one second."""
    peers = {"none": 0.0, "torch-save": 3.0, "lightning-async": 0.8, "dcp-thread": 0.4}
    own = {"lazysnap-memory": 0.004, "lazysnap-disk": 0.004}
    results = {"limits": {"memcpy_1_thread": 8e9, "memcpy_all_threads": 10e9, "o_direct": 2e9}}
    for method, blocked_s in (peers | own).items():
        cost = per_snapshot(blocked_s)
        results[method] = {"base_step_s": 1.0, "state_bytes": 10**9, "peak_bytes": 10**9, "first": cost, "later": cost}
    results["lazysnap-memory"]["peak_bytes"] = results["lazysnap-disk"]["peak_bytes"] = 3 * 10**9
    results["lazysnap-disk"] |= {"durable_s": [0.9, 0.55, 0.55], "durable_when_idle_s": 0.55}
    return results


def verdicts(report, results) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(report.judge(results))
    return console.file.getvalue()


def test_good_figures_meet_every_target(report):
    text = verdicts(report, made_up())
    assert "not met" not in text
    assert "not measured" not in text
    assert text.count(" met ") == 13


@pytest.mark.parametrize(
    ("method", "change", "line"),
    [
        ("torch-save", {"later": per_snapshot(0.3)}, "against torch.save"),
        ("dcp-thread", {"later": per_snapshot(0.05)}, "best asynchronous peer"),
        ("lazysnap-memory", {"later": per_snapshot(0.004) | {"longest_boundary_s": 0.006}}, "boundary"),
        ("lazysnap-memory", {"first": per_snapshot(0.2)}, "the first snapshot"),
        ("lazysnap-memory", {"later": per_snapshot(0.004) | {"lost_s": 0.21}}, "training time lost"),
        ("lazysnap-memory", {"peak_bytes": 3.3 * 10**9}, "memory beyond"),
        ("lazysnap-disk", {"durable_s": [0.5, 0.7, 0.7]}, "durable, beside"),
        ("lazysnap-disk", {"durable_when_idle_s": 0.7}, "durable, idle"),
    ],
)
def test_a_figure_beyond_its_target_is_not_met(report, method, change, line):
    results = made_up()
    results[method] |= change
    missed = [row for row in verdicts(report, results).splitlines() if "not met" in row]
    assert missed
    assert all(line in row for row in missed)


def test_what_was_not_measured_is_not_called_met(report):
    results = copy.deepcopy(made_up())
    results["torch-save"] = {"method": "torch-save", "error": "no space"}
    del results["lazysnap-disk"]
    text = verdicts(report, results)
    assert text.count("not measured") == 8
    assert "not met" not in text


@pytest.mark.slow
def test_the_benchmark_runs_end_to_end_on_a_tiny_model(tmp_path):
    methods = ["none", "torch-save", "lazysnap-memory", "lazysnap-disk"]
    command = [sys.executable, str(BENCHMARKS / "stall.py"), "--params", "tiny", "--threads", "1", "--snapshots", "3"]
    command += ["--every", "150", "--out", str(tmp_path), "--directory", str(tmp_path / "disk"), "--methods", *methods]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "stall.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines] == ["machine", "limits", *methods]
    assert not [line for line in lines if "error" in line]
    assert (tmp_path / "stall.png").stat().st_size > 10_000
