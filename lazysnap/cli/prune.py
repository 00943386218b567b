"""``lazysnap prune``: delete by the rules of retention, and what dead writers left. It says what, and asks."""

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.output import BAD, OK, Output
from lazysnap.cli.places import open_existing
from lazysnap.cli.survey import Found, Survey, beats, survey
from lazysnap.config import PersistentLevel
from lazysnap.errors import ConfigError, FormatError, ShardCorrupt, SnapshotNotFound
from lazysnap.levels.files import TEMP_MARK
from lazysnap.levels.retention import is_complete, left_names
from lazysnap.levels.shards import ShardPlace
from lazysnap.levels.storage import ABANDONED_AFTER_S
from lazysnap.levels.store import SnapshotStore
from lazysnap.policy import expired
from lazysnap.resolver import FrozenEntry
from lazysnap.shard.manifest import parse_directory_name, parse_frozen_directory_name, parse_keep_file_name
from lazysnap.shard.stem import parse_file_name


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
    seen = survey(store)
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
            "unnamed": [found.location for found in plan.unnamed],
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
    return {"step": found.step, "run_id": found.run_id, "location": found.location, "size_bytes": found.size_bytes}


class _Planner:
    """Decides, deletes nothing."""

    def __init__(self, store: SnapshotStore, seen: Survey, args: argparse.Namespace, output: Output) -> None:
        self._store = store
        self._output = output
        self._seen = seen
        self._run = args.run or ""
        self._name = args.name
        self._image_problems: dict[tuple[str, str], str] = {}
        self.problems: list[str] = []

    def plan(self, level: PersistentLevel | None) -> Plan:
        """``level`` says what to keep; ``None``: all of it. Blocks: the newest snapshots are read back."""
        plan = Plan(leftovers=self._leftovers())
        runs: dict[str, list[Found]] = defaultdict(list)
        for found in self._seen.snapshots:
            runs[found.run_id].append(found)
        for run_id, snapshots in runs.items():
            if not run_id.startswith(self._run):
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
        complete = [step for step in sorted(steps) if self._is_complete(steps[step])]
        named = {step for step in steps if any(set(found.names) - {self._name} for found in steps[step])}
        sound = self._sound(steps, complete, level.keep_last) if level else []
        going = set(expired(complete, level, sound=sound, protected=named)) if level else set()
        # As in retention: what never became complete is garbage once something newer is safe.
        going |= {step for step in steps if step not in complete and sound and step < max(sound)} - named
        for step in sorted(steps):
            reason = self._reason(step, steps[step], complete=complete, named=named) if step not in going else None
            if reason is None and any(self._is_leased(found) for found in steps[step]):
                reason = "being read"
            if reason is None:
                plan.going += steps[step]
            else:
                plan.staying += [(found, reason) for found in steps[step]]

    def _reason(self, step: int, snapshots: list[Found], *, complete: list[int], named: set[int]) -> str:
        if step in named:
            return "called " + ", ".join(sorted({name for found in snapshots for name in found.names} - {self._name}))
        if step not in complete:
            return "incomplete, and nothing newer is known to be sound"
        return "newest complete" if step == complete[-1] else "to be kept"

    def _is_complete(self, snapshots: list[Found]) -> bool:
        return is_complete(entry for found in snapshots for entry, _ in found.shards if not self._seen.missing(found))

    def _sound(self, steps: dict[int, list[Found]], complete: list[int], count: int) -> list[int]:
        """The newest ``count`` complete steps that read back whole: nothing is deleted in favour of damaged ones."""
        sound: list[int] = []
        for step in reversed(complete):
            if len(sound) == count:
                break
            try:
                self._check_images(steps[step])
                shards = [pair for found in steps[step] for pair in found.files]
                total = sum(manifest.size_bytes for _, manifest in shards)
                with self._output.bar(f"reading back step {step}", total) as advance:
                    for entry, manifest in shards:
                        self._store.verify_entry(entry, beats(manifest, advance))
            except (FormatError, FileNotFoundError) as error:
                self.problems.append(f"step {step} does not count, and nothing is deleted for it: {error}")
                continue
            sound.append(step)
        return sound

    def _check_images(self, snapshots: list[Found]) -> None:
        """Read back the immutable tensors that they refer to, each image once. Raises: ShardCorrupt."""
        wanted = {(found.run_id, digest) for found in snapshots for digest in found.frozen}
        for image, manifest in self._seen.frozen:
            key = image.run_id, image.digest
            if key in wanted and key not in self._image_problems:
                self._image_problems[key] = ""
                with self._output.bar("reading back immutable tensors", manifest.size_bytes) as advance:
                    try:
                        self._store.verify_entry(image, beats(manifest, advance))
                    except (FormatError, FileNotFoundError) as error:
                        self._image_problems[key] = str(error)
        for key in sorted(wanted & self._image_problems.keys()):
            if self._image_problems[key]:
                raise ShardCorrupt(self._image_problems[key])

    def _is_leased(self, found: Found) -> bool:
        return any(self._store.storage.is_leased(place.shard_path) for place in _places(self._store, found))

    def _unreferenced(self, staying: list[Found]) -> list[tuple[FrozenEntry, int]]:
        """Immutable tensors that no snapshot will refer to, no reader or writer holds, and that are not new."""
        if self._seen.inventory.problems:
            return []  # a manifest that cannot be read now may refer to them
        wanted = {(found.run_id, digest) for found in staying for digest in found.frozen}
        storage = self._store.storage
        images = []
        for image, manifest in self._seen.frozen:
            place = self._store.place(image)
            is_ours = image.run_id.startswith(self._run) and (image.run_id, image.digest) not in wanted
            is_old = time.time() - manifest.created_ns / 1e9 > ABANDONED_AFTER_S
            if is_ours and is_old and not any(map(storage.is_leased, (place.shard_path, place.manifest_path))):
                images.append((image, manifest.size_bytes))
        return images

    def _leftovers(self) -> list[str]:
        """As ``SnapshotStore.sweep`` finds them; it also asks whether their writers live."""
        found = []
        for directory in self._store.storage.list():
            if parse_directory_name(directory) is None and parse_frozen_directory_name(directory) is None:
                continue
            names = self._store.storage.list(directory)
            for name in names:
                parsed = parse_file_name(name.removeprefix(".").split(TEMP_MARK)[0])
                is_temporary = name.startswith(".") and TEMP_MARK in name
                is_uncommitted = name.removesuffix(".safetensors") + ".json" not in names
                if parsed is not None and (is_temporary or (parsed[1] == "safetensors" and is_uncommitted)):
                    found.append(f"{directory}/{name}")
            found += [f"{directory}/{name}" for name in left_names(names)]
        return found


