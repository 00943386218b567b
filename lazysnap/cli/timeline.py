"""``lazysnap timeline``: a run as a trace that Perfetto and chrome://tracing show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from lazysnap.cli.goodput import Account, account
from lazysnap.cli.history import microseconds, ranks_in
from lazysnap.cli.output import Output, count_of
from lazysnap.cli.report import load, write_file
from lazysnap.events import (
    PHASES,
    Alert,
    EventFile,
    KeeperStarted,
    LevelFailed,
    Notice,
    Protected,
    Stored,
    TrainerEnded,
)

_KEEPER = 1_000_000
"""The first track of a keeper, behind those of the ranks."""
_NAMES = {"productive": "training", "lost": "training, lost", "first_step": "first step"}


def run(args: argparse.Namespace, output: Output) -> int:
    """Write the trace. Blocks: reads one small file for each node. Raises: LevelError, SnapshotNotFound."""
    run_id, files = load(args.urls, args.storage_option, args.run)
    events = trace(files)
    text = json.dumps({"otherData": {"lazysnap": run_id}, "displayTimeUnit": "ms", "traceEvents": events})
    write_file(args.to, output.hide(text))
    output.line(f"run {run_id[:8]}: {count_of(len(events), 'event')} in {args.to}; open it at https://ui.perfetto.dev")
    return output.result(run_id=run_id, to=args.to, events=len(events))


def trace(files: Sequence[EventFile]) -> list[dict[str, Any]]:
    """Return the events of the trace. Pure.

    A process for each node; in it a track for each rank, one for each level, and one for what the keeper saw. Curves
    for each rank: the newest step, and the share of time that it waited for copies at the gate.
    """
    ranks = [(rank, of_rank) for rank in ranks_in(files) if (of_rank := account(files, rank)) is not None]
    parts = [_keeper(file) for file in files] + [_rank(of_rank, rank) for rank, of_rank in ranks]
    return [event for part in parts for event in part]


def _rank(of_rank: Account, rank: int) -> Iterator[dict[str, Any]]:
    for node in sorted({start.node for start in of_rank.starts}):
        yield _name(node, rank, f"rank {rank}")
    for index, start in enumerate(of_rank.starts):
        facts = {"pid": start.name.pid, "from step": start.name.step, "end": start.how or "not seen"}
        yield _span(start.node, rank, f"start {index + 1}", (start.began, start.ended), **facts)
        spans = [span for span in of_rank.spans if span.start == index]
        for span in spans:
            yield _span(start.node, rank, _NAMES.get(span.kind, span.kind), (span.begin, span.end))
        works = [span for span in spans if span.kind not in (*PHASES, "down")]
        before = 0
        for line in start.progress:
            begin, end = microseconds(line.taken), microseconds(line.taken + line.copy_s)
            around = next((span for span in works if span.begin <= begin < span.end), None)
            if around is not None and begin >= before:
                before = min(end, around.end)  # a track shows only spans that lie within one another
                yield _span(start.node, rank, "copy", (begin, before), step=line.captured)
        for earlier, line in pairwise(start.progress):
            waited = (line.waited_s - earlier.waited_s) / max(1e-6, line.t - earlier.t)
            share = round(100 * min(1, waited), 1)
            yield _value(start.node, f"rank {rank}", microseconds(line.t), step=line.step)
            yield _value(start.node, f"rank {rank} waiting", microseconds(earlier.t), **{"%": share})
        yield _value(start.node, f"rank {rank} waiting", start.ended, **{"%": 0})


def _keeper(file: EventFile) -> Iterator[dict[str, Any]]:
    host = next((one.host for one in file.events if isinstance(one, KeeperStarted)), "")
    yield {"ph": "M", "name": "process_name", "pid": file.node, "args": {"name": f"node {file.node} {host}".strip()}}
    yield _name(file.node, _KEEPER, "keeper")
    levels: dict[str, int] = {}
    ends: dict[str, int] = {}
    for one in file.events:
        at = microseconds(one.t)
        if isinstance(one, (Stored, LevelFailed)) and one.level not in levels:
            levels[one.level] = _KEEPER + 1 + len(levels)
            yield _name(file.node, levels[one.level], one.level)
        if isinstance(one, Stored):
            written = max(at - microseconds(one.read_back_s), ends.get(one.level, 0))
            begin = max(written - microseconds(one.seconds), ends.get(one.level, 0))
            ends[one.level] = at
            facts = {"bytes": one.bytes, "checksum_s": one.checksum_s}
            yield _span(file.node, levels[one.level], f"write step {one.step}", (begin, written), **facts)
            if written < at:
                yield _span(file.node, levels[one.level], f"read back step {one.step}", (written, at))
        elif isinstance(one, LevelFailed):
            yield _instant(file.node, levels[one.level], at, f"failed: step {one.step}", text=one.text)
        elif isinstance(one, TrainerEnded) and one.how != "goodbye":
            yield _instant(file.node, one.rank, at, one.how, step=one.step)
        elif isinstance(one, Notice):
            yield _instant(file.node, _KEEPER, at, "notice")
        elif isinstance(one, Alert):
            yield _instant(file.node, _KEEPER, at, f"alert: {one.about}" + (" over" * (not one.text)), text=one.text)
        elif isinstance(one, Protected):
            name = "protected by none" if one.step is None else f"protected: step {one.step}"
            yield _instant(file.node, _KEEPER, at, name)


def _name(node: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": node, "tid": track, "args": {"name": name}}


def _span(node: int, track: int, name: str, times: tuple[int, int], **facts: Any) -> dict[str, Any]:
    begin, end = times
    return {"ph": "X", "name": name, "pid": node, "tid": track, "ts": begin, "dur": end - begin, "args": facts}


def _value(node: int, name: str, at: int, **value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": node, "ts": at, "args": value}


def _instant(node: int, track: int, at: int, name: str, **facts: Any) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "name": name, "pid": node, "tid": track, "ts": at, "args": facts}
