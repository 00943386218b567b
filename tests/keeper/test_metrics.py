"""``lazysnap metrics``: figures of keepers that live, fail or do not answer, for Prometheus and OpenTelemetry."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from support.waiting import until

from lazysnap import PrometheusMetrics, observe_metrics
from lazysnap.cli import main
from lazysnap.cli.metrics import FIGURES

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture
def trained(job):
    """A training of which three steps are captured and the last one is stored, with the values of its figures."""
    level = job.level()
    trainer = job.trainer(levels=[level])
    for step in (1, 2, 3):
        trainer.capture(step=step, must=step == 3)
    trainer.drain()
    return trainer, level


def values(text):
    """Sample names and values of a text of Prometheus, by name and the labels that tell them apart."""
    return {
        (sample.name, *(sample.labels.get(key, "") for key in ("rank", "level", "loss", "kind"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_all_figures_of_a_training_are_printed_and_documented(job, trained, capsys):
    _, level = trained
    assert main(["metrics", job.job_id]) == 0
    text = capsys.readouterr().out
    found = values(text)

    assert found["lazysnap_step", "0", "", "", ""] == 3
    assert found["lazysnap_captured_step", "0", "", "", ""] == 3
    assert found["lazysnap_level_newest_step", "", level["url"], "", ""] == 3
    assert found["lazysnap_survives_step", "", "", "process", ""] == 3
    assert found["lazysnap_training", "0", "", "", ""] == 1
    assert found["lazysnap_memory_bytes", "0", "", "", "memory"] >= 3 * 100_000
    assert found["lazysnap_level_failing", "", level["url"], "", ""] == 0
    assert {name for name, *_ in found} == {figure.name for figure in FIGURES}
    page = (DOCS / "operations.md").read_text()
    for figure in FIGURES:
        assert f"# HELP {figure.name}" in text
        assert f"| `{figure.name}` |" in page


def test_where_nothing_runs_a_message_says_why_there_are_no_values(capsys):
    assert main(["metrics", "no-such-job"]) == 0
    out, err = capsys.readouterr()
    assert values(out) == {}
    assert "no keeper of no-such-job runs on this node" in err


def test_a_file_for_node_exporter_is_replaced_again_and_again(job, trained, tmp_path):
    path = tmp_path / "lazysnap.prom"
    command = [sys.executable, "-m", "lazysnap.cli", "metrics", job.job_id, "--to", str(path), "--every", "0.05"]
    process = subprocess.Popen(command)
    try:
        until(path.exists)
        trained[0].capture(step=4)
        until(lambda: values(path.read_text())["lazysnap_step", "0", "", "", ""] == 4)
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert [left.name for left in tmp_path.glob("*.prom*")] == [path.name]


def test_a_stopped_keeper_does_not_answer_and_is_a_problem(job, trained, capsys):
    os.kill(keeper := job.keeper_pid(), signal.SIGSTOP)
    try:
        assert main(["metrics", job.job_id, "--json"]) == 0
    finally:
        os.kill(keeper, signal.SIGCONT)
    found = {sample["name"]: sample["value"] for sample in json.loads(capsys.readouterr().out)["samples"]}
    assert found == {"lazysnap_keeper_answers": 0, "lazysnap_problems": 1}


def test_a_program_registers_the_collector_before_there_is_a_keeper(job):
    registry = CollectorRegistry()
    registry.register(PrometheusMetrics(job.job_id))
    assert registry.get_sample_value("lazysnap_step") is None

    job.trainer().capture(step=7)

    labels = {"job": job.job_id, "node": "0", "rank": "0"}
    assert registry.get_sample_value("lazysnap_step", labels) == 7


def test_a_meter_of_opentelemetry_gets_the_same_figures(job, trained):
    reader = InMemoryMetricReader()
    observe_metrics(MeterProvider([reader]).get_meter("test"), job.job_id)

    [resource] = reader.get_metrics_data().resource_metrics
    found = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert set(found) == {figure.name.removesuffix("_total") for figure in FIGURES}
    [point] = found["lazysnap_step"].data.data_points
    assert (point.value, point.attributes["rank"]) == (3, "0")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--every", "5"], "--to FILE"),
        (["--every", "0", "--to", "a.prom"], "more than 0"),
        (["--to", "a.txt"], "end in .prom"),
    ],
)
def test_wrong_use_is_refused(words, text, capsys):
    assert main(["metrics", *words]) == 2
    assert text in capsys.readouterr().err


def test_the_dashboard_asks_for_figures_that_exist():
    board = json.loads((DOCS / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for expression in asked for name in re.findall(r"lazysnap_\w+", expression)}
    assert names <= {figure.name for figure in FIGURES}
    assert len(names) >= 14
