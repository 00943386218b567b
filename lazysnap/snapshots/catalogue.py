"""The catalogue of a level: its snapshots, complete or not.

The name of a directory holds run, step and start. Directories are listed and manifests are read only for the snapshots
that a caller requests.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import TypeVar

from lazysnap.errors import ConfigError, FormatError, LevelError, SnapshotNotFound
from lazysnap.levels.listing import Directory, Listing, list_directory, without_manifest
from lazysnap.levels.node_file import FilePlace, entries_of, read_committed
from lazysnap.levels.storage import Storage
from lazysnap.levels.threads import in_threads
from lazysnap.resolver import (
    ANY,
    Entry,
    Inventory,
    RestartPlan,
    SnapshotFilter,
    SnapshotKey,
    candidates,
    is_complete,
    snapshots,
)
from lazysnap.runs import MOST_DIGITS, Choice, run_of, short_ids
from lazysnap.shard.best import best_first
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.names import SnapshotName

_THREADS = 8
"""Concurrent small reads: each is a request to an object store."""
_MOST_LISTED = 8
"""Maximum steps in a message."""
_NO_KEY = SnapshotKey("", -1, "", 0)

Item = TypeVar("Item")
Result = TypeVar("Result")
CommittedShard = tuple[Entry, Manifest]
"""One rank's shard, and the manifest of the file that holds it."""


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return ``work(item)`` for every item, in order. Blocks. Raises: the first error."""
    tasks = [partial(work, item) for item in items]
    return in_threads(tasks, min(_THREADS, len(tasks)), "lazysnap-catalogue")


def _add_missing(results: dict[Item, Result], items: Iterable[Item], work: Callable[[Item], Result]) -> None:
    """Add ``work(item)`` for each of the items that has no result yet. Blocks. Raises: the first error."""
    missing = [item for item in items if item not in results]
    results.update(zip(missing, in_parallel(work, missing), strict=True))


@dataclass(frozen=True)
class StoredSnapshot:
    """One snapshot of a level, complete or not."""

    key: SnapshotKey
    shards: tuple[CommittedShard, ...]
    is_complete: bool
    """True if a restart could restore it from this level alone."""

    @property
    def step(self) -> int:
        """The step at which it was captured."""
        return self.key.step

    @property
    def run_id(self) -> str:
        """The id of the run that captured it."""
        return self.key.run_id

    @property
    def world_size(self) -> int:
        """Ranks of the training that captured it."""
        return self.key.world_size

    @property
    def ranks(self) -> int:
        """The number of these ranks that are present."""
        return len({entry.rank for entry, _ in self.shards})

    @property
    def location(self) -> str:
        """Its directory: the name holds run, step and start."""
        return self.shards[0][0].snapshot.directory

    @property
    def names(self) -> list[str]:
        """Names given by ``keep``."""
        names: set[str] = set()
        for entry, _ in self.shards:
            names.update(entry.names)
        return sorted(names)

    @property
    def size_bytes(self) -> int:
        """Bytes of its files."""
        return sum(manifest.size_bytes for _, manifest in self.files)

    @property
    def files(self) -> list[CommittedShard]:
        """Its files, each with one of the shards in it."""
        files: dict[str, CommittedShard] = {}
        for entry, manifest in self.shards:
            files[entry.file] = (entry, manifest)
        return list(files.values())

    @property
    def captured_ns(self) -> int:
        """The time at which the last rank began to capture it, Unix time."""
        newest_ns = 0
        for _, manifest in self.files:
            for shard in manifest.shards:
                newest_ns = max(newest_ns, shard.meta.captured_ns)
        return newest_ns


@dataclass(frozen=True)
class Contents:
    """Everything at a level, or everything of some steps."""

    url: str
    snapshots: tuple[StoredSnapshot, ...]
    """Smallest step first."""
    uncommitted: tuple[tuple[str, int], ...]
    """Directories in which no manifest can be read, each with its step."""
    without_manifest: tuple[tuple[SnapshotName, str], ...]
    """Incomplete snapshots with a file without a manifest, each with the message about it."""
    problems: tuple[str, ...]
    """One line for each file that cannot be used."""
    runs: dict[str, str]
    """The short id of each run of the level."""
    newest_run: str | None
    """Id of the run of ``latest`` at this level; ``None`` if nothing is complete."""

    @property
    def is_empty(self) -> bool:
        """True if lazysnap wrote nothing here."""
        return not (self.snapshots or self.uncommitted)

    def of_run(self, run_id: str) -> "Contents":
        """Return the contents of one run alone."""
        of_run = tuple(snapshot for snapshot in self.snapshots if snapshot.run_id == run_id)
        without_manifest = []
        for name, message in self.without_manifest:
            if name.run_id == run_id:
                without_manifest.append((name, message))
        return replace(self, snapshots=of_run, uncommitted=(), without_manifest=tuple(without_manifest))


class Catalogue:
    """The contents of a level at the first call: each directory is listed, and each manifest read, at most once.

    Every method blocks. Raises: LevelError, if the level does not answer.
    """

    def __init__(self, storage: Storage, listing: Listing | None = None) -> None:
        """``listing``: of this level, which is not listed again."""
        self.storage = storage
        self._directories: dict[str, Directory | None] = {}
        self._manifests: dict[FilePlace, Manifest | str | None] = {}
        """Read manifests; a text with the reason for an unusable one; ``None`` for one that was deleted after the
        listing.
        """
        self._unlisted: list[str] = []
        """Problems with directories."""
        if listing is not None:
            for directory in listing.directories:
                self._directories[directory.name] = directory
            self._names = list(self._directories)
            self._unlisted += listing.problems
        self.incomplete: list[str] = []
        """One line for each snapshot that ``plans`` skipped, with the missing parts."""

    @property
    def problems(self) -> list[str]:
        """One line for each unusable file, with the reason: damaged, foreign or lost."""
        return self._unlisted + [problem for problem in self._manifests.values() if isinstance(problem, str)]

    @property
    def listed(self) -> tuple[list[str], dict[str, Directory | None]]:
        """The listings so far: equal for two catalogues if nothing changed between them."""
        return self._names, self._directories

    @cached_property
    def _names(self) -> list[str]:
        return self.storage.list()

    @cached_property
    def _snapshot_names(self) -> dict[str, SnapshotName]:
        """The identities of all snapshots, by the names of their directories."""
        snapshot_names = {}
        for name in self._names:
            snapshot_name = SnapshotName.parse(name)
            if snapshot_name is not None:
                snapshot_names[name] = snapshot_name
        return snapshot_names

    # ---------------------------------------------------------------- one snapshot

    def plans(self, snapshot_filter: SnapshotFilter = ANY) -> Iterator[RestartPlan]:
        """Yield complete snapshots, best first: of the newest run, then the greatest step, then the newest start.

        Raises: as ``candidates``.
        """
        any_name = replace(snapshot_filter, name=None)
        directory_names = []
        for directory_name, name in self._snapshot_names.items():
            if any_name.includes(name, ()):
                directory_names.append(directory_name)
        by_step: dict[tuple[str, int], list[Directory]] = {}
        for directory in self._list(directory_names):
            name = directory.snapshot
            if snapshot_filter.includes(name, directory.names):
                by_step.setdefault((name.run_id, name.step), []).append(directory)
        best_to_worst = sorted(by_step.items(), reverse=True)
        if snapshot_filter.is_best:
            best_to_worst = best_first((item, _names_of(item[1])) for item in best_to_worst)
        for (_, step), directories in best_to_worst:
            entries = tuple(self._manifests_by_entry(directories))
            plans = candidates([Inventory(self.storage.url, entries)], snapshot_filter)
            if not plans:
                for directory in directories:
                    if directory.bare:
                        self.incomplete.append(without_manifest(self.storage.url, directory))
                self._explain(step, entries)
            yield from plans

    def plans_for(self, which: str | int, run: str | None = None) -> Iterator[RestartPlan]:
        """Return complete snapshots for a step, a name, ``latest`` or ``run:1f3a@200``, best first.

        ``run``: the first digits of a run's id. Raises: SnapshotNotFound, if no run begins with them, or several;
        ConfigError, for anything else, and for two runs.
        """
        # On a command line a step is text. No name is of digits alone.
        if isinstance(which, str) and which.isascii() and which.isdigit() and len(which) <= MOST_DIGITS:
            choice = Choice.of(int(which))
        else:
            choice = Choice.of(which)
        if run is not None:
            if choice.run is not None:
                raise ConfigError(f"{which!r} names a run, and run {run} is given as well: give one of them")
            choice = replace(choice, run=run)
        return self.plans(choice.of_one_run(self.run_of))

    def find(self, which: str | int, run: str | None = None) -> RestartPlan:
        """Return the first of ``plans_for``. Raises: SnapshotNotFound, listing the complete steps; as ``plans_for``."""
        plan = next(self.plans_for(which, run), None)
        if plan is not None:
            return plan
        message = f"{self.storage.url}: no complete snapshot {which!r}"
        if run:
            message += f" of run {run}"
        steps = set()
        for snapshot in self.contents().snapshots:
            if snapshot.is_complete:
                steps.add(snapshot.step)
        if steps:
            message += f"; complete are the steps {_newest(sorted(steps))}"
        else:
            message += "; no snapshot there is complete"
        raise SnapshotNotFound("\n".join([message, *self.problems, *self.incomplete]))

    def run_of(self, digits: str) -> str:
        """Return the id of the one run that begins with these digits. Raises: SnapshotNotFound, listing the runs."""
        run_ids = [run_id for run_id in self.runs if run_id.startswith(digits.lower())]
        if len(run_ids) == 1:
            return run_ids[0]
        return run_of(digits, [self.inventory()], self.storage.url)

    @cached_property
    def runs(self) -> dict[str, str]:
        """The short id of every run."""
        run_ids = set()
        for directory in self._list_all():
            if directory.ranges:
                run_ids.add(directory.snapshot.run_id)
        return short_ids(run_ids)

    def shards(self, plan: RestartPlan) -> list[CommittedShard]:
        """Return the shard of each rank, from the first source of a plan of this catalogue."""
        shards = []
        for offers in plan.sources:
            entry = offers[0]
            manifest = self._manifests[FilePlace.of(self.storage, entry)]
            assert isinstance(manifest, Manifest)
            shards.append((entry, manifest))
        return shards

    def snapshot_of(self, plan: RestartPlan) -> StoredSnapshot:
        """Return the snapshot that a plan of this catalogue restores."""
        return StoredSnapshot(plan.key, tuple(self.shards(plan)), is_complete=True)

    # ---------------------------------------------------------------- everything

    def contents(self, steps: Collection[int] | None = None, run: str | None = None) -> Contents:
        """Return everything, or only some steps, or the run with these first digits.

        Reads all manifests of these snapshots, and no shard.
        Raises: SnapshotNotFound, if no run begins with these digits, or several.
        """
        directory_names = []
        for directory_name, name in self._snapshot_names.items():
            if steps is None or name.step in steps:
                directory_names.append(directory_name)
        directories = self._list(directory_names)
        manifests = self._manifests_by_entry(directories)
        stored = []
        newest = _NO_KEY
        committed_names = set()
        complete_names = set()
        for key, entries in snapshots(manifests).items():
            shards = []
            for entry in sorted(entries, key=attrgetter("rank", "file")):
                shards.append((entry, manifests[entry]))
                committed_names.add(entry.snapshot.directory)
            snapshot = StoredSnapshot(key, tuple(shards), is_complete(entries))
            stored.append(snapshot)
            if snapshot.is_complete:
                complete_names.add(snapshot.location)
                newest = max(newest, key)
        stored.sort(key=attrgetter("step", "key"))
        uncommitted, bare = self._incomplete_of(directories, committed_names, complete_names)
        contents = Contents(
            self.storage.url,
            snapshots=tuple(stored),
            uncommitted=uncommitted,
            without_manifest=bare,
            problems=tuple(self.problems),
            runs=self.runs,
            newest_run=newest.run_id or None,
        )
        if run is None:
            return contents
        return contents.of_run(self.run_of(run))

    def _incomplete_of(
        self, directories: Sequence[Directory], committed: Collection[str], complete: Collection[str]
    ) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[SnapshotName, str], ...]]:
        """Return the values of ``Contents.uncommitted`` and ``Contents.without_manifest``.

        Args:
            committed: names of the directories in which a manifest can be read.
            complete: names of the directories of complete snapshots.
        """
        uncommitted = []
        bare = []
        for directory in directories:
            name = directory.snapshot
            if directory.name not in committed:
                uncommitted.append((directory.name, name.step))
            if directory.bare and directory.name not in complete:
                bare.append((name, without_manifest(self.storage.url, directory, "is not complete")))
        return tuple(sorted(uncommitted)), tuple(sorted(bare))

    def inventory(self, share: tuple[int, int] | None = None) -> Inventory:
        """Return what can be restored from this level, and the problems.

        ``share``: index and count; only that part of the files is read. Blocks. Raises: LevelError, if the level does
        not answer. No damage makes it raise.
        """
        entries = tuple(self._manifests_by_entry(self._list_all(), share))
        problems = list(self._unlisted)
        for place, manifest in self._manifests.items():
            if isinstance(manifest, Manifest):
                continue
            problem = manifest or f"{place.where}: its manifest was deleted while this level was read"
            problems.append(f"step {self._snapshot_names[place.directory].step} skipped: {problem}")
        return Inventory(self.storage.url, entries, tuple(problems))

    # ---------------------------------------------------------------- listings and manifests

    def _list_all(self) -> list[Directory]:
        """Return the directories of all snapshots."""
        return self._list(list(self._snapshot_names))

    def _list(self, names: Sequence[str]) -> list[Directory]:
        """Return the directories of these names that can be listed. Each is listed once."""

        def list_one(name: str) -> Directory | None:
            return list_directory(self.storage, name, self._unlisted)

        _add_missing(self._directories, names, list_one)
        directories = []
        for name in names:
            directory = self._directories[name]
            if directory is not None:
                directories.append(directory)
        return directories

    def _manifests_by_entry(
        self, directories: Sequence[Directory], share: tuple[int, int] | None = None
    ) -> dict[Entry, Manifest]:
        """Return every committed shard in these directories, by rank, each with the manifest of its file.

        ``share``: see ``inventory``.
        """
        directory_of: dict[FilePlace, Directory] = {}
        for directory in directories:
            for node in directory.nodes(share):
                directory_of[FilePlace(self.storage, directory.name, node)] = directory
        _add_missing(self._manifests, directory_of, _read_manifest)
        manifests = {}
        for place, directory in directory_of.items():
            manifest = self._manifests[place]
            if isinstance(manifest, Manifest):
                for entry in entries_of(manifest, self.storage.url):
                    manifests[replace(entry, names=directory.names)] = manifest
        return manifests

    def _explain(self, step: int, entries: Sequence[Entry]) -> None:
        """Record the missing parts of an incomplete snapshot."""
        for key, present in sorted(snapshots(entries).items()):
            missing = set(range(key.world_size))
            for entry in present:
                missing.discard(entry.rank)
            if missing:
                ranks = ", ".join(map(str, sorted(missing)[:5]))
                if len(missing) > 5:
                    ranks += ", …"
                self.incomplete.append(
                    f"{self.storage.url}: step {step} is not complete: no valid manifest there "
                    f"has rank {ranks}; {len(missing)} of {key.world_size} ranks are missing"
                )


def _read_manifest(place: FilePlace) -> Manifest | str | None:
    """Return a manifest; a text with the reason if it is unusable; ``None`` if it was deleted after the listing.
    Blocks.
    """
    try:
        return read_committed(place)
    except FileNotFoundError:
        return None
    except (FormatError, LevelError) as error:
        return str(error)  # the other files may be readable


def _names_of(directories: Sequence[Directory]) -> set[str]:
    names: set[str] = set()
    for directory in directories:
        names.update(directory.names)
    return names


def _newest(steps: list[int]) -> str:
    text = ", ".join(map(str, steps[-_MOST_LISTED:]))
    if len(steps) > _MOST_LISTED:
        return f"…, {text}"
    return text
