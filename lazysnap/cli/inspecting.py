"""``lazysnap ls``, ``show`` and ``verify``: list the snapshots of a level, show one, and verify them."""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.output import Output, count_of, when, without_end
from lazysnap.errors import ConfigError, FormatError, LevelError, SnapshotNotFound
from lazysnap.levels.blocks import read_node_file
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import open_storage
from lazysnap.resolver import RestartPlan
from lazysnap.shard.manifest import TAG, Manifest
from lazysnap.shard.names import SnapshotName, id_time_ns
from lazysnap.snapshots.catalogue import Catalogue, Contents, StoredSnapshot
from lazysnap.snapshots.reader import OpenSnapshot, open_snapshot, retry_if_deleted

_MAX_NEIGHBOURS = 64
_MAX_DEPTH = 40
"""Levels of nesting that are shown separately. A deeper value is one line."""
_BARE: dict[str, Any] = {
    "run_id": None,
    "size_bytes": 0,
    "names": [],
    "ranks": 0,
    "world_size": 0,
    "captured_ns": 0,
    "complete": False,
}
"""The fields of a directory without a valid manifest."""


# ---------------------------------------------------------------- opening a level


def open_place(url: str, options: Iterable[tuple[str, Any]] = ()) -> Storage:
    """Return the storage at a path or URL. Raises: LevelError, ConfigError."""
    if not url:
        raise ConfigError("an empty URL: name a directory or an fsspec URL")
    return open_storage(url, options=dict(options) or None)


def open_existing(url: str, options: Iterable[tuple[str, Any]] = ()) -> Storage:
    """Like ``open_place``, for reading: a directory that does not exist is more likely misspelt than empty.

    Raises: also LevelError, if a local directory does not exist.
    """
    storage = open_place(url, options)
    if isinstance(storage, LocalStorage) and not os.path.isdir(storage.url):
        fault = "does not exist"
        if os.path.exists(storage.url):
            fault = "is not a directory"
        raise LevelError(f"{storage.url} {fault}: name the directory that holds the snapshots (step-…)")
    return storage


# ---------------------------------------------------------------- what commands say of snapshots


def fields_of(snapshot: StoredSnapshot) -> dict[str, Any]:
    """Return the fields of a snapshot in a JSON result."""
    return {
        "step": snapshot.step,
        "run_id": snapshot.run_id,
        "location": snapshot.location,
        "size_bytes": snapshot.size_bytes,
        "names": snapshot.names,
    }


def show_snapshots(
    output: Output,
    contents: Contents,
    states: Iterable[tuple[StoredSnapshot, str, str]],
    bare_steps: Iterable[int] = (),
) -> None:
    """Print a table of snapshots, the smallest step first, unless there are none.

    Args:
        output: the output.
        contents: the level.
        states: snapshots of the level, each with a text and a style for its state.
        bare_steps: steps of directories without a valid manifest.
    """
    rows: list[dict[str, Any]] = []
    for step in bare_steps:
        state = output.cell("no valid manifest", "yellow")
        rows.append({"step": step, "state": state, "size": "", "captured (UTC)": "", "run": "", "names": ""})
    for snapshot, text, style in states:
        rows.append(
            {
                "step": snapshot.step,
                "state": output.cell(text, style),
                "size": decimal(snapshot.size_bytes),
                "captured (UTC)": when(snapshot.captured_ns),
                "run": contents.runs[snapshot.run_id],
                "names": ", ".join(snapshot.names),
            }
        )
    if not rows:
        return
    rows.sort(key=itemgetter("step"))
    columns = {"step": "step>", "state": "state", "size": "size>", "captured (UTC)": "captured (UTC)", "run": "run"}
    table = output.table("", *columns.values(), rows=map(itemgetter(*columns), rows))
    named_rows = [row for row in rows if row["names"]]
    if named_rows:
        columns["names"] = "names"
        wider = output.table("", *columns.values(), rows=map(itemgetter(*columns), rows))
        if output.fits(wider):
            table = wider
            named_rows = []
    output.line(contents.url, "bold")
    output.show(table)
    for row in named_rows:  # a truncated name is useless for a restart
        output.line(f"step {row['step']} of run {row['run']} is named {row['names']}")
    if contents.newest_run is not None and len(contents.runs) > 1:
        output.line(f"newest run: {contents.runs[contents.newest_run]}")


