"""``lazysnap copy`` and ``export``: snapshots at another level, or in the format of another tool."""

import argparse
import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.filesize import decimal

from lazysnap.cli.inspecting import open_existing, open_place
from lazysnap.cli.output import Output, count_of
from lazysnap.errors import ConfigError, FormatError, LevelError, SnapshotNotFound
from lazysnap.exports.exporting import Exported, write
from lazysnap.exports.job import ExportJob
from lazysnap.exports.named import named_in
from lazysnap.exports.target import format_of
from lazysnap.levels.blocks import FileBlocks, read_node_file
from lazysnap.levels.leftovers import sweep
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import keep, write_node_file
from lazysnap.resolver import Choice, Entry, RestartPlan
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.names import keep_file_name
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import retry_if_deleted

COPIED = "copied"
PRESENT = "there already"
BAD = "bad"


# ---------------------------------------------------------------- copy


@dataclass
class Copied:
    """The result for one snapshot."""

    step: int
    run_id: str
    location: str
    state: str = PRESENT
    size_bytes: int = 0
    """Bytes written."""
    problem: str | None = None


def copy(args: argparse.Namespace, output: Output) -> int:
    """Copy. Blocks. Exit code 1 if a snapshot was damaged, and skipped. Raises: LevelError, SnapshotNotFound."""
    source = open_existing(args.url, args.storage_option)
    target = open_place(args.to, args.to_option or args.storage_option)
    if source.url == target.url:
        raise ConfigError(f"{source.url}: both URLs name the same place")
    catalogue = Catalogue(source)
    plans, problems = _plans(catalogue, args)
    started = time.perf_counter()
    sweep(target)  # files of a killed copy
    snapshots = []
    bad = list(problems)
    counts = {COPIED: 0, PRESENT: 0, BAD: 0}
    total = 0
    for plan in plans:
        copied = _copy(catalogue, target, plan, output)
        snapshots.append(asdict(copied))
        counts[copied.state] += 1
        total += copied.size_bytes
        if copied.problem:
            bad.append(copied.problem)
        _say(copied, output)
    seconds = time.perf_counter() - started
    for problem in problems:
        output.line(f"bad: {problem}", "red")
    rate = decimal(int(total / max(seconds, 1e-9)))
    output.line(
        f"{count_of(counts[COPIED], 'snapshot')} copied, {decimal(total)} in {seconds:.1f} s ({rate}/s), "
        f"{counts[PRESENT]} already present, {len(bad)} bad"
    )
    return output.result(
        ok=not bad,
        url=source.url,
        to=target.url,
        snapshots=snapshots,
        problems=bad,
        size_bytes=total,
        seconds=round(seconds, 3),
    )


def _say(copied: Copied, output: Output) -> None:
    text = f"step {copied.step}: {copied.problem or copied.state}"
    if copied.size_bytes:
        text += f", {decimal(copied.size_bytes)}"
    style = ""
    if copied.problem:
        style = "red"
    output.say(text, style)


def _plans(catalogue: Catalogue, args: argparse.Namespace) -> tuple[list[RestartPlan], list[str]]:
    """Return the snapshots to copy, the newest first, and the reasons why others cannot be copied."""
    if args.step:
        chosen = {}
        for text in args.step:
            plan = catalogue.find(text, args.run)
            chosen[plan.key] = plan
        return list(chosen.values()), []
    run_id = None
    if args.run is not None:
        run_id = catalogue.run_of(args.run)
    plans = list(catalogue.plans(Choice(run=run_id)))
    if not plans:
        raise SnapshotNotFound("\n".join([f"{catalogue.storage.url}: no complete snapshot", *catalogue.problems]))
    return plans, catalogue.problems


def _copy(catalogue: Catalogue, target: Storage, plan: RestartPlan, output: Output) -> Copied:
    """Copy the missing files of a snapshot, and after them its names."""
    snapshot = catalogue.snapshot_of(plan)
    copied = Copied(snapshot.step, snapshot.run_id, snapshot.location)
    total = snapshot.size_bytes
    if not target.checks_writes():
        total *= 2  # written files are read back
    try:
        with output.bar(f"step {plan.step}", total) as advance:
            for entry, manifest in snapshot.files:
                copied.size_bytes += _copy_file(catalogue.storage, target, entry, manifest, advance)
        for entry, _ in snapshot.shards:
            present = target.list(entry.snapshot.directory)
            for name in entry.names:
                if keep_file_name(name) not in present:
                    keep(target, entry.snapshot, name)
    except (FormatError, FileNotFoundError) as error:
        copied.problem = str(error)
        copied.state = BAD
    else:
        if copied.size_bytes:
            copied.state = COPIED
    return copied


def _copy_file(
    source: Storage, target: Storage, entry: Entry, manifest: Manifest, advance: Callable[[int], None]
) -> int:
    """Copy one node's file, unless it exists and is whole. Return the bytes written.

    Raises: FormatError, if the source is damaged; FileNotFoundError; LevelError.
    """
    moved = 0

    def count(num_bytes: int) -> None:
        nonlocal moved
        moved += num_bytes
        advance(num_bytes)

    blocks = FileBlocks(FilePlace.of(source, entry), manifest)
    place = FilePlace.of(target, entry)
    with contextlib.closing(blocks):
        written = write_node_file(place, manifest.shards, blocks, count)
    if moved and not target.checks_writes():
        try:
            read_node_file(place, written, progress=advance)
        except (FormatError, FileNotFoundError) as error:
            place.delete_or_leave()  # else it would be offered to a restart
            raise LevelError(f"{place.where}: reads back other bytes than were written") from error
    return moved


# ---------------------------------------------------------------- export


def export(args: argparse.Namespace, output: Output) -> int:
    """Export. Blocks. Raises: SnapshotNotFound, FormatError, StateError, ConfigError, LevelError, OSError."""
    job = ExportJob(
        path=args.to,
        format=format_of(args.to, args.format),
        only=args.only,
        config=args.config,
        bar=output.bar,
    )
    job.check()
    named = named_in(args.to)

    def written(catalogue: Catalogue) -> tuple[str, Exported]:
        plan = catalogue.find(args.wanted, args.run)
        return catalogue.runs[plan.run_id], write(catalogue, plan, job, named)

    run_name, done = retry_if_deleted(open_existing(args.url, args.storage_option), written)
    for note in done.notes:
        output.say(note, "yellow")
    output.line(
        f"{done.path}: {done.format}, {decimal(done.size_bytes)}, step {done.step} of run {run_name} at {done.url}"
    )
    return output.result(
        url=done.url,
        step=done.step,
        run_id=done.run_id,
        to=done.path,
        format=done.format,
        size_bytes=done.size_bytes,
        notes=done.notes,
    )
