"""``lazysnap metrics``: what ``lazysnap status`` shows, as figures for Prometheus and OpenTelemetry."""

import argparse
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from lazysnap.cli.keepers import FoundKeeper
from lazysnap.cli.output import OK, Output
from lazysnap.cli.status import ALIVE, look, problems, survival
from lazysnap.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation
    from prometheus_client.metrics_core import Metric

_FRESH_S = 1.0
"""Figures that are asked for one after the other within this time are of one look."""
_LONGEST_S = 86400.0
_INSTALL = "pip install 'lazysnap[metrics]'"


class Figure(NamedTuple):
    """The meaning of a figure. One whose name ends in ``_total`` counts up; all others are gauges."""

    name: str
    help: str
    unit: str = ""


class Sample(NamedTuple):
    """One value."""

    name: str
    labels: dict[str, str]
    value: float


FIGURES = (
    Figure("lazysnap_keeper_answers", "1 if the keeper of a job on this node answers"),
    Figure("lazysnap_problems", "Problems that lazysnap status shows for a job"),
    Figure("lazysnap_training", "1 if the training process of a rank lives"),
    Figure("lazysnap_step", "Newest boundary that a rank passed"),
    Figure("lazysnap_captured_step", "Step of a rank's newest whole capture in memory"),
    Figure("lazysnap_captured_timestamp_seconds", "Unix time at which that capture began", "s"),
    Figure("lazysnap_copy_seconds", "Seconds that its copy took, beside training", "s"),
    Figure("lazysnap_waited_seconds_total", "Seconds that training waited for captures, since its start", "s"),
    Figure("lazysnap_memory_bytes", "Memory of a rank's slots; kind: memory or file", "By"),
    Figure("lazysnap_parity_bytes", "Memory of this node that protects other nodes", "By"),
    Figure("lazysnap_level_newest_step", "Newest complete step at a level"),
    Figure("lazysnap_level_complete_timestamp_seconds", "Unix time at which it became complete", "s"),
    Figure("lazysnap_level_bytes_per_second", "Rate of the last write to a level", "By/s"),
    Figure("lazysnap_level_waiting_steps", "Steps that a level must store, due or not, and has not yet"),
    Figure("lazysnap_level_failing", "1 if a level does not take snapshots now"),
    Figure("lazysnap_survives_step", "Step that a restart resumes after a loss; absent if it would begin anew"),
)
"""All of them; docs/operations.md has the same table."""


def samples(found: list[FoundKeeper]) -> Iterator[Sample]:
    """Yield the values of all figures that are known. Pure."""
    for keeper in found:
        for name, more, value in _values(keeper):
            if value is not None:
                labels = {"job": keeper.identity.job_id, "node": str(keeper.state.node if keeper.state else 0), **more}
                yield Sample(f"lazysnap_{name}", labels, float(value))


def _values(keeper: FoundKeeper) -> Iterator[tuple[str, dict[str, str], float | None]]:
    """Yield name, further labels and value of the figures of a job; ``None``: not known."""
    state = keeper.state
    yield "keeper_answers", {}, state is not None or not keeper.problem
    yield "problems", {}, len(problems(keeper))
    if state is None:
        return
    yield "parity_bytes", {}, state.parity_bytes
    for rank in state.ranks:
        labels = {"rank": str(rank.rank)}
        yield "training", labels, rank.phase in ALIVE
        yield "step", labels, rank.reached
        for newest in rank.captures[-1:]:
            yield "captured_step", labels, newest.step
            yield "captured_timestamp_seconds", labels, newest.taken_ns / 1e9
            yield "copy_seconds", labels, newest.copied_ns / 1e9
            yield "waited_seconds_total", labels, newest.waited_ns / 1e9
        yield "memory_bytes", {**labels, "kind": "memory"}, rank.memory_bytes
        yield "memory_bytes", {**labels, "kind": "file"}, rank.file_bytes
    for level in state.levels:
        labels = {"level": level.url}
        yield "level_newest_step", labels, level.newest
        yield "level_complete_timestamp_seconds", labels, None if level.complete_ns is None else level.complete_ns / 1e9
        yield "level_bytes_per_second", labels, level.bytes_per_s
        yield "level_waiting_steps", labels, level.waiting
        yield "level_failing", labels, level.is_failing
    for loss, outcome in survival(state).items():
        yield "survives_step", {"loss": loss}, outcome.safe.step


