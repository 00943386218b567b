"""Which snapshot of a level to read. Few small reads: one manifest of each directory, then all of the one chosen.

``SnapshotStore.inventory`` reads every manifest there is; here every rank of a large world would do so.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from lazysnap.errors import FormatError, LevelError, ShardCorrupt
from lazysnap.levels import SnapshotStore
from lazysnap.levels.shards import entries_of
from lazysnap.levels.workers import Workers
from lazysnap.resolver import Entry, FrozenEntry, Inventory, RestartPlan, candidates
from lazysnap.shard.manifest import (
    Manifest,
    manifest_name,
    parse_directory_name,
    parse_frozen_directory_name,
    parse_keep_file_name,
)
from lazysnap.shard.stem import Stem, parse_file_name

THREADS = 8

Given = TypeVar("Given")
Result = TypeVar("Result")


def in_parallel(work: Callable[[Given], Result], items: Sequence[Given], threads: int = THREADS) -> list[Result]:
    """``work`` of every item, in order. Blocks. Raises: what the first to fail raised."""
    tasks = [partial(work, item) for item in items]
    return Workers[Result](min(threads, max(1, len(tasks))), "lazysnap-dcp").run(tasks)


@dataclass
class _Step:
    """The directories of one step, with the ranks' manifests in them."""

    files: dict[str, list[Stem]] = field(default_factory=dict)
    """By directory: what the names of its manifests begin with."""
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def first(self) -> list[tuple[str, Stem]]:
        """The manifests to read at first: one, if they can only be of one snapshot; else all."""
        everything = self.all()
        worlds = {(stem.kind, stem.count) for _, stem in everything}
        numbers = sorted(stem.index for _, stem in everything)
        is_plain = len(self.files) == 1 and len(worlds) == 1 and numbers == list(range(everything[0][1].count))
        return everything[:1] if is_plain else everything

    def all(self) -> list[tuple[str, Stem]]:
        """Every manifest."""
        return [(directory, stem) for directory, held in self.files.items() for stem in held]


class SnapshotFinder:
    """Looks through one level once. Every method blocks. Raises: LevelError, if the level does not answer."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._manifests: dict[str, Manifest | None] = {}
        self.problems: list[str] = []
        """What was found there that cannot be used, and why."""

    def plans(self, *, step: int | None = None, name: str | None = None) -> Iterator[RestartPlan]:
        """Complete snapshots, best first: of the run started last, then of the greatest step."""
        listed = self._store.storage.list()
        frozen = [(parsed, given) for given in listed if (parsed := parse_frozen_directory_name(given)) is not None]
        images = tuple(FrozenEntry(self._store.url, self._store.speed, *parsed, given) for parsed, given in frozen)
        steps = self._steps(listed, step, name)
        self._read([(at, *file) for at, found in steps.items() for file in found.first()])
        ranked = []
        for at, found in steps.items():
            manifests = [self._manifests[_path(*file)] for file in found.first()]
            runs = {(item.meta.run_started_ns, item.meta.run_id) for item in manifests if item is not None}
            ranked += [(*run, at) for run in runs]
        for started, run_id, at in sorted(ranked, reverse=True):
            files = steps[at].all()
            self._read([(at, *file) for file in files])
            entries = [entry for file in files for entry in self._entries(steps[at], *file)]
            entries = [entry for entry in entries if (entry.run_started_ns, entry.run_id) == (started, run_id)]
            plans = candidates([Inventory(self._store.url, tuple(entries), images)], name=name)
            if not plans:
                self._explain(at, entries, images)
            yield from plans

    def manifest(self, entry: Entry) -> Manifest:
        """The manifest of an entry of a plan that was just given."""
        place = self._store.place(entry)
        manifest = self._manifests[place.manifest_path]
        assert manifest is not None
        return manifest.of(entry.rank, place.where)

    def _steps(self, listed: Sequence[str], step: int | None, name: str | None) -> dict[int, _Step]:
        """The steps that may be meant, with what their directories hold."""
        places = [(at, given) for given in listed if (at := parse_directory_name(given)) is not None]
        places = [(at, given) for at, given in places if step in (None, at)]
        found: dict[int, _Step] = defaultdict(_Step)
        contents = in_parallel(lambda place: self._store.storage.list(place[1]), places)
        for (at, directory), names in zip(places, contents, strict=True):
            parsed = [parts for parts in map(parse_file_name, names) if parts is not None]
            held = [stem for stem, suffix in parsed if suffix == "json"]
            if held:
                found[at].files[directory] = held
                found[at].names[directory] = tuple(k for k in map(parse_keep_file_name, names) if k is not None)
        if name is None:
            return dict(found)
        return {at: item for at, item in found.items() if any(name in given for given in item.names.values())}

    def _read(self, files: Sequence[tuple[int, str, Stem]]) -> None:
        """Read the manifests that were not read yet; one that cannot be used is noted."""
        wanted = [file for file in files if _path(*file[1:]) not in self._manifests]

        def read(file: tuple[int, str, Stem]) -> "Manifest | str":
            at, directory, stem = file
            path = _path(directory, stem)
            where = f"{self._store.url}/{path}"
            try:
                manifest = Manifest.decode(self._store.storage.get(path), where)
                if manifest.meta.step != at or manifest.file != stem.shard:
                    raise ShardCorrupt(
                        f"{where}: holds step {manifest.meta.step} for {manifest.file}, its name says otherwise"
                    )
            except FileNotFoundError:
                return f"{where}: deleted while it was looked for"
            except (FormatError, LevelError) as error:
                # One file that cannot be read says nothing about the others.
                return str(error)
            return manifest

        for file, result in zip(wanted, in_parallel(read, wanted), strict=True):
            is_read = isinstance(result, Manifest)
            self._manifests[_path(*file[1:])] = result if is_read else None  # type: ignore[assignment]
            if not is_read:
                self.problems.append(str(result))

    def _entries(self, step: _Step, directory: str, stem: Stem) -> list[Entry]:
        """One for each rank in a file."""
        manifest = self._manifests[_path(directory, stem)]
        if manifest is None:
            return []
        entries = entries_of(manifest, self._store.url, self._store.speed, directory)
        return [replace(entry, names=step.names[directory]) for entry in entries]

    def _explain(self, step: int, entries: Sequence[Entry], images: Sequence[FrozenEntry]) -> None:
        """Note what an incomplete snapshot lacks."""
        held = {(image.run_id, image.digest) for image in images}
        for entry in entries:
            if entry.frozen is not None and (entry.run_id, entry.frozen) not in held:
                self.problems.append(
                    f"{entry.level}/{entry.location}: rank {entry.rank} needs the immutable tensors {entry.frozen}, "
                    "which are not there"
                )
        for world, generation in sorted({(entry.world_size, entry.generation or "") for entry in entries}):
            ranks = {e.rank for e in entries if (e.world_size, e.generation or "") == (world, generation)}
            missing = sorted(set(range(world)) - ranks)
            if missing:
                shown = ", ".join(manifest_name(rank, world) for rank in missing[:5])
                self.problems.append(
                    f"{self._store.url}: step {step} is not complete: {len(missing)} of {world} ranks have no valid "
                    f"manifest, among them {shown}"
                )


def _path(directory: str, stem: Stem) -> str:
    return f"{directory}/{stem.manifest}"
