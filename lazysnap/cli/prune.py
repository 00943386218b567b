"""``lazysnap prune``: delete by the rules of retention, and what dead writers left. It says what, and asks."""

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.output import BAD, OK, Output
from lazysnap.cli.places import open_existing
from lazysnap.config import PersistentLevel
from lazysnap.errors import ConfigError, FormatError, ShardCorrupt, SnapshotNotFound
from lazysnap.levels.blocks import read_shard
from lazysnap.levels.leftovers import is_settled, leftovers, lone_names
from lazysnap.levels.shards import ShardPlace
from lazysnap.levels.store import SnapshotStore
from lazysnap.policy import expired
from lazysnap.resolver import FrozenEntry
from lazysnap.runs import run_of
from lazysnap.shard.names import is_directory_of_ours, parse_keep_file_name
from lazysnap.snapshots.catalogue import Catalogue, Contents, Found


@dataclass
class Plan:
    """What would be done."""

    going: list[Found] = field(default_factory=list)
    staying: list[tuple[Found, str]] = field(default_factory=list)
    """With the reason."""
    images: list[tuple[FrozenEntry, int]] = field(default_factory=list)
    """Immutable tensors that nothing will refer to, with their bytes."""
    unnamed: list[Found] = field(default_factory=list)
    """Snapshots that lose the name."""
    leftovers: list[str] = field(default_factory=list)
    """Objects without a commit; they go if no living writer stands behind them."""

    @property
    def size_bytes(self) -> int:
        """Bytes of snapshots and immutable tensors that go."""
        return sum(found.size_bytes for found in self.going) + sum(size for _, size in self.images)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.going or self.images or self.unnamed or self.leftovers)


def run(args: argparse.Namespace, output: Output) -> int:
    """Prune. Blocks. Exit code 1 if something damaged was seen. Raises: LevelError, ConfigError."""
    if args.json and not (args.yes or args.dry_run):
        raise ConfigError("--json cannot ask: add --yes or --dry-run")
    if args.keep_every is not None and args.keep_last is None:
        raise ConfigError("--keep-every keeps more than --keep-last N does: give both")
    store = open_existing(args.url, args.storage_option)
    level = None
    if args.keep_last is not None:
        if args.keep_last < 1:
            raise ConfigError("--keep-last must be at least 1: the newest complete snapshot always stays")
        level = PersistentLevel(args.url, keep_last=args.keep_last, keep_every_n_steps=args.keep_every)
    seen = Catalogue(store).contents()
    planner = _Planner(store, seen, args, output)
    plan = planner.plan(level)
    if args.name is not None and not plan.unnamed:
        raise SnapshotNotFound(f"{seen.url}: no snapshot is called {args.name!r}")
    _print(output, seen, plan, is_dry=args.dry_run)
    gone: list[str] = []
    if not args.dry_run and not plan.is_empty:
        if not args.yes and not _agreed(output):
            output.say("nothing was deleted")
            return OK
        gone = _carry_out(store, plan, args, output)
    problems = [*seen.inventory.problems, *planner.problems]
    output.result(
        {
            "command": "prune",
            "ok": not problems,
            "url": seen.url,
            "dry_run": args.dry_run,
            "snapshots": [_fields(found) for found in plan.going],
            "kept": [{**_fields(found), "because": reason} for found, reason in plan.staying],
            "frozen": [image.location for image, _ in plan.images],
            "unnamed": [location for found in plan.unnamed for location in found.locations],
            "leftovers": plan.leftovers,
            "size_bytes": plan.size_bytes,
            "deleted": gone,
            "problems": problems,
        }
    )
    if gone:
        output.line(f"{len(gone)} deleted, {decimal(plan.size_bytes)} of snapshots freed", "green")
    return BAD if problems else OK


def _fields(found: Found) -> dict[str, Any]:
    facts = {"step": found.step, "run_id": found.run_id, "size_bytes": found.size_bytes}
    return {**facts, "location": found.locations[0], "locations": found.locations}


