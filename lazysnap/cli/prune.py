"""``lazysnap prune``: show which snapshots the rules of retention, and which files of dead writers, would be deleted;
with ``--yes`` delete them.
"""

import argparse
from collections import defaultdict

from rich.filesize import decimal

from lazysnap.cli.inspecting import GONE, check, fields_of, open_existing, show_snapshots
from lazysnap.cli.output import Output
from lazysnap.config import PersistentLevel
from lazysnap.core.messages import LevelSettings
from lazysnap.core.retention import is_expired
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.levels.leftovers import leftovers, sweep
from lazysnap.levels.node_file import FilePlace, delete_files
from lazysnap.levels.store import release
from lazysnap.resolver import SnapshotKey
from lazysnap.snapshots.catalogue import Catalogue, StoredSnapshot


def run(args: argparse.Namespace, output: Output) -> int:
    """Prune. Blocks. Exit code 1 if there is damage. Raises: LevelError, ConfigError."""
    if args.keep_every is not None and args.keep_last is None:
        raise ConfigError("--keep-every keeps more than --keep-last N does: give both")
    if args.keep_last is not None and args.keep_last < 1:
        raise ConfigError("--keep-last must be at least 1: the newest complete snapshot always stays")
    plan = _Plan(Catalogue(open_existing(args.url, args.storage_option)), args, output)
    if args.name is not None and not plan.unnamed:
        raise SnapshotNotFound(f"{plan.seen.url}: no snapshot is called {args.name!r}")
    plan.show()
    deleted: list[str] = []
    if not plan:
        output.line("nothing to delete")
    elif args.yes:
        deleted = plan.carry_out()
        output.line(f"{len(deleted)} deleted, {decimal(plan.size_bytes)} of snapshots freed", "green")
    else:
        output.line(f"nothing was deleted: --yes deletes {decimal(plan.size_bytes)} of snapshots, as shown")
    kept = []
    for snapshot, reason in plan.keep:
        kept.append({**fields_of(snapshot), "because": reason})
    return output.result(
        ok=not plan.problems,
        url=plan.seen.url,
        snapshots=[fields_of(snapshot) for snapshot in plan.delete],
        kept=kept,
        unnamed=[snapshot.location for snapshot in plan.unnamed],
        leftovers=plan.leftovers,
        size_bytes=plan.size_bytes,
        deleted=deleted,
        problems=plan.problems,
    )


