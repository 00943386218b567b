"""Lists the files of a level by name: one listing per directory, for any number of ranks.

The result is small enough to send to all ranks, which then share the manifests to read.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lazysnap.errors import LevelError
from lazysnap.levels.storage import Storage
from lazysnap.shard.names import NodeName, SnapshotName, is_directory_of_ours, parse_file_name, parse_keep_file_name


@dataclass(frozen=True)
class Directory:
    """One snapshot's directory."""

    name: str
    ranges: tuple[tuple[int, int, int], ...]
    """Manifests: number of nodes, first and last one."""
    names: tuple[str, ...] = ()
    """The names that were given to the snapshot."""
    bare: str = ""
    """The first file or base without a manifest; empty if each has one."""
    stamp: Any = None
    """See ``Storage.stamp``: distinguishes directories of the same name on different disks. ``None``: not requested."""

    @property
    def snapshot(self) -> SnapshotName:
        """The snapshot in it: only directories with the name of one are listed."""
        snapshot = SnapshotName.parse(self.name)
        assert snapshot is not None
        return snapshot

    @property
    def is_whole(self) -> bool:
        """True if the manifests of all nodes are listed."""
        listed = Counter[int]()
        for num_nodes, first, last in self.ranges:
            listed[num_nodes] += last + 1 - first
        return any(num_listed == num_nodes for num_nodes, num_listed in listed.items())

    def nodes(self, share: tuple[int, int] | None = None) -> Iterator[NodeName]:
        """Yield the nodes with a manifest; with ``share`` (its number, the number of shares) every n-th of them."""
        part, parts = share or (0, 1)
        for num_nodes, first, last in self.ranges:
            for node in range(first + (part - first) % parts, last + 1, parts):
                yield NodeName(node, num_nodes)


@dataclass(frozen=True)
class Listing:
    """All directories of a level."""

    directories: tuple[Directory, ...]
    problems: tuple[str, ...] = ()


def list_names(storage: Storage, *, stamped: bool = False) -> Listing:
    """Return the names at a level. Blocks: one listing per directory.

    Raises: LevelError, if the level does not answer.
    """
    problems: list[str] = []
    directories = []
    for name in filter(is_directory_of_ours, storage.list()):
        directory = list_directory(storage, name, problems, stamped=stamped)
        if directory is not None:
            directories.append(directory)
    return Listing(tuple(directories), tuple(problems))


def list_directory(storage: Storage, name: str, problems: list[str], *, stamped: bool = False) -> Directory | None:
    """Return the names in one directory; ``None``, if it was just deleted or cannot be listed.

    The error of a directory that cannot be listed is added to ``problems``.
    """
    stamp = None
    try:
        files = storage.list(name)
        if stamped:
            stamp = storage.stamp(name)
    except FileNotFoundError:
        return None
    except LevelError as error:
        problems.append(str(error))
        return None
    return parse_directory(name, files, stamp)


def parse_directory(name: str, files: Sequence[str], stamp: Any = None) -> Directory:
    """Return a directory from the names of its files."""
    names = []
    committed = set()
    stored = []
    for file in files:
        kept_name = parse_keep_file_name(file)
        if kept_name is not None:
            names.append(kept_name)
        parsed = parse_file_name(file)
        if parsed is None:
            continue
        node, suffix = parsed
        if suffix == "json":
            committed.add(node)
        else:
            stored.append((node, file))
    bare = min((file for node, file in stored if node not in committed), default="")
    return Directory(name, _ranges(committed), tuple(names), bare, stamp)


def without_manifest(url: str, directory: Directory, consequence: str = "skipped") -> str:
    """Return the message about a snapshot that is incomplete because a file has no manifest.

    ``consequence``: for that step.
    """
    return (
        f"step {directory.snapshot.step} {consequence}: {url}/{directory.name}/{directory.bare} has no manifest, "
        "which is written last: it was deleted, or its writer died before"
    )


def _ranges(nodes: Iterable[NodeName]) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges of consecutive nodes: the number of nodes, the first and the last of the range."""
    ranges: list[tuple[int, int, int]] = []
    for num_nodes, node in sorted((name.nodes, name.node) for name in nodes):
        if ranges:
            last_num_nodes, first, last = ranges[-1]
            if last_num_nodes == num_nodes and last + 1 == node:
                ranges[-1] = (num_nodes, first, node)
                continue
        ranges.append((num_nodes, node, node))
    return tuple(ranges)
