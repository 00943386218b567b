"""The place of one node's file: names and sizes, the manifest, deletion. ``levels.store`` writes the file."""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from lazysnap import faults
from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.leftovers import is_stale
from lazysnap.levels.node_base import places_of
from lazysnap.levels.storage import Storage
from lazysnap.memory.capture_reader import CaptureAborted
from lazysnap.resolver import Entry
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.names import NodeName, SnapshotName, parse_keep_file_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FilePlace:
    """The place of the file of one node and of its manifest, written or not."""

    storage: Storage
    directory: str
    name: NodeName

    @classmethod
    def of(cls, storage: Storage, entry: Entry) -> "FilePlace":
        """Return the place of the file that holds a shard, which is at a level."""
        name = NodeName.parse(entry.file)
        assert name is not None, f"{entry} is in memory"
        return cls(storage, entry.snapshot.directory, name)

    @property
    def file_path(self) -> str:
        """The file's path in the storage."""
        return f"{self.directory}/{self.name.file}"

    @property
    def base_path(self) -> str:
        """The path of the file's base in the storage; many files have none."""
        return f"{self.directory}/{self.name.base}"

    @property
    def manifest_path(self) -> str:
        """The manifest's path in the storage."""
        return f"{self.directory}/{self.name.manifest}"

    @property
    def where(self) -> str:
        """The file, for messages."""
        return f"{self.storage.url}/{self.file_path}"

    def read_manifest(self) -> Manifest:
        """Read the manifest. Raises: FormatError, also if it is of another place; FileNotFoundError; LevelError."""
        where = f"{self.storage.url}/{self.manifest_path}"
        manifest = Manifest.decode(self.storage.get(self.manifest_path), where)
        name = manifest.meta.name
        if name != SnapshotName.parse(self.directory) or manifest.name != self.name:
            raise FormatError(f"{where}: holds {name.directory} in {manifest.name.file}, its name says otherwise")
        return manifest

    def check_sizes(self, manifest: Manifest) -> None:
        """Raises: FormatError, if the file or its base has another size; FileNotFoundError; LevelError."""
        blocks = places_of(manifest)
        self._check_size(self.file_path, blocks.file_bytes)
        if manifest.base:
            self._check_size(self.base_path, blocks.base_bytes)

    def _check_size(self, path: str, size_bytes: int) -> None:
        size = self.storage.size(path)
        if size != size_bytes:
            raise FormatError(f"{self.storage.url}/{path}: {size} bytes, the manifest says {size_bytes}")

    def is_link(self) -> bool:
        """True if a file is a symbolic link, or is behind one: then it is not deleted."""
        paths = (self.file_path, self.base_path, self.manifest_path)
        return any(map(self.storage.is_link, paths))

    def is_stale(self) -> bool:
        """True if neither manifest nor file changed for a day."""
        return is_stale(self.storage, self.manifest_path) and is_stale(self.storage, self.file_path)

    def delete(self) -> None:
        """Delete the manifest, then the file and its base: a crash leaves garbage, not a snapshot."""
        self.storage.delete(self.manifest_path)
        faults.point("level.store.uncommitted")
        self.delete_bytes()
        faults.point("level.store.deleted")
        self.storage.delete_directory(self.directory)

    def delete_bytes(self) -> None:
        """Delete the file and its base, which have no manifest."""
        self.storage.delete(self.file_path)
        self.storage.delete(self.base_path)

    def withdraw(self) -> None:
        """Delete the manifest of a damaged file."""
        self.storage.delete(self.manifest_path)

    def delete_or_leave(self) -> None:
        """Delete the files; on an error leave them for the next sweep."""
        try:
            self.delete()
        except (LevelError, OSError) as error:
            logger.warning("left in %s/%s: %s", self.storage.url, self.directory, error)

    def remove_if_empty(self) -> None:
        """Remove the directory that a failed write may have made, or leave it for the next sweep."""
        with contextlib.suppress(CaptureAborted, LevelError, OSError):
            self.storage.delete_directory(self.directory)


def delete_files(places: Sequence[FilePlace]) -> bool:
    """Delete files of one directory. ``False``, and nothing is deleted, if it has a name or one is behind a link.

    Blocks. Raises: LevelError. Then each file is whole or has no manifest.
    """
    for directory in {place.directory for place in places}:
        if any(map(parse_keep_file_name, places[0].storage.list(directory))):
            return False
    if any(place.is_link() for place in places):
        return False
    for place in places:
        place.delete()
    return True


def entries_of(manifest: Manifest, level: str) -> list[Entry]:
    """Return the entries of a committed file at a level, one for each rank."""
    entries = []
    for shard in manifest.shards:
        meta = shard.meta
        capture = (meta.run_id, meta.start, meta.step, meta.rank, meta.world_size)
        entries.append(Entry(level, *capture, file=manifest.name.text))
    return entries


def read_committed(place: FilePlace) -> Manifest:
    """Return the manifest at a place, whose file exists in its full size; the file is not read.

    Raises: FormatError, also if the file is lost; FileNotFoundError, if nothing is committed; LevelError.
    """
    manifest = place.read_manifest()
    try:
        place.check_sizes(manifest)
    except FileNotFoundError as error:
        # The manifest is deleted first: a file is lost only if the manifest still exists.
        place.storage.size(place.manifest_path)
        raise FormatError(f"{place.where}: a manifest without its file: {_loss(manifest)}") from error
    return manifest


def _loss(manifest: Manifest) -> str:
    ranks = [shard.meta.rank for shard in manifest.shards]
    if len(ranks) == 1:
        return f"the shard of rank {ranks[0]} is lost"
    return f"the shards of ranks {ranks[0]} to {ranks[-1]} are lost"