class _Plan:
    """The planned deletions. Snapshots that stay instead of others are verified first."""

    def __init__(self, catalogue: Catalogue, args: argparse.Namespace, output: Output) -> None:
        """Blocks. Raises: LevelError."""
        self.seen = catalogue.contents()
        self.problems = list(self.seen.problems)
        self._storage = catalogue.storage
        self._output = output
        self._name = args.name
        self._count = args.keep_last or 0
        """Snapshots of a run that must be valid before others may be deleted; 0: none may be deleted."""
        # The settings of a training check these values, and ``is_expired`` takes those of a keeper.
        level = PersistentLevel(args.url, keep_last=self._count or 1, keep_every_n_steps=args.keep_every)
        self._level = LevelSettings(args.url, keep_last=level.keep_last, keep_every_n_steps=level.keep_every_n_steps)
        self.leftovers = [leftover.path for leftover in leftovers(self._storage, None)]
        """Uncommitted objects; they are deleted unless a living writer holds them."""
        self.delete: list[StoredSnapshot] = []
        self.keep: list[tuple[StoredSnapshot, str]] = []
        """Snapshots to keep, each with the reason."""
        self.unnamed: list[StoredSnapshot] = []
        """Snapshots that lose the name."""
        runs: dict[str, list[StoredSnapshot]] = defaultdict(list)
        for snapshot in self.seen.snapshots:
            runs[snapshot.run_id].append(snapshot)
        only_run = None
        if args.run is not None:
            only_run = catalogue.run_of(args.run)
        for run_id, snapshots in runs.items():
            if only_run in (None, run_id):
                self._plan_run(snapshots)
                continue
            for snapshot in snapshots:
                self.keep.append((snapshot, "other run"))

    @property
    def size_bytes(self) -> int:
        """Bytes of snapshots to delete."""
        return sum(snapshot.size_bytes for snapshot in self.delete)

    def __bool__(self) -> bool:
        """Return True if there is anything to do."""
        return bool(self.delete or self.unnamed or self.leftovers)

    def _plan_run(self, snapshots: list[StoredSnapshot]) -> None:
        complete = [snapshot for snapshot in snapshots if snapshot.is_complete]
        sound = self._sound(complete)
        for snapshot in snapshots:
            if self._name in snapshot.names:
                self.unnamed.append(snapshot)
            reason = self._why_kept(snapshot, sound, is_newest=snapshot in complete[-1:])
            if reason is None and any(place.is_link() for place in self._places(snapshot)):
                reason = "symbolic link"
            if reason is None:
                self.delete.append(snapshot)
            else:
                self.keep.append((snapshot, reason))

    def _why_kept(self, snapshot: StoredSnapshot, sound: list[SnapshotKey], *, is_newest: bool) -> str | None:
        """Return the reason why retention keeps a snapshot, else ``None``. ``sound``: the newest valid snapshots of its
        run.
        """
        if set(snapshot.names) - {self._name}:
            return "named"
        newer = sum(key > snapshot.key for key in sound)
        if snapshot.is_complete:
            if is_expired(snapshot.step, self._level, newer):
                return None
            if is_newest:
                return "newest complete"
            return "by the rules"
        # An incomplete snapshot is not needed once a newer one is complete.
        if newer >= 1 and all(place.is_stale() for place in self._places(snapshot)):
            return None  # no copy of it is in progress
        return "maybe in use"

    def _sound(self, complete: list[StoredSnapshot]) -> list[SnapshotKey]:
        """Return the newest valid snapshots, as many as must be kept. Damaged ones do not count."""
        sound: list[SnapshotKey] = []
        for snapshot in reversed(complete):
            if len(sound) == self._count:
                break
            problems = self._read_back(snapshot)
            if problems:
                text = f"step {snapshot.step} does not count, and nothing is deleted for it"
                self.problems.append(f"{text}: {'; '.join(problems)}")
            else:
                sound.append(snapshot.key)
        return sound

    def _read_back(self, snapshot: StoredSnapshot) -> list[str]:
        """Return one line for each damage of a snapshot."""
        with self._output.bar(f"reading back step {snapshot.step}", snapshot.size_bytes) as advance:
            verdict = check(self._storage, snapshot, advance)
        if verdict.state == GONE:
            return [*verdict.problems, "it was deleted meanwhile"]
        return verdict.problems

    def _places(self, snapshot: StoredSnapshot) -> list[FilePlace]:
        return [FilePlace.of(self._storage, entry) for entry, _ in snapshot.files]

    def carry_out(self) -> list[str]:
        """Delete, and return the deleted snapshots. Blocks. Raises: LevelError.

        Manifests are deleted first, so an interruption leaves garbage, but no partial snapshot.
        """
        deleted: list[str] = []
        for snapshot in self.unnamed:
            release(self._storage, snapshot.run_id, self._name)
        with self._output.bar("deleting", self.size_bytes) as advance:
            for snapshot in list(self.delete):
                advance(snapshot.size_bytes)
                # Checked again, because snapshots were read back meanwhile.
                if delete_files(self._places(snapshot)):
                    deleted.append(snapshot.location)
                else:
                    self.delete.remove(snapshot)
                    self.keep.append((snapshot, "name or symbolic link"))
                    self._output.say(f"{snapshot.location} stays: meanwhile it has a name, or became a symbolic link")
        return [*deleted, *sweep(self._storage)]

    def show(self) -> None:
        """Print the plan."""
        output = self._output
        states = []
        for snapshot in self.delete:
            states.append((snapshot, "delete", "red"))
        for snapshot, reason in self.keep:
            states.append((snapshot, f"keep: {reason}", ""))
        show_snapshots(output, self.seen, states)
        for snapshot in self.unnamed:
            output.line(f"step {snapshot.step} loses its name")
        for path in self.leftovers:
            output.line(f"{path}, to be deleted unless a living writer holds it", "red")
        for problem in self.seen.problems:
            output.line(problem, "yellow")