# ---------------------------------------------------------------- ls


def list_snapshots(args: argparse.Namespace, output: Output) -> int:
    """List. Blocks: reads every manifest, no tensors. Raises: LevelError."""
    storage = open_existing(args.url, args.storage_option)
    contents = Catalogue(storage).contents(run=args.run)
    levels_near: list[str] = []
    if contents.is_empty:
        levels_near = _levels_near(storage)
        output.line(_text_of_nothing(contents.url, levels_near))
    states = []
    bare_steps = []
    listed = []
    for snapshot in contents.snapshots:
        states.append((snapshot, *_state_of(snapshot)))
        listed.append(_listed(snapshot))
    for directory, step in contents.uncommitted:
        bare_steps.append(step)
        listed.append({**_BARE, "location": directory, "step": step})
    show_snapshots(output, contents, states, bare_steps)
    for problem in contents.problems:
        output.line(problem, "yellow")
    listed.sort(key=itemgetter("step", "location"))
    return output.result(
        url=contents.url,
        newest_run=contents.newest_run,
        snapshots=listed,
        problems=contents.problems,
        levels_near=levels_near,
    )


def _listed(snapshot: StoredSnapshot) -> dict[str, Any]:
    return {
        **fields_of(snapshot),
        "ranks": snapshot.ranks,
        "world_size": snapshot.world_size,
        "captured_ns": snapshot.captured_ns,
        "complete": snapshot.is_complete,
    }


def _state_of(snapshot: StoredSnapshot) -> tuple[str, str]:
    """Return a text and a colour that tell whether a snapshot can be restored from this level alone."""
    if snapshot.is_complete:
        return "complete", "green"
    return f"{snapshot.ranks} of {snapshot.world_size} ranks", "yellow"


def _text_of_nothing(url: str, levels_near: list[str]) -> str:
    text = f"no snapshots in {url}"
    if not levels_near:
        return text
    where = "there are levels below"
    if levels_near == [url.rpartition("/")[0]]:
        where = "this is a part of the level"
    return f"{text}; {where}: {', '.join(levels_near)}"


def _levels_near(storage: Storage) -> list[str]:
    """Return levels in the directories of ``storage``, or the level that contains it: a hint if it has no snapshots.

    Blocks: one listing per directory, of a few dozen at most. Raises nothing.
    """
    parent, _, name = storage.url.rpartition("/")
    if SnapshotName.parse(name) is not None:
        return [parent]
    levels = []
    with contextlib.suppress(LevelError, OSError, FormatError):
        for name in sorted(storage.list())[:_MAX_NEIGHBOURS]:
            with contextlib.suppress(LevelError, OSError, FormatError):  # most likely a file
                if any(SnapshotName.parse(inner) is not None for inner in storage.list(name)):
                    levels.append(f"{storage.url}/{name}")
    return levels


# ---------------------------------------------------------------- show


def show(args: argparse.Namespace, output: Output) -> int:
    """Show one snapshot. Blocks: reads manifests and the first blocks, no tensors.

    Raises: SnapshotNotFound, FormatError, LevelError.
    """
    storage = open_existing(args.url, args.storage_option)

    def opened(catalogue: Catalogue) -> tuple[Catalogue, OpenSnapshot]:
        return catalogue, open_snapshot(catalogue, catalogue.find(args.wanted, args.run), verify=True)

    catalogue, snapshot = retry_if_deleted(storage, opened)
    with contextlib.closing(snapshot):
        plan = snapshot.plan
        facts = _facts(catalogue, plan)
        tensors = []
        for rank in range(plan.world_size):
            tensors += _tensors(snapshot, rank)
        state = snapshot.shards[0].meta.state
    parts = _parts(tensors, state)
    _print_facts(output, facts, catalogue.runs[plan.run_id])
    output.line("")
    rows = []
    for part in parts:
        rows.append((part["part"], part["tensors"], decimal(part["bytes"]), part["values"]))
    output.show(output.table("", "part of the state", "tensors>", "bytes>", "other values>", rows=rows))
    details: dict[str, Any] = {}
    if args.all:
        details = {"tensors": tensors, "state": state}
        title = "values"
        if plan.world_size > 1:
            title = "values of rank 0"
        _print_tensors(output, tensors, with_rank=plan.world_size > 1)
        _print_state(output, title, state)
    elif not output.as_json:
        output.line("")
        output.line("--all shows each tensor and value")
    return output.result(**facts, parts=parts, **details)


