"""``lazysnap verify``: every byte of every shard and of every image of immutable tensors, against its checksum."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.output import BAD, OK, Output
from lazysnap.cli.places import open_existing
from lazysnap.errors import FormatError, SnapshotNotFound
from lazysnap.levels.blocks import read_shard
from lazysnap.levels.shards import ShardPlace
from lazysnap.levels.store import SnapshotStore
from lazysnap.resolver import FrozenEntry
from lazysnap.shard.manifest import Manifest
from lazysnap.snapshots.catalogue import Catalogue, Contents, Found

GOOD, INCOMPLETE, DAMAGED = "good", "incomplete", "bad"


@dataclass
class Verdict:
    """What was found out about one snapshot, or one image of immutable tensors."""

    fields: dict[str, Any]
    size_bytes: int = 0
    state: str = GOOD
    problems: list[str] = field(default_factory=list)

    def blame(self, problem: str) -> None:
        """It is bad, and why."""
        self.state = DAMAGED
        self.problems.append(problem)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**self.fields, "state": self.state, "size_bytes": self.size_bytes, "problems": self.problems}


def run(args: argparse.Namespace, output: Output) -> int:
    """Verify. Blocks: reads everything. Exit code 1 if anything is bad, or nothing is there. Raises: LevelError."""
    started = time.perf_counter()
    store = open_existing(args.url, args.storage_option)
    run_id = None if args.run is None else Catalogue(store).run_of(args.run)
    seen = Catalogue(store).contents(args.step).of_run(run_id)
    problems = seen.inventory.problems
    if args.step and not seen.snapshots and not problems:
        raise SnapshotNotFound(f"{seen.url}: no snapshot of step {', '.join(map(str, args.step))}")
    total = sum(found.size_bytes for found in seen.snapshots) + sum(manifest.size_bytes for _, manifest in seen.frozen)
    with output.bar("reading", total) as advance:
        frozen = {one.digest: _check_image(store, one, found, advance) for one, found in seen.frozen}
        snapshots = [_check(store, found, frozen, advance) for found in seen.snapshots]
    verdicts = [*snapshots, *frozen.values()]
    bad = [*problems, *(problem for verdict in verdicts for problem in verdict.problems)]
    is_ok = bool(verdicts) and not bad
    output.result(
        {
            "command": "verify",
            "ok": is_ok,
            "url": seen.url,
            "snapshots": [verdict.as_json() for verdict in snapshots],
            "frozen": [verdict.as_json() for verdict in frozen.values()],
            "problems": bad,
            "size_bytes": total,
            "seconds": round(time.perf_counter() - started, 3),
        }
    )
    _print(output, seen, snapshots, bad)
    return OK if is_ok else BAD


def _problem(place: ShardPlace, manifest: Manifest, advance: Callable[[int], None]) -> str | None:
    """What is wrong with one shard, ``None`` if nothing is. Raises: LevelError; FileNotFoundError, if it is gone."""
    try:
        read_shard(place, manifest, beat=advance)
    except FormatError as error:
        return str(error)
    return None


def _check_image(
    store: SnapshotStore, image: FrozenEntry, manifest: Manifest, advance: Callable[[int], None]
) -> Verdict:
    fields: dict[str, Any] = {"location": image.location, "digest": image.digest}
    verdict = Verdict(fields, manifest.size_bytes)
    try:
        problem = _problem(store.place(image), manifest, advance)
    except FileNotFoundError:
        problem = f"{store.url}/{image.location}: deleted while it was read"
    if problem is not None:
        verdict.blame(problem)
    return verdict


def _check(
    store: SnapshotStore,
    found: Found,
    frozen: dict[str, Verdict],
    advance: Callable[[int], None],
) -> Verdict:
    fields = {
        "location": found.locations[0],
        "locations": found.locations,
        "step": found.step,
        "run_id": found.run_id,
        "names": found.names,
    }
    verdict = Verdict(fields, found.size_bytes, GOOD if found.is_complete else INCOMPLETE)
    for entry, manifest in found.shards:
        try:
            problem = _problem(store.place(entry), manifest, advance)
        except FileNotFoundError:
            verdict.state = "gone"  # a running job's retention took it meanwhile
            return verdict
        if problem is not None:
            verdict.blame(problem)
    for digest in found.frozen:
        image = frozen.get(digest)
        if image is None:
            verdict.blame(f"{store.url}/{found.location}: its immutable tensors {digest} are not there")
        elif image.state != GOOD:
            verdict.state = DAMAGED  # the image itself tells what is wrong with it
    return verdict


def _print(output: Output, seen: Contents, snapshots: list[Verdict], bad: list[str]) -> None:
    if snapshots:
        table = output.table(seen.url, "step>", "state", "size>", "names", "run", "directory")
        styles = {GOOD: "green", DAMAGED: "red"}
        for verdict in snapshots:
            table.add_row(
                str(verdict.fields["step"]),
                output.cell(verdict.state, styles.get(verdict.state, "yellow")),
                decimal(verdict.size_bytes),
                output.cell(", ".join(verdict.fields["names"])),
                seen.runs[verdict.fields["run_id"]],
                output.cell(", ".join(verdict.fields["locations"])),
            )
        output.show(table)
    for problem in bad:
        output.line(f"bad: {problem}", "red")
    if not snapshots and not bad:
        output.line(f"no snapshots in {seen.url}: nothing to verify")
        return
    counts = {state: sum(verdict.state == state for verdict in snapshots) for state in (GOOD, DAMAGED)}
    others = len(snapshots) - sum(counts.values())
    total = counts[GOOD]
    text = f"{total} snapshot{'s' * (total != 1)} good, {len(bad)} problem{'s' * (len(bad) != 1)}"
    output.line(text + (f", {others} incomplete or gone" if others else ""))
