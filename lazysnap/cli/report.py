"""``lazysnap report``: the goodput of a run over all its restarts, and what each interruption cost."""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.goodput import CLASSES, MEMORY, OTHER_NODES, Account, Interruption, account
from lazysnap.cli.history import GOODBYE, levels_of, ranks_in, value_at
from lazysnap.cli.output import Output, count_of, percent, when
from lazysnap.cli.stores import open_existing
from lazysnap.console import duration
from lazysnap.errors import ConfigError, LevelError, SnapshotNotFound
from lazysnap.events import Alert, Event, EventFile, LevelFailed, Preempted, read

_BINS, _BARS, _WIDTH = 120, " ▁▂▃▄▅▆▇█", 32
_SHOWN = 12
_SILENT_S = 60
LABELS = {
    "productive": "training that counts",
    "waiting": "waiting for copies",
    "setup": "first start",
    "lost": "lost work",
    "down": "down",
    "restarting": "restarting",
    "draining": "draining",
}


@dataclass(frozen=True)
class Rows:
    """A table of texts. Columns whose name ends in ``>`` are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Report:
    """The events of one run, and their account."""

    run_id: str
    urls: list[str]
    files: list[EventFile]
    account: Account

    def of(self, *kinds: type[Event]) -> list[tuple[int, Event]]:
        """Return the events of these kinds with their nodes, by time."""
        found = [(file.node, one) for file in self.files for one in file.events if isinstance(one, kinds)]
        return sorted(found, key=lambda pair: pair[1].t)

    def bins(self) -> list[dict[str, Any]]:
        """Return the run over time: step, share of time waited, and how far each place was behind, at equal steps."""
        found, run = [], self.account
        edges = [run.began + run.wall * number // _BINS for number in range(_BINS + 1)]
        for begin, end in pairwise(edges):
            waited = (value_at(run.waits, end) - value_at(run.waits, begin)) / max(1, end - begin)
            behind = {place: run.behind(place, end) for place in run.newest}
            found.append({"t": end / 1e6, "step": run.step_at(end), "waited": min(1.0, waited), "behind": behind})
        return found


def load(urls: Sequence[str], options: Sequence[tuple[str, Any]], run: str | None) -> tuple[str, list[EventFile]]:
    """Return a run, by default the newest, and its files of all nodes. Blocks. Raises: LevelError, SnapshotNotFound."""
    newest: dict[tuple[str, int], EventFile] = {}
    for url in urls:
        open_existing(url, options)
        for file in read(url, dict(options)):
            known = newest.get((file.run_id, file.node))
            if known is None or known.events[-1].t < file.events[-1].t:
                newest[file.run_id, file.node] = file
    runs = sorted({run_id for run_id, _ in newest})
    meant = [run_id for run_id in runs if run_id.startswith(run.lower())] if run is not None else runs[-1:]
    if len(meant) != 1:
        known_runs = f"the runs with events there: {', '.join(runs) or 'none'}"
        what = "no events" if run is None else f"events of {len(meant)} runs begin with {run!r}"
        raise SnapshotNotFound(
            f"{' and '.join(urls)}: {what}; {known_runs}. The file of events is at the first level of a job"
        )
    return meant[0], [newest[key] for key in sorted(newest) if key[0] == meant[0]]


def write_file(path: str, text: str) -> None:
    """Write a text file. It replaces only a file that begins alike. Raises: ConfigError, OSError."""
    mark = text[:24]
    if os.path.lexists(path):
        with open(path, "rb") as file:
            if file.read(len(mark)) not in (b"", mark.encode()):
                raise ConfigError(f"{path} is there already, and this command did not write it: choose another name")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the report. Blocks: reads one small file for each node. Raises: LevelError, SnapshotNotFound."""
    run_id, files = load(args.urls, args.storage_option, args.run)
    result = account(files)
    if result is None:
        raise LevelError(f"{' and '.join(args.urls)}: run {run_id} has events, but no training named itself yet")
    report = Report(run_id, [output.hide(url) for url in args.urls], files, result)
    if args.html:
        from lazysnap.cli.report_page import page

        write_file(args.html, output.hide(page(report)))
        output.say(f"written: {args.html}")
    for line in heading(report):
        output.line(line, "bold" if line.startswith("goodput") else "")
    for rows in tables(report):
        output.line("")
        output.show(output.table(rows.title, *rows.columns, rows=rows.rows, is_plain=True))
    return output.result(**_fields(report))


