"""Which shards a level has by their names alone: one listing per directory, whatever the number of ranks.

Small enough to be told to all ranks, who then look at the manifests together, each at its share.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lazysnap.errors import LevelError
from lazysnap.levels.names import names_in
from lazysnap.levels.storage import Storage
from lazysnap.shard.manifest import parse_directory_name, parse_frozen_directory_name
from lazysnap.shard.stem import Stem, parse_file_name


@dataclass(frozen=True)
class Directory:
    """One snapshot's directory, or that of an image of immutable tensors."""

    name: str
    ranges: tuple[tuple[str, int, int, int], ...]
    """Manifests: ``rank`` or ``node``, number of them, first and last one."""
    odd: tuple[str, ...] = ()
    """Manifests with other names than this package gives."""
    given: tuple[tuple[str, str | None], ...] = ()
    """Names that were given to the snapshot, see ``levels.names``."""
    mark: Any = None
    """Of a file system: tells directories of the same name on different disks apart."""

    def manifests(self, share: tuple[int, int] | None = None) -> Iterator[str]:
        """Names of the manifests; with ``share`` (number, of how many) every so-manieth of them."""
        part, parts = share or (0, 1)
        for kind, count, first, last in self.ranges:
            for index in range(first + (part - first) % parts, last + 1, parts):
                yield Stem(kind, index, count).manifest
        if part == 0:
            yield from self.odd


@dataclass(frozen=True)
class Listing:
    """All directories of a level."""

    directories: tuple[Directory, ...]
    problems: tuple[str, ...] = ()

    def to_fields(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Listing":
        """From parsed JSON."""
        directories = (
            Directory(
                item["name"],
                tuple((kind, count, first, last) for kind, count, first, last in item["ranges"]),
                tuple(item["odd"]),
                tuple((name, run_id) for name, run_id in item["given"]),
            )
            for item in fields["directories"]
        )
        return cls(tuple(directories), tuple(fields["problems"]))


def list_names(storage: Storage, *, marked: bool = False) -> Listing:
    """What is there. Blocks: one listing per directory. Raises: LevelUnavailable, if the level does not answer."""
    directories = []
    problems: list[str] = []
    for name in storage.list():
        if parse_directory_name(name) is None and parse_frozen_directory_name(name) is None:
            continue
        try:
            files = storage.list(name)
            mark = storage.stamp(name) if marked else None
        except FileNotFoundError:
            continue  # deleted just now
        except LevelError as error:
            problems.append(str(error))
            continue
        given = tuple(names_in(storage, name, files, problems))
        directories.append(Directory(name, *_ranges(files), given, mark))
    return Listing(tuple(directories), tuple(problems))


def _ranges(files: list[str]) -> tuple[tuple[tuple[str, int, int, int], ...], tuple[str, ...]]:
    stems = []
    odd = []
    for file in files:
        parsed = parse_file_name(file)
        if parsed is None or parsed[1] != "json":
            continue
        if file == parsed[0].manifest:
            stems.append(parsed[0])
        else:
            odd.append(file)
    found: list[tuple[str, int, int, int]] = []
    for stem in sorted(stems, key=lambda stem: (stem.kind, stem.count, stem.index)):
        kind, count, first, last = found[-1] if found else ("", 0, 0, 0)
        if (kind, count, last + 1) == (stem.kind, stem.count, stem.index):
            found[-1] = (kind, count, first, stem.index)
        else:
            found.append((stem.kind, stem.count, stem.index, stem.index))
    return tuple(found), tuple(odd)