def _facts(catalogue: Catalogue, plan: RestartPlan) -> dict[str, Any]:
    snapshot = catalogue.snapshot_of(plan)
    created_ns = 0
    checksums = []
    for _, manifest in snapshot.files:
        created_ns = max(created_ns, manifest.created_ns)
        checksums.append(manifest.checksums.whole)
    _, first_manifest = snapshot.files[0]
    return {
        "url": catalogue.storage.url,
        **fields_of(snapshot),
        "run_started_ns": id_time_ns(plan.run_id),
        "world_size": plan.world_size,
        "captured_ns": snapshot.captured_ns,
        "created_ns": created_ns,
        "checksum": checksums,
        "packages": first_manifest.meta.packages,
    }


def _tensors(snapshot: OpenSnapshot, rank: int) -> list[dict[str, Any]]:
    """Return one row for each tensor and each further name of a tied one."""
    rows = []
    shard = snapshot.shards[rank]
    for name in shard.names:
        is_tied = name in shard.meta.aliases
        stored = shard.stored(shard.meta.aliases.get(name, name))
        row = {
            "name": name,
            "dtype": stored.logical or stored.spec.dtype,
            "shape": list(stored.shape),
            "bytes": stored.spec.nbytes,
            "alias_of": None,
            "rank": rank,
        }
        if is_tied:
            row["bytes"] = 0
            row["alias_of"] = stored.spec.name
        rows.append(row)
    return rows


def _parts(tensors: list[dict[str, Any]], state: Any) -> list[dict[str, Any]]:
    """Return the first level of the state: tensors and bytes of all ranks, other values of rank 0."""
    parts: dict[str, dict[str, Any]] = {}

    def part_of(path: str) -> dict[str, Any]:
        name = path.split(".")[0]
        return parts.setdefault(name, {"part": name, "tensors": 0, "bytes": 0, "values": 0})

    for path, text in _values(state):
        part = part_of(path)
        if not text.startswith("tensor "):
            part["values"] += 1
    for tensor in tensors:
        part = part_of(tensor["name"])
        part["tensors"] += 1
        part["bytes"] += tensor["bytes"]
    return list(parts.values())


