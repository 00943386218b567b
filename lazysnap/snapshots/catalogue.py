"""The catalogue of a level: which snapshots it holds, and which of them are complete.

The name of a directory holds run, step and start. Directories are listed and manifests are read only for the snapshots
that a caller asks for.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

from lazysnap.errors import ConfigError, FormatError, LevelError, SnapshotNotFound
from lazysnap.levels import SnapshotStore
from lazysnap.levels.listing import Directory, Listing, list_directory, without_manifest
from lazysnap.levels.node_file import FilePlace, entries_of, read_committed
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
from lazysnap.shard.best import BEST, best_first
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.names import SnapshotName

_THREADS = 8
"""Small reads at a time: each is a request to an object store."""
_NO_KEY = SnapshotKey("", -1, "", 0)

Given = TypeVar("Given")
Result = TypeVar("Result")
Shard = tuple[Entry, Manifest]
"""One rank's shard, and the manifest of the file that holds it."""


def in_parallel(work: Callable[[Given], Result], items: Sequence[Given]) -> list[Result]:
    """``work(item)`` for every item, in order. Blocks. Raises: the first error."""
    tasks = [partial(work, item) for item in items]
    return in_threads(tasks, min(_THREADS, len(tasks)), "lazysnap-catalogue")


@dataclass(frozen=True)
class Found:
    """One snapshot of a level, complete or not."""

    key: SnapshotKey
    shards: tuple[Shard, ...]
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
        return self.shards[0][0].location

    @property
    def names(self) -> list[str]:
        """Names given by ``keep``."""
        return sorted({name for entry, _ in self.shards for name in entry.names})

    @property
    def size_bytes(self) -> int:
        """Bytes of its files."""
        return sum(manifest.size_bytes for _, manifest in self.files)

    @property
    def files(self) -> list[Shard]:
        """Its files, each with one of the shards in it."""
        return list({(entry.location, entry.file): (entry, manifest) for entry, manifest in self.shards}.values())

    @property
    def captured_ns(self) -> int:
        """When the last rank began to capture it, Unix time."""
        return max(shard.meta.captured_ns for _, manifest in self.files for shard in manifest.shards)


@dataclass(frozen=True)
class Contents:
    """Everything at a level, or everything of some steps."""

    url: str
    snapshots: tuple[Found, ...]
    """Smallest step first."""
    uncommitted: tuple[tuple[str, int], ...]
    """Directories in which no manifest can be read, each with its step."""
    without_manifest: tuple[tuple[SnapshotName, str], ...]
    """Snapshots that are not complete because a file has no manifest, each with the message about it."""
    problems: tuple[str, ...]
    """One line for each file that cannot be used."""
    runs: dict[str, str]
    """The short id of each run of the level."""
    newest_run: str | None
    """Id of the run that ``latest`` means here; ``None``: nothing is complete."""

    @property
    def is_empty(self) -> bool:
        """True if lazysnap wrote nothing here."""
        return not (self.snapshots or self.uncommitted)

    def of_run(self, run_id: str) -> "Contents":
        """Only one run."""
        chosen = tuple(found for found in self.snapshots if found.run_id == run_id)
        bare = tuple(pair for pair in self.without_manifest if pair[0].run_id == run_id)
        return replace(self, snapshots=chosen, uncommitted=(), without_manifest=bare)


