"""Files that dead writers left at a level. No snapshot needs them.

Only files with names of this format count, in snapshot directories that are no symbolic links:

* temporary files of writers: the storage checks that the writer is dead before it deletes them;
* files without a manifest that are a day old: a younger one may be a copy in progress (``cp``, ``rsync``,
  ``aws s3 cp``);
* small files from tests of the place that are a day old;
* names (``keep-…``) that a run gave, in a directory that holds nothing else, and that are a day old.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lazysnap import faults
from lazysnap.errors import FormatError
from lazysnap.levels.files import TEMPORARY
from lazysnap.levels.storage import Storage, is_probe, os_errors_named
from lazysnap.shard.limits import MAX_KEEP_FILE_BYTES
from lazysnap.shard.names import (
    NodeName,
    is_directory_of_ours,
    is_id,
    parse_file_name,
    parse_keep_file_name,
)

_NODE_0 = NodeName(0, 1)
"""The node that removes temporary files of names (``keep-…``)."""


IsOurs = Callable[[NodeName], bool]
"""True if the caller removes the leftovers of a node."""


@dataclass(frozen=True)
class Leftover:
    """An object to delete, unless ``Storage.delete_abandoned`` finds that its writer is alive."""

    path: str
    unless: str | None = None
    """The path of its manifest. If that exists at the deletion, the object was committed, and stays."""


def is_node_file_path(path: str) -> bool:
    """True if the path is one of a node's file, or of its base."""
    directory, _, name = path.rpartition("/")
    parsed = parse_file_name(name)
    return is_directory_of_ours(directory) and parsed is not None and parsed[1] != "json"


def _owner_of(name: str) -> NodeName | None:
    """Return the owner of a temporary file; ``None`` for any other name."""
    match = TEMPORARY.fullmatch(name)
    if match is None:
        return None
    parsed = parse_file_name(match[1])
    if parsed is not None:
        return parsed[0]
    if parse_keep_file_name(match[1]) is not None:
        return _NODE_0
    return None


def leftovers(storage: Storage, is_ours: IsOurs | None) -> Iterator[Leftover]:
    """Yield the leftovers of the nodes that are ``is_ours``; ``None``: of all nodes.

    Blocks. Raises: LevelError.
    """
    for name in storage.list():
        if is_probe(name) and is_stale(storage, name):
            yield Leftover(name)
        elif is_directory_of_ours(name) and not storage.is_link(name):
            names = storage.list(name)
            yield from _in_directory(storage, name, names, is_ours)
            yield from _lone_names(storage, name, names)


def _in_directory(storage: Storage, directory: str, names: Sequence[str], is_ours: IsOurs | None) -> Iterator[Leftover]:
    for name in names:
        path = f"{directory}/{name}"
        owner = _owner_of(name)
        if owner is not None and (is_ours is None or is_ours(owner)):
            yield Leftover(path)
        parsed = parse_file_name(name)
        if parsed is None:
            continue
        node, suffix = parsed
        if suffix == "json" or node.manifest in names:
            continue
        if (is_ours is None or is_ours(node)) and is_stale(storage, path):
            yield Leftover(path, f"{directory}/{node.manifest}")


def belongs_to_run(storage: Storage, path: str) -> bool:
    """True if a run wrote a ``keep-…`` object: its content is the run's id. Blocks. Raises: LevelError."""
    try:
        return storage.size(path) <= MAX_KEEP_FILE_BYTES and is_id(storage.get(path).decode("ascii").strip())
    except (FileNotFoundError, FormatError, UnicodeDecodeError):
        return False


def _lone_names(storage: Storage, directory: str, names: Sequence[str]) -> Iterator[Leftover]:
    """Yield the names (``keep-…``) in a directory whose snapshot was deleted: nothing else is in it."""
    if any(parse_keep_file_name(name) is None for name in names):
        return
    for name in names:
        path = f"{directory}/{name}"
        if belongs_to_run(storage, path) and is_stale(storage, path):
            yield Leftover(path)


def is_empty_and_stale(storage: Storage, directory: str) -> bool:
    """True if a directory is empty, and too old to be new."""
    if storage.list(directory) or storage.is_link(directory):
        return False
    try:
        return storage.is_stale(directory)
    except FileNotFoundError:
        return True  # where directories are parts of names


def is_stale(storage: Storage, path: str) -> bool:
    """True if an object exists that did not change for a day. Raises: LevelError."""
    try:
        return storage.is_stale(path)
    except FileNotFoundError:
        return False


def sweep(storage: Storage, is_ours: IsOurs | None = None) -> list[str]:
    """Delete files that dead writers left, and return their paths. Blocks. Raises: LevelError.

    ``is_ours``: the nodes whose files are deleted; ``None``: all. Files of a living writer always stay.
    """
    deleted = []
    with os_errors_named(storage.url, "sweeping"):
        for leftover in leftovers(storage, is_ours):
            faults.point("level.store.sweep")
            if storage.delete_abandoned(leftover.path, unless=leftover.unless):
                deleted.append(leftover.path)
        directories = {path.split("/")[0] for path in deleted}
        for directory in filter(is_directory_of_ours, storage.list()):
            if directory in directories or is_empty_and_stale(storage, directory):
                storage.delete_directory(directory)
        # No listing shows the uploads of dead writers, and they cost money.
        return [*deleted, *storage.abort_stale()]