class _Planner:
    """Decides, deletes nothing."""

    def __init__(self, store: SnapshotStore, seen: Contents, args: argparse.Namespace, output: Output) -> None:
        self._store = store
        self._output = output
        self._seen = seen
        self._run = None if args.run is None else run_of(args.run, [seen.inventory], seen.url)
        self._name = args.name
        self._image_problems: dict[str, str] = {}
        self.problems: list[str] = []

    def plan(self, level: PersistentLevel | None) -> Plan:
        """``level`` says what to keep; ``None``: all of it. Blocks: the newest snapshots are read back."""
        plan = Plan(leftovers=self._leftovers())
        runs: dict[str, list[Found]] = defaultdict(list)
        for found in self._seen.snapshots:
            runs[found.run_id].append(found)
        for run_id, snapshots in runs.items():
            if self._run not in (None, run_id):
                plan.staying += [(found, "of another run") for found in snapshots]
                continue
            plan.unnamed += [found for found in snapshots if self._name in found.names]
            self._sort_out(plan, level, snapshots)
        going = {id(found) for found in plan.going}
        plan.images = self._unreferenced([found for found in self._seen.snapshots if id(found) not in going])
        return plan

    def _sort_out(self, plan: Plan, level: PersistentLevel | None, snapshots: list[Found]) -> None:
        steps: dict[int, list[Found]] = defaultdict(list)
        for found in snapshots:
            steps[found.step].append(found)
        complete = [step for step in sorted(steps) if any(found.is_complete for found in steps[step])]
        named = {step for step in steps if any(set(found.names) - {self._name} for found in steps[step])}
        sound = self._sound(steps, complete, level.keep_last) if level else []
        going = set(expired(complete, level, sound=sound, protected=named)) if level else set()
        # As in retention: what never became complete is garbage once something newer is safe.
        worthless = {step for step in steps if step not in complete and sound and step < max(sound)} - named
        going |= {step for step in worthless if all(map(self._is_settled, steps[step]))}
        for step in sorted(steps):
            reason = self._reason(step, steps[step], complete=complete, named=named) if step not in going else None
            if reason is None:
                places = [place for found in steps[step] for place in _places(self._store, found)]
                reason = next(filter(None, (place.why_it_stays() for place in places)), None)
            if reason is None:
                plan.going += steps[step]
            else:
                plan.staying += [(found, reason) for found in steps[step]]

    def _reason(self, step: int, snapshots: list[Found], *, complete: list[int], named: set[int]) -> str:
        if step in named:
            return "called " + ", ".join(sorted({name for found in snapshots for name in found.names} - {self._name}))
        if step not in complete:
            return "incomplete: changed within a day, or nothing newer is known to be sound"
        return "newest complete" if complete and step == complete[-1] else "to be kept"

    def _sound(self, steps: dict[int, list[Found]], complete: list[int], count: int) -> list[int]:
        """The newest ``count`` complete steps that read back whole: nothing is deleted in favour of damaged ones."""
        sound: list[int] = []
        for step in reversed(complete):
            if len(sound) == count:
                break
            try:
                self._check_images(steps[step])
                shards = [pair for found in steps[step] for pair in found.shards]
                total = sum(manifest.size_bytes for _, manifest in shards)
                with self._output.bar(f"reading back step {step}", total) as advance:
                    for entry, manifest in shards:
                        read_shard(self._store.place(entry), manifest, beat=advance)
            except (FormatError, FileNotFoundError) as error:
                self.problems.append(f"step {step} does not count, and nothing is deleted for it: {error}")
                continue
            sound.append(step)
        return sound

    def _check_images(self, snapshots: list[Found]) -> None:
        """Read back the immutable tensors that they refer to, each image once. Raises: ShardCorrupt."""
        wanted = {digest for found in snapshots for digest in found.frozen}
        for image, manifest in self._seen.frozen:
            key = image.digest
            if key in wanted and key not in self._image_problems:
                self._image_problems[key] = ""
                with self._output.bar("reading back immutable tensors", manifest.size_bytes) as advance:
                    try:
                        read_shard(self._store.place(image), manifest, beat=advance)
                    except (FormatError, FileNotFoundError) as error:
                        self._image_problems[key] = str(error)
        for key in sorted(wanted & self._image_problems.keys()):
            if self._image_problems[key]:
                raise ShardCorrupt(self._image_problems[key])

    def _is_settled(self, found: Found) -> bool:
        """Whether it is nobody's copy on its way: none of its files changed for a day."""
        places = _places(self._store, found)
        return all(is_settled(self._store.storage, path) for place in places for path in place.paths)

    def _unreferenced(self, staying: list[Found]) -> list[tuple[FrozenEntry, int]]:
        """Immutable tensors that no snapshot will refer to, no reader or writer holds, and that did not change for a
        day: else a snapshot that refers to them may be on its way.
        """
        if self._seen.inventory.problems:
            return []  # a manifest that cannot be read now may refer to them
        wanted = {digest for found in staying for digest in found.frozen}
        images = []
        for image, manifest in self._seen.frozen:
            place = self._store.place(image)
            is_old = image.digest not in wanted and all(is_settled(self._store.storage, path) for path in place.paths)
            if is_old and not place.why_it_stays():
                images.append((image, manifest.size_bytes))
        return images

    def _leftovers(self) -> list[str]:
        """As ``SnapshotStore.sweep`` finds them; it also asks whether their writers live."""
        storage = self._store.storage
        found = []
        for directory in filter(is_directory_of_ours, storage.list()):
            found += [leftover.path for leftover in leftovers(storage, directory, None)]
            found += lone_names(storage, directory)
        return found