class Catalogue:
    """The contents of a level when it was first asked: each directory is listed, and each manifest read, at most once.

    Every method blocks. Raises: LevelError, if the level does not answer.
    """

    def __init__(self, store: SnapshotStore, listing: Listing | None = None) -> None:
        """``listing``: of this level, which is not listed again."""
        self.store = store
        self._directories: dict[str, Directory | None] = {}
        self._manifests: dict[FilePlace, Manifest | str | None] = {}
        """Manifests that were read. A text: why one cannot be used; ``None``: it was deleted since it was listed."""
        self._unlisted: list[str] = []
        """Problems with directories."""
        if listing is not None:
            self._directories = {directory.name: directory for directory in listing.directories}
            self._names = list(self._directories)
            self._unlisted += listing.problems
        self.incomplete: list[str] = []
        """One line for each snapshot that ``plans`` skipped: what is missing of it."""

    @property
    def problems(self) -> list[str]:
        """One line for each file that cannot be used, and why: damaged, foreign or lost."""
        return [*self._unlisted, *(found for found in self._manifests.values() if isinstance(found, str))]

    @property
    def listed(self) -> tuple[list[str], dict[str, Directory | None]]:
        """The listings so far: equal for two catalogues between which nothing changed."""
        return self._names, self._directories

    @cached_property
    def _names(self) -> list[str]:
        return self.store.storage.list()

    # ---------------------------------------------------------------- one snapshot

    def plans(self, wanted: SnapshotFilter = ANY) -> Iterator[RestartPlan]:
        """Complete snapshots, best first: of the newest run, then of the greatest step, then of the newest start.

        Raises: as ``candidates``.
        """
        unnamed = replace(wanted, name=None)
        steps: dict[tuple[str, int], list[Directory]] = {}
        for directory in self._list(lambda at: unnamed.includes(at.run_id, at.step, ())):
            at = _name_of(directory)
            if wanted.includes(at.run_id, at.step, directory.names):
                steps.setdefault((at.run_id, at.step), []).append(directory)
        newest_first = sorted(steps.items(), reverse=True)
        if wanted.name == BEST:
            newest_first = best_first((item, _names_of(item[1])) for item in newest_first)
        for (_, at_step), held in newest_first:
            entries = tuple(entry for entry, _ in self._shards(held))
            found = candidates([Inventory(self.store.url, entries)], wanted)
            if not found:
                self.incomplete += [without_manifest(self.store.url, at_step, one) for one in held if one.bare]
                self._explain(at_step, entries)
            yield from found

    def meant(self, which: str | int, run: str | None = None) -> Iterator[RestartPlan]:
        """Complete snapshots for a step, a name, ``latest`` or ``run:1f3a@200``, best first.

        ``run``: the first digits of a run's id. Raises: SnapshotNotFound, if no run begins with them, or several;
        ConfigError, for anything else, and for two runs.
        """
        # On a command line a step is text. No name is of digits alone.
        is_step = isinstance(which, str) and which.isascii() and which.isdigit() and len(which) <= MOST_DIGITS
        choice = Choice.of(int(which) if is_step else which)
        if run is not None:
            if choice.run is not None:
                raise ConfigError(f"{which!r} names a run, and run {run} is given as well: give one of them")
            choice = replace(choice, run=run)
        return self.plans(choice.wanted(self.run_of))

    def find(self, which: str | int, run: str | None = None) -> RestartPlan:
        """The first of ``meant``. Raises: SnapshotNotFound, listing the complete steps; as ``meant``."""
        found = next(self.meant(which, run), None)
        if found is not None:
            return found
        there = sorted({one.step for one in self.contents().snapshots if one.is_complete})
        some = f"; complete are the steps {_few(there)}" if there else "; there is none that is complete"
        more = "".join(f"\n{problem}" for problem in [*self.problems, *self.incomplete])
        of_run = f" of run {run}" if run else ""
        raise SnapshotNotFound(f"{self.store.url}: no complete snapshot {which!r}{of_run}{some}{more}")

    def run_of(self, digits: str) -> str:
        """The id of the one run that begins with these digits. Raises: SnapshotNotFound, listing the runs there."""
        meant = [run_id for run_id in self.runs if run_id.startswith(digits.lower())]
        return meant[0] if len(meant) == 1 else run_of(digits, [self.inventory()], self.store.url)

    @cached_property
    def runs(self) -> dict[str, str]:
        """The short id of every run."""
        return short_ids(_name_of(directory).run_id for directory in self._list(lambda at: True) if directory.ranges)

    def shards(self, plan: RestartPlan) -> list[Shard]:
        """Return the shard of each rank, from the first source of a plan of this catalogue."""
        found = []
        for entry in (offers[0] for offers in plan.sources):
            manifest = self._manifests[self.store.place(entry)]
            assert isinstance(manifest, Manifest)
            found.append((entry, manifest))
        return found

    def found(self, plan: RestartPlan) -> Found:
        """The snapshot that a plan of this catalogue restores."""
        return Found(plan.key, tuple(self.shards(plan)), is_complete=True)

    # ---------------------------------------------------------------- everything

    def contents(self, steps: Collection[int] | None = None, run: str | None = None) -> Contents:
        """Everything, or only some steps, or the run with these first digits. Reads all manifests of it, no shard.

        Raises: SnapshotNotFound, if no run begins with these digits, or several.
        """
        directories = self._list(lambda at: steps is None or at.step in steps)
        shards = self._shards(directories)
        manifests = {entry: manifest for entry, manifest in shards}
        found = [
            Found(
                key,
                tuple((entry, manifests[entry]) for entry in sorted(entries, key=lambda e: (e.rank, e.location))),
                is_complete(entries),
            )
            for key, entries in snapshots(manifests).items()
        ]
        used = {entry.location for entry in manifests}
        whole = {one.location for one in found if one.is_complete}
        bare = sorted((_name_of(one), one) for one in directories if one.bare and one.name not in whole)
        everything = Contents(
            self.store.url,
            tuple(sorted(found, key=lambda one: (one.step, one.key))),
            tuple(sorted((one.name, _name_of(one).step) for one in directories if one.name not in used)),
            tuple((at, without_manifest(self.store.url, at.step, one, "is not complete")) for at, one in bare),
            tuple(self.problems),
            self.runs,
            max((one.key for one in found if one.is_complete), default=_NO_KEY).run_id or None,
        )
        return everything if run is None else everything.of_run(self.run_of(run))

    def inventory(self, share: tuple[int, int] | None = None) -> Inventory:
        """Return what can be restored from here, and what cannot and why.

        ``share``: number, of how many; only that part of the files is looked at.
        Blocks. Raises: LevelError, if the level does not answer. Nothing found there makes it raise.
        """
        entries = [entry for entry, _ in self._shards(self._list(lambda at: True), share)]
        problems = list(self._unlisted)
        for place, found in self._manifests.items():
            name = SnapshotName.parse(place.directory)
            if isinstance(found, Manifest) or (name is None and found is None):
                continue
            skipped = "" if name is None else f"step {name.step} passed over: "
            problems.append(f"{skipped}{found or f'{place.where}: its manifest was deleted while this level was read'}")
        return Inventory(self.store.url, tuple(entries), tuple(problems))

    # ---------------------------------------------------------------- how

    def _list(self, is_wanted: Callable[[SnapshotName], bool]) -> list[Directory]:
        """The directories of wanted snapshots, each listed once."""
        names = [name for name in self._names if (at := SnapshotName.parse(name)) is not None and is_wanted(at)]
        new = [name for name in names if name not in self._directories]
        found = in_parallel(lambda name: list_directory(self.store.storage, name, self._unlisted), new)
        self._directories.update(zip(new, found, strict=True))
        return [one for name in names if (one := self._directories[name]) is not None]

    def _read(self, places: Iterable[FilePlace]) -> None:
        """Read manifests that were not read yet."""
        wanted = [place for place in dict.fromkeys(places) if place not in self._manifests]

        def read(place: FilePlace) -> "Manifest | str | None":
            try:
                return read_committed(place)
            except FileNotFoundError:
                return None
            except (FormatError, LevelError) as error:
                return str(error)  # the other files may be readable

        self._manifests.update(zip(wanted, in_parallel(read, wanted), strict=True))

    def _shards(self, directories: Sequence[Directory], share: tuple[int, int] | None = None) -> list[Shard]:
        """Every shard that is committed in these directories, by rank; of a share of the files."""
        places = [
            (one, [FilePlace(self.store.storage, one.name, node) for node in one.nodes(share)]) for one in directories
        ]
        self._read(place for _, held in places for place in held)
        found = []
        for one, held in places:
            for manifest in map(self._manifests.__getitem__, held):
                if isinstance(manifest, Manifest):
                    for entry in entries_of(manifest, self.store.url, self.store.speed, one.name):
                        found.append((replace(entry, names=one.names), manifest))
        return found

    def _explain(self, step: int, entries: Sequence[Entry]) -> None:
        """Record what is missing of an incomplete snapshot."""
        for key, held_entries in sorted(snapshots(entries).items()):
            missing = sorted(set(range(key.world_size)) - {entry.rank for entry in held_entries})
            if missing:
                ranks = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
                self.incomplete.append(
                    f"{self.store.url}: step {step} is not complete: no valid manifest there "
                    f"has rank {ranks}; {len(missing)} of {key.world_size} ranks are missing"
                )


def _name_of(directory: Directory) -> SnapshotName:
    name = SnapshotName.parse(directory.name)
    assert name is not None
    return name


def _names_of(directories: Sequence[Directory]) -> set[str]:
    return {name for directory in directories for name in directory.names}


def _few(steps: list[int]) -> str:
    newest = ", ".join(map(str, steps[-8:]))
    return newest if len(steps) <= 8 else f"…, {newest}"
