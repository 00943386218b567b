"""``lazysnap verify``: every byte of every file, against its checksum."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lazysnap.cli.output import Output, count_of, fields_of, show_snapshots
from lazysnap.cli.stores import open_existing
from lazysnap.errors import FormatError, SnapshotNotFound
from lazysnap.levels.blocks import read_node_file
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.store import SnapshotStore
from lazysnap.shard.manifest import Manifest
from lazysnap.snapshots.catalogue import Catalogue, Contents, Found

GOOD, INCOMPLETE, DAMAGED, GONE = "good", "incomplete", "bad", "gone"
_STYLES = {GOOD: "green", DAMAGED: "red"}


@dataclass
class Verdict:
    """The result for one snapshot."""

    fields: dict[str, Any]
    state: str = GOOD
    problems: list[str] = field(default_factory=list)

    def blame(self, problem: str) -> None:
        """Record a damage."""
        self.state = DAMAGED
        self.problems.append(problem)

    def compare(self, place: FilePlace, manifest: Manifest, advance: Callable[[int], None]) -> bool:
        """Read every byte of a file. False if it was deleted. Blocks. Raises: LevelError."""
        try:
            read_node_file(place, manifest, progress=advance)
        except FormatError as error:
            self.blame(str(error))
        except FileNotFoundError:
            return False
        return True

    def to_fields(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {**self.fields, "state": self.state, "problems": self.problems}


def run(args: argparse.Namespace, output: Output) -> int:
    """Verify. Blocks: reads everything. Exit code 1 if anything is bad, or nothing is there. Raises: LevelError."""
    started = time.perf_counter()
    store = open_existing(args.url, args.storage_option)
    seen = Catalogue(store).contents(args.step, args.run)
    unreadable = seen.problems
    without_manifest = [text for _, text in seen.without_manifest]
    if args.step and not (seen.snapshots or unreadable or without_manifest):
        raise SnapshotNotFound(f"{seen.url}: no snapshot of step {', '.join(map(str, args.step))}")
    total = sum(found.size_bytes for found in seen.snapshots)
    with output.bar("reading", total) as advance:
        snapshots = [check(store, found, advance) for found in seen.snapshots]
    bad = [*unreadable, *(problem for verdict in snapshots for problem in verdict.problems)]
    _print(output, seen, snapshots, bad)
    return output.result(
        ok=bool(snapshots) and not bad,
        url=seen.url,
        snapshots=[verdict.to_fields() for verdict in snapshots],
        problems=bad,
        without_manifest=without_manifest,
        size_bytes=total,
        seconds=round(time.perf_counter() - started, 3),
    )


def check(store: SnapshotStore, found: Found, advance: Callable[[int], None]) -> Verdict:
    """Read every byte of a snapshot's shards. Blocks. Raises: LevelError."""
    verdict = Verdict(fields_of(found), GOOD if found.is_complete else INCOMPLETE)
    for entry, manifest in found.files:
        if not verdict.compare(store.place(entry), manifest, advance):
            verdict.state = GONE  # the retention of a running job deleted it meanwhile
            return verdict
    return verdict


def _print(output: Output, seen: Contents, snapshots: list[Verdict], bad: list[str]) -> None:
    states = [(verdict.state, _STYLES.get(verdict.state, "yellow")) for verdict in snapshots]
    show_snapshots(output, seen, [(found, *state) for found, state in zip(seen.snapshots, states, strict=True)])
    for problem in bad:
        output.line(f"bad: {problem}", "red")
    for _, text in seen.without_manifest:
        output.line(f"incomplete: {text}", "yellow")
    if not (snapshots or bad or seen.without_manifest):
        output.line(f"no snapshots in {seen.url}: nothing to verify")
        return
    good = sum(verdict.state == GOOD for verdict in snapshots)
    listed = {verdict.fields["location"] for verdict in snapshots}
    others = sum(verdict.state in (INCOMPLETE, GONE) for verdict in snapshots)
    others += sum(at.directory not in listed for at, _ in seen.without_manifest)
    text = f"{count_of(good, 'snapshot')} good, {count_of(len(bad), 'problem')}"
    output.line(text + (f", {others} incomplete or gone" if others else ""))
