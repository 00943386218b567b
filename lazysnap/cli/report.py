"""``lazysnap report``: the goodput of a run over all its restarts, and the cost of each interruption.

The keys of ``--json`` (docs/cli.md) are the complete set of figures: the screen and the page use it.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.goodput import CLASSES, Account, Interruption, account
from lazysnap.cli.history import GOODBYE, UNSEEN, LevelUse, levels_of, read_run, value_at
from lazysnap.cli.output import Output, count_of, percent, when
from lazysnap.cli.survival import OTHER_NODES, source_text
from lazysnap.console import duration
from lazysnap.errors import ConfigError, LevelError
from lazysnap.events import Alert, Event, EventFile, LevelFailed, Preempted
from lazysnap.resolver import MEMORY, short_id

_BINS = 120
_BAR_WIDTH = 32
_SHOWN = 8
"""Maximum interruptions and notes on the screen."""
_SILENT_S = 60
_ENDS = {UNSEEN: "died with keeper", GOODBYE: "ended well"}
LABELS = {
    "productive": "training that counts",
    "waiting": "waiting for copies",
    "setup": "first start",
    "lost": "lost work",
    "down": "down",
    "restarting": "restarting",
    "draining": "draining",
}


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the report. Blocks: reads one small file for each node. Raises: LevelError, SnapshotNotFound."""
    run_id, files = read_run(args.urls, args.storage_option, args.run)
    result = account(files)
    if result is None:
        raise LevelError(f"{' and '.join(args.urls)}: run {run_id} has events, but no training named itself yet")
    figures = figures_of(run_id, [output.hide(url) for url in args.urls], files, result)
    if args.html:
        from lazysnap.cli.report_page import page

        write_file(args.html, output.hide(page(figures)))
        output.say(f"written: {args.html}")
    for line in heading(figures):
        style = ""
        if line.startswith("goodput"):
            style = "bold"
        output.line(line, style)
    for table in tables(figures):
        output.line("")
        output.show(output.table("", *table.columns, rows=table.rows))
    if figures["notes"]:
        output.line("")
        for line in notes(figures):
            output.line(line, "yellow")
    return output.result(**figures)


def write_file(path: str, text: str) -> None:
    """Write a text file. It replaces only a file with the same beginning. Raises: ConfigError, OSError."""
    mark = text[:24]
    if os.path.lexists(path):
        with open(path, "rb") as file:
            if file.read(len(mark)) not in (b"", mark.encode()):
                raise ConfigError(f"{path} already exists, and this command did not write it: choose another name")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


# ---------------------------------------------------------------- figures


def figures_of(run_id: str, urls: list[str], files: Sequence[EventFile], result: Account) -> dict[str, Any]:
    """Return all figures of a run. Times are in seconds, moments in Unix time. Pure."""
    over_time = _over_time(result)
    last_start = result.starts[-1]
    classes_s = {}
    for name, time_us in result.classes().items():
        classes_s[name] = time_us / 1e6
    spans = []
    for span in result.spans:
        spans.append(
            {
                "began": span.begin / 1e6,
                "ended": span.end / 1e6,
                "class": span.kind,
                "waited_s": span.waited / 1e6,
            }
        )
    starts = []
    for start in result.starts:
        starts.append(
            {
                "began": start.began / 1e6,
                "ended": start.ended / 1e6,
                "step": start.trainer_started.step,
                "how": start.how,
            }
        )
    uses = levels_of(files)
    sources = {}
    for source in dict.fromkeys([*result.newest, *uses]):
        sources[source] = _source_figures(source, uses.get(source), result, over_time)
    return {
        "url": urls,
        "run_id": run_id,
        "rank": result.starts[0].trainer_started.rank,
        "world_size": last_start.trainer_started.world_size,
        "nodes": [file.node for file in files],
        "began": result.began / 1e6,
        "ended": result.ended / 1e6,
        "newest_line": max(file.events[-1].t for file in files),
        "how": last_start.how,
        "wall_s": result.wall / 1e6,
        "goodput": result.goodput,
        "step": result.reached,
        "classes_s": classes_s,
        "spans": spans,
        "starts": starts,
        "interruptions": [_interruption_figures(interruption) for interruption in result.interruptions],
        "sources": sources,
        "over_time": over_time,
        "notes": _note_figures(files),
    }