def _values(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield path and value of each leaf of an encoded state. Nothing is decoded."""
    pairs: list[tuple[str, Any]] = []
    if depth < _MAX_DEPTH:
        if isinstance(value, dict) and TAG not in value:
            pairs = list(value.items())
        elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
            pairs = [(str(index), item) for index, item in enumerate(value)]
    if pairs:
        prefix = ""
        if path:
            prefix = f"{path}."
        for key, item in pairs:
            yield from _values(item, f"{prefix}{key}", depth + 1)
    elif isinstance(value, dict) and value.get(TAG) == "tensor":
        yield path, f"tensor {value.get('v')}"
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _print_facts(output: Output, facts: dict[str, Any], run_name: str) -> None:
    times = f"{when(facts['captured_ns'])} UTC, committed {when(facts['created_ns'])}"
    packages = [f"{name} {version}" for name, version in facts["packages"].items()]
    rows = (
        ("step", str(facts["step"])),
        ("names", ", ".join(facts["names"])),
        ("run", f"{run_name}, started {when(facts['run_started_ns'])} UTC"),
        ("level", facts["url"]),
        ("directory", facts["location"]),
        ("captured", times),
        ("size", f"{decimal(facts['size_bytes'])} in {count_of(facts['world_size'], 'rank')}"),
        ("packages", ", ".join(packages)),
    )
    for name, text in rows:
        if text:
            output.line(f"{name:10} {text}")


def _print_tensors(output: Output, tensors: list[dict[str, Any]], *, with_rank: bool) -> None:
    columns = ["name<", "dtype", "shape", "bytes>", "tied to"]
    if with_rank:
        columns.append("rank>")
    rows = []
    for tensor in tensors:
        size = decimal(tensor["bytes"])
        row = [tensor["name"], tensor["dtype"], tensor["shape"], size, tensor["alias_of"] or "", tensor["rank"]]
        rows.append(row[: len(columns)])
    output.line("")
    output.show(output.table(count_of(len(tensors), "tensor"), *columns, rows=rows))


def _print_state(output: Output, title: str, state: Any) -> None:
    output.line("")
    output.line(title, "bold")
    for path, text in _values(state):
        line = output.cell(f"{path}: {text}").plain
        output.line(without_end(line, output.width))


# ---------------------------------------------------------------- verify

GOOD = "good"
INCOMPLETE = "incomplete"
DAMAGED = "bad"
GONE = "gone"
_STYLES = {GOOD: "green", DAMAGED: "red"}


@dataclass
class Verdict:
    """The result of reading one snapshot."""

    snapshot: StoredSnapshot
    state: str
    problems: list[str] = field(default_factory=list)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {**fields_of(self.snapshot), "state": self.state, "problems": self.problems}


def verify(args: argparse.Namespace, output: Output) -> int:
    """Verify. Blocks: reads everything. Exit code 1 if anything is bad, or nothing is there. Raises: LevelError."""
    started = time.perf_counter()
    storage = open_existing(args.url, args.storage_option)
    contents = Catalogue(storage).contents(args.step, args.run)
    without_manifest = [text for _, text in contents.without_manifest]
    if args.step and not (contents.snapshots or contents.problems or without_manifest):
        raise SnapshotNotFound(f"{contents.url}: no snapshot of step {', '.join(map(str, args.step))}")
    total = sum(snapshot.size_bytes for snapshot in contents.snapshots)
    verdicts = []
    fields = []
    problems = list(contents.problems)
    with output.bar("reading", total) as advance:
        for snapshot in contents.snapshots:
            verdict = check(storage, snapshot, advance)
            verdicts.append(verdict)
            fields.append(verdict.to_fields())
            problems += verdict.problems
    _print_verdicts(output, contents, verdicts, problems)
    return output.result(
        ok=bool(verdicts) and not problems,
        url=contents.url,
        snapshots=fields,
        problems=problems,
        without_manifest=without_manifest,
        size_bytes=total,
        seconds=round(time.perf_counter() - started, 3),
    )


def check(storage: Storage, snapshot: StoredSnapshot, advance: Callable[[int], None]) -> Verdict:
    """Read every byte of a snapshot's shards. Blocks. Raises: LevelError."""
    verdict = Verdict(snapshot, GOOD)
    if not snapshot.is_complete:
        verdict.state = INCOMPLETE
    for entry, manifest in snapshot.files:
        problem = _problem_of(FilePlace.of(storage, entry), manifest, advance)
        if problem is None:
            continue
        if problem == GONE:
            verdict.state = GONE  # the retention of a running job deleted it meanwhile
            return verdict
        verdict.state = DAMAGED
        verdict.problems.append(problem)
    return verdict


def _problem_of(place: FilePlace, manifest: Manifest, advance: Callable[[int], None]) -> str | None:
    """Return the defect of a file, ``GONE`` if it was deleted, ``None`` if it is good."""
    try:
        read_node_file(place, manifest, progress=advance)
    except FormatError as error:
        return str(error)
    except FileNotFoundError:
        return GONE
    return None


def _print_verdicts(output: Output, contents: Contents, verdicts: list[Verdict], problems: list[str]) -> None:
    states = []
    listed = set()
    num_good = 0
    num_incomplete = 0
    for verdict in verdicts:
        states.append((verdict.snapshot, verdict.state, _STYLES.get(verdict.state, "yellow")))
        listed.add(verdict.snapshot.location)
        if verdict.state == GOOD:
            num_good += 1
        elif verdict.state in (INCOMPLETE, GONE):
            num_incomplete += 1
    for name, _ in contents.without_manifest:
        if name.directory not in listed:
            num_incomplete += 1
    show_snapshots(output, contents, states)
    for problem in problems:
        output.line(f"bad: {problem}", "red")
    for _, text in contents.without_manifest:
        output.line(f"incomplete: {text}", "yellow")
    if not (verdicts or problems or contents.without_manifest):
        output.line(f"no snapshots in {contents.url}: nothing to verify")
        return
    text = f"{count_of(num_good, 'snapshot')} good, {count_of(len(problems), 'problem')}"
    if num_incomplete:
        text += f", {num_incomplete} incomplete or gone"
    output.line(text)