def heading(report: Report) -> Iterator[str]:
    """Yield the lines at the top."""
    run, classes = report.account, report.account.classes()
    name = run.starts[-1].name
    yield (
        f"run {report.run_id[:8]} at {' and '.join(report.urls)}: {count_of(len(run.starts), 'start')}, "
        f"{count_of(name.world_size, 'rank')}, {count_of(len(report.files), 'node')}, step {run.reached} reached"
    )
    ended = {
        GOODBYE: "the training ended well",
        "left": "ended by an exception or preempted, no start since",
        "died": "died, no start since",
    }.get(run.starts[-1].how or "", "")
    if not ended:
        age_s = max(0.0, time.time() - max(file.events[-1].t for file in report.files))
        ended = f"its end was not seen, the newest line is {duration(age_s)} old" if age_s > _SILENT_S else "still runs"
    yield f"{when(run.began * 1000)} to {when(run.ended * 1000)}: {length(run.wall)}; {ended}"
    counts = f"{length(classes['productive'])} of {length(run.wall)} trained steps that count"
    yield f"goodput {percent(run.goodput, 1)}: {counts}"
    rank = run.starts[0].name.rank
    if rank:
        yield f"the file of rank 0 is not here: this is the time of rank {rank}"


def tables(report: Report) -> Iterator[Rows]:
    """Yield the tables, without those that would be empty."""
    run, classes = report.account, report.account.classes()
    rows: list[Sequence[str]] = []
    for name in CLASSES:
        share = classes[name] / max(1, run.wall)
        bar = "█" * round(_WIDTH * share)
        rows.append((LABELS[name], length(classes[name]), percent(share, 1), bar))
    rows.append(("wall time", length(run.wall), "100.0 %", ""))
    yield Rows("where the time went", ("", "time>", "share>", ""), rows)
    if run.interruptions:
        shown = run.interruptions[-_SHOWN:]
        count = len(run.interruptions)
        title = f"interruptions, {count}" + (f": the last {_SHOWN}, all with --json" if count > _SHOWN else "")
        columns = ("at", "what", "step>", "resumed", "lost>", "new step after>", "of these")
        yield Rows(title, columns, [list(_interruption(one, report)) for one in shown])
    if rows := list(_places(report)):
        yield Rows("steps behind training", _PLACES, rows)
    if rows := list(_levels(report)):
        yield Rows("storage; times are medians", _LEVELS, rows)
    notes = [(when(int(one.t * 1e9))[11:19], str(node), _note(one)) for node, one in report.of(*_NOTES)]
    if notes:
        yield Rows(f"notes, {min(len(notes), _SHOWN)} of {len(notes)}", ("at", "node>", ""), notes[-_SHOWN:])


_WORDS = {
    "down": "down",
    "starting": "restart",
    "productive": "training",
    "lost": "lost again",
    "draining": "draining",
}
_PLACES = ("complete at", "newest>", "behind now>", "mean>", "most>", "over time")
_LEVELS = ("stored at", "snapshots>", "size>", "write>", "rate>", "of it checksums>", "read back>", "failures>")
_NOTES = (Alert, LevelFailed, Preempted)


def _note(event: Event) -> str:
    if isinstance(event, Alert):
        return event.text or f"over: {event.about}"
    if isinstance(event, LevelFailed) and event.step < 0:
        return f"{event.level} failed: {event.text}"
    if isinstance(event, LevelFailed):
        return f"step {event.step} was not stored at {event.level}: {event.text}"
    return "preemption: the processes are about to be killed"