def _over_time(result: Account) -> list[dict[str, Any]]:
    """Return step, share of time waited, and the lag of each source, at equal intervals."""
    points = []
    begin = result.began
    for number in range(1, _BINS + 1):
        end = result.began + result.wall * number // _BINS
        waited = (value_at(result.waits, end) - value_at(result.waits, begin)) / max(1, end - begin)
        behind = {}
        for source in result.newest:
            behind[source] = result.behind(source, end)
        points.append({"t": end / 1e6, "step": result.step_at(end), "waited": min(1.0, waited), "behind": behind})
        begin = end
    return points


def _interruption_figures(interruption: Interruption) -> dict[str, Any]:
    first_rank, first_node = interruption.first or (None, None)
    new_step_after_s = None
    if interruption.new_at is not None:
        new_step_after_s = (interruption.new_at - interruption.at) / 1e6
    return {
        "at": interruption.at / 1e6,
        "how": interruption.how,
        "first_rank": first_rank,
        "first_node": first_node,
        "step": interruption.step,
        "resumed_step": interruption.resumed_step,
        "source": interruption.source,
        "lost_steps": interruption.lost_steps,
        "lost_s": interruption.lost / 1e6,
        "new_step_after_s": new_step_after_s,
    }


def _source_figures(
    source: str, use: LevelUse | None, result: Account, over_time: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the figures of memory, the memory of other nodes, or a level. ``use``: of a level that was written to."""
    keys = ("newest_step", "behind", "behind_mean", "behind_most", "snapshots", "bytes", "seconds", "failures")
    figures: dict[str, Any] = dict.fromkeys(keys)
    if source in result.newest:
        figures["newest_step"] = result.newest[source][-1][1]
        figures["behind"] = result.behind(source, result.ended)
    lags = []
    for point in over_time:
        lag = point["behind"].get(source)
        if lag is not None:
            lags.append(lag)
    if lags:
        figures["behind_mean"] = sum(lags) / len(lags)
        figures["behind_most"] = max(lags)
    if use is not None:
        figures |= asdict(use)
    return figures


def _note_figures(files: Sequence[EventFile]) -> list[dict[str, Any]]:
    notes = []
    for file in files:
        for event in file.events:
            text = _text_of(event)
            if text:
                notes.append({"t": event.t, "node": file.node, "text": text})
    notes.sort(key=itemgetter("t"))
    return notes


def _text_of(event: Event) -> str:
    """Return the text for a problem in an event; empty if there is none."""
    match event:
        case Alert():
            return event.text or f"over: {event.about}"
        case LevelFailed() if event.step < 0:
            return f"{event.level} failed: {event.text}"
        case LevelFailed():
            return f"step {event.step} was not stored at {event.level}: {event.text}"
        case Preempted():
            return "preemption: the processes are about to be killed"
    return ""


# ---------------------------------------------------------------- texts


@dataclass(frozen=True)
class TableRows:
    """A table of texts, for ``Output.table``."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def heading(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the lines at the top."""
    counts = (
        f"{count_of(len(figures['starts']), 'start')}, {count_of(figures['world_size'], 'rank')}, "
        f"{count_of(len(figures['nodes']), 'node')}, step {figures['step']} reached"
    )
    yield f"run {short_id(figures['run_id'])} at {' and '.join(figures['url'])}: {counts}"
    began = when(int(figures["began"] * 1e9))
    ended = when(int(figures["ended"] * 1e9))
    wall = length(figures["wall_s"])
    yield f"{began} to {ended} UTC: {wall}; {_end_of(figures)}"
    counted = length(figures["classes_s"]["productive"])
    yield f"goodput {percent(figures['goodput'], 1)}: {counted} of {wall} trained steps that count"
    if len(figures["interruptions"]) > _SHOWN:
        yield f"{len(figures['interruptions'])} interruptions, the last {_SHOWN} are shown; all with --json"
    if figures["rank"]:
        yield f"the file of rank 0 is not here: this is the time of rank {figures['rank']}"


def _end_of(figures: dict[str, Any]) -> str:
    match figures["how"]:
        case "goodbye":
            return "the training ended well"
        case "left":
            return "ended by an exception or preempted"
        case "died":
            return "died, no start since"
    age_s = max(0.0, time.time() - figures["newest_line"])
    if age_s > _SILENT_S:
        return f"its end was not seen, the newest line is {duration(age_s)} old"
    return "still runs"


def tables(figures: dict[str, Any]) -> Iterator[TableRows]:
    """Yield the tables, without those that would be empty."""
    rows = []
    for name in CLASSES:
        seconds = figures["classes_s"][name]
        if seconds:
            share = seconds / figures["wall_s"]
            rows.append((LABELS[name], length(seconds), percent(share, 1), "█" * round(_BAR_WIDTH * share)))
    yield TableRows(("where the time went", "time>", "share>", ""), rows)
    interruptions = figures["interruptions"]
    if interruptions:
        columns = ["interrupted at", "end", "step>", "resumed", "lost>", "new step after>"]
        yield TableRows(columns, [_interruption_row(row, figures) for row in interruptions[-_SHOWN:]])
    if figures["sources"]:
        columns = ["complete at<", "newest>", "behind>", "mean>", "most>", "stored>", "size>", "write>", "failed>"]
        yield TableRows(columns, [_source_row(source, facts) for source, facts in figures["sources"].items()])


def _interruption_row(interruption: dict[str, Any], figures: dict[str, Any]) -> Sequence[str]:
    end = _ENDS.get(interruption["how"], interruption["how"])
    if interruption["first_rank"] is not None and figures["world_size"] > 1:
        end = f"rank {interruption['first_rank']} {end}"
    resumed = "not yet"
    if interruption["resumed_step"] is not None:
        resumed = str(interruption["resumed_step"])
        if interruption["source"]:
            levels = figures["sources"].keys() - {MEMORY, OTHER_NODES}
            resumed += f" from {source_text(interruption['source'], levels)}"
    new_step_after = "none yet"
    if interruption["new_step_after_s"] is not None:
        new_step_after = length(interruption["new_step_after_s"])
    at = when(int(interruption["at"] * 1e9))[11:]
    return at, end, str(interruption["step"]), resumed, count_of(interruption["lost_steps"], "step"), new_step_after


def _source_row(source: str, facts: dict[str, Any]) -> Sequence[str]:
    row = [source, _text(facts["newest_step"]) or "none", _text(facts["behind"]), "", _text(facts["behind_most"])]
    if facts["behind_mean"] is not None:
        row[3] = f"{facts['behind_mean']:.1f}"
    if facts["snapshots"]:
        row += [str(facts["snapshots"]), decimal(facts["bytes"]), duration(facts["seconds"])]
    else:
        row += ["", "", ""]
    return [*row, str(facts["failures"] or "")]


def _text(number: int | None) -> str:
    if number is None:
        return ""
    return str(number)


def notes(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the newest alerts, failures of levels and preemptions, a line for each."""
    hidden = len(figures["notes"]) - _SHOWN
    if hidden > 0:
        yield f"{hidden} earlier notes with --json"
    for note in figures["notes"][-_SHOWN:]:
        where = ""
        if len(figures["nodes"]) > 1:
            where = f"node {note['node']}: "
        yield f"{when(int(note['t'] * 1e9))[11:]} {where}{note['text']}"


def length(seconds: float) -> str:
    """Return a time as text such as ``2 min 33 s``."""
    if not seconds:
        return "0 s"
    if seconds < 100:
        return duration(seconds)
    if seconds < 6000:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    return f"{round(seconds) // 3600} h {round(seconds) % 3600 // 60} min"