def _places(store: SnapshotStore, found: Found) -> list[ShardPlace]:
    return [store.place(entry) for entry, _ in found.files]


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
            if any(store.storage.is_leased(place.shard_path) for place in places) or _is_named(store, found.location):
                output.say(f"{found.location} stays: somebody reads it, or gave it a name meanwhile")
                continue
            for place in places:
                place.delete()
            gone.append(found.location)
        wanted = {(entry.run_id, entry.frozen) for entry in store.inventory().entries} if plan.images else set()
        for image, _ in plan.images:
            advance(1)
            place = store.place(image)
            leased = any(map(store.storage.is_leased, (place.shard_path, place.manifest_path)))
            if (image.run_id, image.digest) not in wanted and not leased:
                place.delete()
                gone.append(image.location)
    return [*gone, *store.sweep()]


def _is_named(store: SnapshotStore, location: str) -> bool:
    return any(map(parse_keep_file_name, store.storage.list(location)))


def _agreed(output: Output) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("there is nobody to ask: add --yes to delete, or --dry-run to look")
    output.say("delete them? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print(output: Output, seen: Survey, plan: Plan, *, is_dry: bool) -> None:
    rows: list[tuple[Found, str, str]] = [(found, "goes", "red") for found in plan.going]
    rows += [(found, f"stays: {reason}", "") for found, reason in plan.staying]
    if rows:
        table = output.table(seen.url, "step>", "what", "size>", "run", "directory")
        for found, what, style in sorted(rows, key=lambda row: (row[0].step, row[0].location)):
            cells = (output.cell(what, style), decimal(found.size_bytes), found.run_id, output.cell(found.location))
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
