"""``lazysnap copy``: snapshots from one level to another, verified when they are read and after they were written."""

import argparse
import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.filesize import decimal

from lazysnap.cli.output import Output, count_of
from lazysnap.cli.stores import open_existing, open_place
from lazysnap.errors import ConfigError, FormatError, LevelError, SnapshotNotFound
from lazysnap.levels.blocks import FileBlocks, VerifiedSource, read_node_file
from lazysnap.levels.store import SnapshotStore
from lazysnap.resolver import Entry, RestartPlan, Wanted
from lazysnap.runs import LATEST
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.names import keep_file_name
from lazysnap.snapshots.catalogue import Catalogue

COPIED, PRESENT, BAD = "copied", "there already", "bad"


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


def run(args: argparse.Namespace, output: Output) -> int:
    """Copy. Blocks. Exit code 1 if a snapshot was damaged, and left out. Raises: LevelError, SnapshotNotFound."""
    source = open_existing(args.url, args.storage_option, args.from_option)
    target = open_place(args.to, args.storage_option, args.to_option)
    if source.url == target.url:
        raise ConfigError(f"{source.url}: both URLs name the same place")
    catalogue = Catalogue(source)
    plans, problems = _plans(catalogue, args)
    started = time.perf_counter()
    target.sweep()  # what a killed copy left
    done = []
    for plan in plans:
        copied = _copy(catalogue, target, plan, output)
        done.append(copied)
        size = f", {decimal(copied.size_bytes)}" if copied.size_bytes else ""
        output.say(f"step {copied.step}: {copied.problem or copied.state}{size}", "red" if copied.problem else "")
    seconds = time.perf_counter() - started
    bad = [*problems, *(copied.problem for copied in done if copied.problem)]
    total = sum(copied.size_bytes for copied in done)
    for problem in problems:
        output.line(f"bad: {problem}", "red")
    counts = {state: sum(copied.state == state for copied in done) for state in (COPIED, PRESENT)}
    output.line(
        f"{count_of(counts[COPIED], 'snapshot')} copied, {decimal(total)} in {seconds:.1f} s "
        f"({decimal(int(total / max(seconds, 1e-9)))}/s), {counts[PRESENT]} there already, {len(bad)} bad"
    )
    return output.result(
        ok=not bad,
        url=source.url,
        to=target.url,
        snapshots=[asdict(copied) for copied in done],
        problems=bad,
        size_bytes=total,
        seconds=round(seconds, 3),
    )


def _plans(catalogue: Catalogue, args: argparse.Namespace) -> tuple[list[RestartPlan], list[str]]:
    """Return the snapshots to copy, the newest first, and why others cannot be copied."""
    wanted = args.step or ([LATEST] if args.latest else None)
    if wanted is not None:
        found = [catalogue.find(text, args.run) for text in wanted]
        return list({plan.key: plan for plan in found}.values()), []
    plans = list(catalogue.plans(Wanted(run_id=None if args.run is None else catalogue.run_of(args.run))))
    if not plans:
        raise SnapshotNotFound(
            f"{catalogue.store.url}: no complete snapshot" + "".join(f"\n{p}" for p in catalogue.problems)
        )
    return plans, catalogue.problems


def _copy(catalogue: Catalogue, target: SnapshotStore, plan: RestartPlan, output: Output) -> Copied:
    """Copy the missing files of a snapshot, and behind them its names."""
    found = catalogue.found(plan)
    size = found.size_bytes
    copied = Copied(found.step, found.run_id, found.location)
    try:
        with output.bar(f"step {plan.step}", size if target.storage.checks_writes else 2 * size) as advance:
            for entry, manifest in found.files:
                copied.size_bytes += _copy_file(catalogue.store, target, entry, manifest, advance)
        for entry, _ in found.shards:
            present = target.storage.list(entry.location)
            for name in entry.names:
                if keep_file_name(name) not in present:
                    target.keep(entry, name)
    except (FormatError, FileNotFoundError) as error:
        copied.problem = str(error)
    copied.state = BAD if copied.problem else COPIED if copied.size_bytes else PRESENT
    return copied


def _copy_file(
    source: SnapshotStore, target: SnapshotStore, entry: Entry, manifest: Manifest, advance: Callable[[int], None]
) -> int:
    """Copy one node's file, unless it is there and whole. Return the bytes written.

    Raises: FormatError, if it is damaged where it is read; FileNotFoundError; LevelError.
    """
    place = source.place(entry)
    moved = 0

    def count(size: int) -> None:
        nonlocal moved
        moved += size
        advance(size)

    blocks = FileBlocks(place, manifest)
    with contextlib.closing(blocks):
        written = target.write_file(manifest.name, manifest.shards, VerifiedSource(blocks, count))
    if moved and not target.storage.checks_writes:
        try:
            read_node_file(target.place(entry), written, progress=advance)
        except (FormatError, FileNotFoundError) as error:
            raise LevelError(f"{target.url}/{entry.location}: reads back other bytes than were written") from error
    return moved
