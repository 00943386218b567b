"""The files of a level by their names alone: one listing per directory, whatever the number of ranks.

It is small enough to send to all ranks. They then read the manifests together, each rank its share.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lazysnap.errors import LevelError
from lazysnap.levels.storage import Storage
from lazysnap.shard.names import NodeName, is_directory_of_ours, parse_file_name, parse_keep_file_name


@dataclass(frozen=True)
class Directory:
    """One snapshot's directory."""

    name: str
    ranges: tuple[tuple[int, int, int], ...]
    """Manifests: number of nodes, first and last one."""
    names: tuple[str, ...] = ()
    """That were given to the snapshot."""
    bare: str = ""
    """The first file of a node that has no manifest; empty if each has one."""
    mark: Any = None
    """The id of a file system: distinguishes directories of the same name on different disks."""

    @property
    def is_whole(self) -> bool:
        """True if the manifests of all nodes are there, by their names."""
        found = Counter[int]()
        for count, first, last in self.ranges:
            found[count] += last + 1 - first
        return any(held == count for count, held in found.items())

    def nodes(self, share: tuple[int, int] | None = None) -> Iterator[NodeName]:
        """Nodes with a manifest; with ``share`` (number, of how many) every n-th of them."""
        part, parts = share or (0, 1)
        for count, first, last in self.ranges:
            for node in range(first + (part - first) % parts, last + 1, parts):
                yield NodeName(node, count)


@dataclass(frozen=True)
class Listing:
    """All directories of a level."""

    directories: tuple[Directory, ...]
    problems: tuple[str, ...] = ()


def list_names(storage: Storage, *, marked: bool = False) -> Listing:
    """Return the names at a level. Blocks: one listing per directory.

    Raises: LevelError, if the level does not answer.
    """
    problems: list[str] = []
    found = []
    for name in filter(is_directory_of_ours, storage.list()):
        found.append(list_directory(storage, name, problems, marked=marked))
    return Listing(tuple(one for one in found if one is not None), tuple(problems))


def list_directory(storage: Storage, name: str, problems: list[str], *, marked: bool = False) -> Directory | None:
    """Return the names in one directory; ``None``, if it was just deleted or cannot be listed, added to
    ``problems``."""
    try:
        files = storage.list(name)
        mark = storage.stamp(name) if marked else None
    except FileNotFoundError:
        return None
    except LevelError as error:
        problems.append(str(error))
        return None
    return parse_directory(name, files, mark)


def parse_directory(name: str, files: Sequence[str], mark: Any = None) -> Directory:
    """Return a directory from the names of its files."""
    names = tuple(given for given in map(parse_keep_file_name, files) if given is not None)
    parsed = [found for found in map(parse_file_name, files) if found is not None]
    committed = {stem for stem, suffix in parsed if suffix == "json"}
    bare = min((stem.file for stem, suffix in parsed if suffix != "json" and stem not in committed), default="")
    return Directory(name, _ranges(committed), names, bare, mark)


def without_manifest(url: str, step: int, directory: Directory, what: str = "passed over") -> str:
    """Return the message about a snapshot that is not complete because its directory has a bare file.

    ``what``: the consequence for that step.
    """
    return (
        f"step {step} {what}: {url}/{directory.name}/{directory.bare} is there without its manifest, "
        "which is written last: it was deleted, or its writer died before"
    )


def _ranges(stems: Iterable[NodeName]) -> tuple[tuple[int, int, int], ...]:
    found: list[tuple[int, int, int]] = []
    for stem in sorted(stems, key=lambda stem: (stem.nodes, stem.node)):
        count, first, last = found[-1] if found else (0, 0, 0)
        if (count, last + 1) == (stem.nodes, stem.node):
            found[-1] = (count, first, stem.node)
        else:
            found.append((stem.nodes, stem.node, stem.node))
    return tuple(found)