class PrometheusMetrics:
    """A collector for ``prometheus_client``: the figures of this node's jobs, asked of their keepers at each scrape.

    It may live in any process of the owner of the training, also in the training itself::

        prometheus_client.REGISTRY.register(PrometheusMetrics())

    Who may read them, and over which port, is up to that program. ``job``: only this job_id, or URL of a first level.
    """

    def __init__(self, job: str | None = None) -> None:
        self._job = job

    def describe(self) -> list["Metric"]:
        """Return nothing: no keeper is asked before the first scrape."""
        return []

    def collect(self) -> Iterator["Metric"]:
        """Yield one family for each figure. Blocks: at most about two seconds."""
        return _families(look(self._job)[0])


def _families(found: list[FoundKeeper]) -> Iterator["Metric"]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    by_name: dict[str, list[Sample]] = {figure.name: [] for figure in FIGURES}
    for sample in samples(found):
        by_name[sample.name].append(sample)
    for figure in FIGURES:
        of_figure = by_name[figure.name]
        kind = CounterMetricFamily if figure.name.endswith("_total") else GaugeMetricFamily
        family = kind(figure.name, figure.help, labels=list(of_figure[0].labels) if of_figure else [])
        for sample in of_figure:
            family.add_metric(list(sample.labels.values()), sample.value)
        yield family


def observe_metrics(meter: "Meter", job: str | None = None) -> None:
    """Register all figures as observable instruments of an OpenTelemetry meter. Does not block.

    Each collection asks the keepers of this node once: about two seconds at most. ``job``: as ``PrometheusMetrics``.
    """
    known: list[Sample] = []
    looked_at = -_FRESH_S

    def of(name: str) -> Callable[[object], Iterator["Observation"]]:
        def values(_: object) -> Iterator["Observation"]:
            from opentelemetry.metrics import Observation

            nonlocal looked_at
            if time.monotonic() - looked_at > _FRESH_S:
                known[:] = samples(look(job)[0])
                looked_at = time.monotonic()
            yield from (Observation(sample.value, sample.labels) for sample in known if sample.name == name)

        return values

    for name, text, unit in FIGURES:
        create = meter.create_observable_counter if name.endswith("_total") else meter.create_observable_gauge
        create(name.removesuffix("_total"), callbacks=[of(name)], unit=unit, description=text)


def run(args: argparse.Namespace, output: Output) -> int:
    """Print the figures in the text format of Prometheus, or write them to a file, once or every so many seconds.

    Blocks: about two seconds at most; with ``--every`` until Ctrl-C. Raises: ConfigError, OSError.
    """
    if args.every is not None and (args.json or args.to is None or not 0 < args.every < _LONGEST_S):
        raise ConfigError("--every takes seconds, more than 0, and --to FILE, without --json")
    if args.json:
        values = [sample._asdict() for sample in samples(look(args.job)[0])]
        return output.result(ok=True, samples=values)
    try:
        from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile
    except ImportError as error:
        raise ConfigError(f"lazysnap metrics needs prometheus_client: {_INSTALL}") from error
    registry = CollectorRegistry()
    registry.register(PrometheusMetrics(args.job))
    if args.to is None:
        text = generate_latest(registry).decode()
        sys.stdout.write(text)
        if "lazysnap_keeper_answers{" not in text:
            which = "" if args.job is None else f" of {args.job}"
            output.say(f"no keeper{which} runs on this node now: the figures have no values before a training begins")
        return OK
    if pathlib.Path(args.to).suffix != ".prom":
        raise ConfigError(f"--to {args.to}: node_exporter reads files that end in .prom: give it such a name")
    try:
        while True:
            write_to_textfile(args.to, registry)
            if args.every is None:
                return OK
            time.sleep(args.every)
    except KeyboardInterrupt:
        return OK