def _places(store: SnapshotStore, found: Found) -> list[ShardPlace]:
    return [store.place(entry) for entry, _ in found.shards]


def _carry_out(store: SnapshotStore, plan: Plan, args: argparse.Namespace, output: Output) -> list[str]:
    """Delete; what went. Each snapshot's manifest goes first, so that what an interruption leaves is garbage."""
    gone: list[str] = []
    for found in plan.unnamed:
        store.release(found.run_id, args.name)
    total = len(plan.going) + len(plan.images)
    with output.counter("deleting", total) as advance:
        for found in plan.going:
            advance(1)
            places = _places(store, found)
            # Asking may have taken a while.
            if any(place.why_it_stays() for place in places) or _is_named(store, found):
                output.say(f"{found.location} stays: somebody reads it, or gave it a name meanwhile")
                continue
            for place in places:
                place.delete()
            gone += found.locations
        wanted = {entry.frozen for entry in store.inventory().entries} if plan.images else set()
        for image, _ in plan.images:
            advance(1)
            place = store.place(image)
            if image.digest not in wanted and not place.why_it_stays():
                place.delete()
                gone.append(image.location)
    return [*gone, *store.sweep()]


def _is_named(store: SnapshotStore, found: Found) -> bool:
    return any(parse_keep_file_name(name) for location in found.locations for name in store.storage.list(location))


def _agreed(output: Output) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("there is nobody to ask: add --yes to delete, or --dry-run to look")
    output.say("delete them? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print(output: Output, seen: Contents, plan: Plan, *, is_dry: bool) -> None:
    rows: list[tuple[Found, str, str]] = [(found, "goes", "red") for found in plan.going]
    rows += [(found, f"stays: {reason}", "") for found, reason in plan.staying]
    if rows:
        table = output.table(seen.url, "step>", "what", "size>", "run", "directory")
        for found, what, style in sorted(rows, key=lambda row: (row[0].step, row[0].location)):
            cells = (
                output.cell(what, style),
                decimal(found.size_bytes),
                seen.runs[found.run_id],
                output.cell(found.location),
            )
            table.add_row(str(found.step), *cells)
        output.show(table)
    for found in plan.unnamed:
        output.line(f"step {found.step} loses its name")
    for image, size in plan.images:
        output.line(f"{image.location} goes: {decimal(size)} of immutable tensors that nothing refers to", "red")
    for path in plan.leftovers:
        output.line(f"{path} goes, if no living writer stands behind it", "red")
    for problem in seen.inventory.problems:
        output.line(problem, "yellow")
    if plan.is_empty:
        output.line("nothing to delete")
    elif is_dry:
        output.line(f"{decimal(plan.size_bytes)} would go; this was a dry run")