def length(time_us: int) -> str:
    """Return a time as text for people, as in ``2 min 33 s``."""
    seconds = round(time_us / 1e6)
    if seconds < 100:
        return duration(time_us / 1e6) if time_us else "0 s"
    if seconds < 6000:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def parts(times: dict[str, int]) -> str:
    """Say where time went, as in ``down 2.0 s, restart 1.1 s``, without what is less than 3 %."""
    least = max(1, sum(times.values()) // 33)
    named = [(word, times.get(kind, 0)) for kind, word in _WORDS.items()]
    return ", ".join(f"{word} {length(spent)}" for word, spent in named if spent >= least)


def _interruption(one: Interruption, report: Report) -> Iterator[str]:
    yield when(one.at * 1000)[11:19]
    rank, node = one.first or (0, 0)
    several = one.first is not None and (report.account.starts[0].name.world_size > 1 or len(report.files) > 1)
    what = "ended well" if one.how == GOODBYE else one.how
    yield what + (f", rank {rank} of node {node} first" * several)
    yield str(one.step)
    levels = [place for place in report.account.newest if place not in (MEMORY, OTHER_NODES)]
    source = f" from {'storage' if [one.source] == levels else one.source}" if one.source else ""
    yield "not yet" if one.resumed_step is None else f"{one.resumed_step}{source}"
    yield _lost(one)
    yield "none yet" if one.new_at is None else length(one.new_at - one.at)
    yield parts(one.until_new)


def _lost(one: Interruption) -> str:
    if one.lost_steps:
        return f"{count_of(one.lost_steps, 'step')}, {length(one.lost)}"
    return f"running step, {length(one.lost)}" if one.lost else "nothing"


def _places(report: Report) -> Iterator[Sequence[str]]:
    run, bins = report.account, report.bins()
    for place in run.newest:
        known = [count for one in bins if (count := one["behind"][place]) is not None]
        newest = run.newest[place][-1][1] if run.newest[place] else None
        mean, most = (f"{sum(known) / len(known):.1f}", str(max(known))) if known else ("", "")
        now = run.behind(place, run.ended)
        columns = ("none" if newest is None else str(newest), "" if now is None else str(now), mean, most)
        yield place, *columns, _spark([one["behind"][place] for one in bins])
    waited = [one["waited"] for one in bins]
    yield "waiting for copies", "", "", "", percent(max(waited)), _spark(waited)


def _levels(report: Report) -> Iterator[Sequence[str]]:
    for url, level in levels_of(report.files).items():
        known = ("",) * 5
        if level.snapshots:
            rate = f"{decimal(int(level.bytes / level.seconds))}/s" if level.seconds else ""
            read_back = duration(level.read_back_s) if level.read_back_s else "no"
            known = decimal(level.bytes), duration(level.seconds), rate, duration(level.checksum_s), read_back
        yield url, str(level.snapshots), *known, str(level.failures or "")


def _spark(values: Sequence[float | None], width: int = _WIDTH // 2) -> str:
    """Draw values as a line of bars; where there is none, a space."""
    groups = [values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)]
    means = [max((one for one in group if one is not None), default=None) for group in groups]
    top = max((one for one in means if one is not None), default=0) or 1
    return "".join(" " if one is None else _BARS[1 + round(one / top * (len(_BARS) - 2))] for one in means)


def _fields(report: Report) -> dict[str, Any]:
    run = report.account
    return {
        "url": report.urls,
        "run_id": report.run_id,
        "rank": run.starts[0].name.rank,
        "ranks": ranks_in(report.files),
        "nodes": [file.node for file in report.files],
        "began": run.began / 1e6,
        "ended": run.ended / 1e6,
        "how": run.starts[-1].how,
        "wall_s": run.wall / 1e6,
        "goodput": run.goodput,
        "step": run.reached,
        "classes_s": _seconds(run.classes()),
        "starts": [
            {
                "began": one.began / 1e6,
                "ended": one.ended / 1e6,
                "step": one.name.step,
                "how": one.how,
                "pid": one.name.pid,
                "node": one.node,
            }
            for one in run.starts
        ],
        "interruptions": [
            {
                "at": one.at / 1e6,
                "how": one.how,
                "first_rank": one.first and one.first[0],
                "first_node": one.first and one.first[1],
                "step": one.step,
                "resumed_step": one.resumed_step,
                "source": one.source,
                "lost_steps": one.lost_steps,
                "lost_s": one.lost / 1e6,
                "new_step_after_s": None if one.new_at is None else (one.new_at - one.at) / 1e6,
                "until_new_step_s": _seconds(one.until_new),
            }
            for one in run.interruptions
        ],
        "levels": {url: asdict(level) for url, level in levels_of(report.files).items()},
        "every_n_steps": run.starts[-1].every,
        "over_time": report.bins(),
        "notes": [{"t": one.t, "node": node, "text": _note(one)} for node, one in report.of(*_NOTES)],
    }


def _seconds(times: dict[str, int]) -> dict[str, float]:
    return {name: spent / 1e6 for name, spent in times.items()}
