"""The files of this node at a level: names, listing and deletion.

A level may have snapshots of earlier starts with another team (number of nodes, ranks of a node). At a shared level the
files of such a snapshot are divided among the nodes by number, so that each is read and deleted once.
"""

import contextlib
import logging
from collections.abc import Sequence

from lazysnap import faults
from lazysnap.core.actions import Listed, ListLevel
from lazysnap.core.messages import JobSettings, NamedStep, StepKey
from lazysnap.errors import ConfigError, FormatError
from lazysnap.levels.blocks import verify
from lazysnap.levels.leftovers import belongs_to_run, is_stale, sweep
from lazysnap.levels.listing import parse_directory
from lazysnap.levels.node_file import FilePlace, delete_files, read_committed
from lazysnap.levels.storage import Storage, probe
from lazysnap.levels.store import keep, open_storage, release_from
from lazysnap.levels.watchdog import Beat
from lazysnap.levels.watched import RateLimiter, WatchedStorage
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.names import NodeName, SnapshotName, parse_file_name, parse_keep_file_name

logger = logging.getLogger(__name__)


class LevelFiles:
    """The files of one node at one level, for one training. All methods but the constructor block.

    Each task of the level has its own thread. A hanging thread is abandoned and changes nothing here: each operation of
    a storage first calls the ``beat`` of its task, which then raises.

    Example::

        files = LevelFiles(settings, index=0, faster=())
        storage = files.open(control.beat)
        listed = files.list_snapshots(storage, task)
    """

    def __init__(self, settings: JobSettings, index: int, faster: Sequence["LevelFiles"]) -> None:
        """Remember the settings. Does no I/O.

        Args:
            settings: the settings of the job.
            index: number of the level, 0 the fastest.
            faster: the files of the levels before it, in order.
        """
        level = settings.levels[index]
        self.settings = settings
        self.level = level
        self.url = level.url
        self.faster = tuple(faster)
        self.is_shared = level.is_shared or settings.num_nodes == 1
        """True if all nodes share the level."""
        self.name = NodeName(settings.node, settings.num_nodes)
        """Name of the file that this node writes."""
        self._pace = RateLimiter(level.max_bytes_per_s)
        self._storage: Storage | None = None
        """The storage, without a watchdog: it outlives a task."""
        self._is_swept = False
        self._uncommitted: set[StepKey] = set()
        """Steps that this keeper began to write and that were not read back."""
        self.newest_directory: str | None = None
        """The directory of the newest snapshot that this node stored here. The next one may share its base."""
        self._has_read_base = False
        """True once this keeper has verified the base of that snapshot."""
        self._other_runs: dict[StepKey, str] = {}
        """The run of captures that were made before this job, in another run, and are stored anyway."""

    # The storage

    def open(self, beat: Beat) -> Storage:
        """Return the storage for one task. The first call removes files of dead writers.

        Args:
            beat: called before each operation. Its errors end the task.

        Raises: LevelError; ConfigError; what ``beat`` raises.
        """
        opened = self._storage
        if opened is None:
            opened = self._open_new()
            beat()  # an abandoned thread does not replace the storage of later tasks
            self._storage = opened
        storage = WatchedStorage(opened, beat, self._pace)
        if not self._is_swept:
            removed = sweep(storage, self._sweeps)
            self._is_swept = True
            if removed:
                logger.info("%s: removed what dead runs left: %s", self.url, ", ".join(removed))
        return storage

    def open_for_copy(self, beat: Beat) -> Storage:
        """Return another storage, for the thread of a slower level. Raises: as ``open``."""
        return WatchedStorage(self._open_new(), beat)

    def reopen(self) -> None:
        """Open the storage again at the next task: credentials may have expired, a mount may be stale."""
        self._storage = None

    def probe(self, beat: Beat) -> None:
        """Try a small write, opened again. Raises: LevelError; what the storage raises."""
        self.reopen()
        probe(self.open(beat))

    def _open_new(self) -> Storage:
        return open_storage(self.url, options=self.level.storage_options)

    # Names of files

    def snapshot(self, key: StepKey) -> SnapshotName:
        """Return the name of a snapshot."""
        run_id = self._other_runs.get(key, self.settings.run)
        return SnapshotName(run_id, key.step, f"{key.start:016x}")

    def directory(self, key: StepKey) -> str:
        """Return the directory of a snapshot."""
        return self.snapshot(key).directory

    def place(self, storage: Storage, key: StepKey) -> FilePlace:
        """Return the place of this node's file, written or not."""
        return FilePlace(storage, self.directory(key), self.name)

    def _is_deleted_here(self, name: NodeName) -> bool:
        """True if this node deletes a committed file of that name, once its snapshot is not needed."""
        if self.is_shared and name.nodes == self.name.nodes:
            return name == self.name
        return self._falls_to_this_node(name)

    def _manifests_to_delete(self, file_names: Sequence[str]) -> list[NodeName]:
        """Return the names of the committed files in a directory that this node must delete."""
        names = []
        for file_name in file_names:
            parsed = parse_file_name(file_name)
            if parsed is not None and parsed[1] == "json" and self._is_deleted_here(parsed[0]):
                names.append(parsed[0])
        return names

    def _sweeps(self, name: NodeName) -> bool:
        """True if this node removes leftovers of files of that name."""
        return name == self.name or self._falls_to_this_node(name)

    def _falls_to_this_node(self, name: NodeName) -> bool:
        """Divide the files of an earlier team by number.

        On its own disk a node finds files with whatever number it had when it wrote them.
        """
        return not self.is_shared or name.node % self.settings.num_nodes == self.settings.node

    # Listing

    def list_snapshots(self, storage: Storage, task: ListLevel) -> Listed:
        """Return the snapshots of the run, by their manifests and the sizes of their files. Raises: LevelError."""
        stored: list[StepKey] = []
        leftovers: list[StepKey] = []
        unusable: list[StepKey] = []
        names: list[NamedStep] = []
        for directory in storage.list():
            key = self._parse_directory_name(directory)
            if key is None:
                continue
            file_names = storage.list(directory)
            if self._is_stored(storage, directory, file_names):
                stored.append(key)
            elif self._is_uncommitted(file_names):
                leftovers.append(key)
            elif self._manifests_to_delete(file_names):
                unusable.append(key)
            if self.settings.node == 0:
                names += self._names_given(storage, directory, key, file_names)
        if stored and self.newest_directory is None:
            self.newest_directory = self.directory(max(stored))
        return Listed(
            task.number,
            stored=tuple(sorted(stored)),
            leftovers=tuple(sorted(leftovers)),
            names=tuple(sorted(names)),
            unusable=tuple(sorted(unusable)),
        )

    def _is_uncommitted(self, file_names: Sequence[str]) -> bool:
        """True if a directory has a file of this node without its manifest."""
        has_bytes = self.name.file in file_names or self.name.base in file_names
        return has_bytes and self.name.manifest not in file_names

    def _parse_directory_name(self, directory: str) -> StepKey | None:
        """Return the snapshot of this run in a directory; None for any other directory."""
        name = SnapshotName.parse(directory)
        if name is None or name.run_id != self.settings.run:
            return None
        return StepKey(int(name.start, 16), name.step)

    def _is_stored(self, storage: Storage, directory: str, file_names: Sequence[str]) -> bool:
        """True if this node's part of a snapshot exists. Damaged files do not count."""
        try:
            if self.name.manifest in file_names:
                manifest = read_committed(FilePlace(storage, directory, self.name))
                if self._is_of_this_team(manifest):
                    return True
            return self._is_stored_by_another_team(storage, directory, file_names)
        except FileNotFoundError:
            return False  # deleted meanwhile
        except FormatError as error:
            logger.warning("%s: %s does not count: %s", storage.url, directory, error)
            return False

    def _is_of_this_team(self, manifest: Manifest) -> bool:
        ranks = {shard.meta.rank for shard in manifest.shards}
        return manifest.meta.world_size == self.settings.world_size and ranks == set(self.settings.ranks)

    def _is_stored_by_another_team(self, storage: Storage, directory: str, file_names: Sequence[str]) -> bool:
        """True if all manifests of a snapshot exist, and this node's files are whole.

        With a disk per node no node can see all manifests. Raises: FormatError; FileNotFoundError.
        """
        listed = parse_directory(directory, file_names)
        if not self.is_shared or not listed.is_whole:
            return False
        for name in listed.nodes((self.settings.node, self.settings.num_nodes)):
            read_committed(FilePlace(storage, directory, name))
        return True

    def _names_given(
        self, storage: Storage, directory: str, key: StepKey, file_names: Sequence[str]
    ) -> list[NamedStep]:
        named = []
        for file_name in file_names:
            name = parse_keep_file_name(file_name)
            if name is not None and belongs_to_run(storage, f"{directory}/{file_name}"):
                named.append(NamedStep(name, key))
        return named

    # Writing

    def begin_write(self, key: StepKey) -> None:
        """Record that files of this step without a manifest are of this keeper."""
        self._uncommitted.add(key)

    def use_run(self, key: StepKey, run_id: str) -> None:
        """Store a capture under its own run."""
        if run_id != self.settings.run:
            self._other_runs[key] = run_id

    def read_own_manifest(self, storage: Storage, key: StepKey) -> Manifest:
        """Return the manifest of this node's committed file.

        Raises: FileNotFoundError, if it or a shard of a rank of this node is missing; FormatError; LevelError.
        """
        place = self.place(storage, key)
        manifest = place.read_manifest()
        missing = set(self.settings.ranks) - {shard.meta.rank for shard in manifest.shards}
        if missing:
            raise FileNotFoundError(f"{place.where}: nothing of rank {min(missing)}")
        return manifest

    def read_back(self, storage: Storage, key: StepKey, *, is_base_new: bool) -> None:
        """Compare every byte of the file of this node with its checksums.

        An existing base is verified once by each keeper, and written again if it is damaged.

        Raises: FormatError, after the snapshot was removed; LevelError.
        """
        place = self.place(storage, key)
        try:
            verify(place, skips_base=self._has_read_base and not is_base_new)
            self._has_read_base = True
        except (FormatError, FileNotFoundError) as error:
            self.newest_directory = None
            self._has_read_base = False
            with contextlib.suppress(FileNotFoundError):
                place.withdraw()
            if not place.is_link():
                place.delete_or_leave()  # such a level would fill up
            raise FormatError(f"{storage.url}: step {key.step}: it was read back damaged: {error}") from error

    def end_write(self, key: StepKey) -> None:
        """Count the file of this step from now on."""
        self._uncommitted.discard(key)
        self.newest_directory = self.directory(key)

    # Deleting

    def delete(self, storage: Storage, keys: Sequence[StepKey]) -> None:
        """Delete this node's files of snapshots, manifests first. Raises: LevelError.

        Nothing is deleted of a snapshot that has a name, or a file that is or is behind a symbolic link.
        """
        # A missing level must fail here. A missing directory would look as if it was deleted.
        directories = set(storage.list())
        for key in keys:
            if self.directory(key) in directories:
                self._delete_snapshot(storage, key)
            self._uncommitted.discard(key)
            self._other_runs.pop(key, None)

    def _delete_snapshot(self, storage: Storage, key: StepKey) -> None:
        directory = self.directory(key)
        file_names = storage.list(directory)
        if any(parse_keep_file_name(file_name) is not None for file_name in file_names):
            return
        if self._is_uncommitted(file_names):
            self._delete_uncommitted(storage, key)
        places = [FilePlace(storage, directory, name) for name in self._manifests_to_delete(file_names)]
        if delete_files(places):
            storage.delete_directory(directory)

    def _delete_uncommitted(self, storage: Storage, key: StepKey) -> None:
        """Delete a file without manifest.

        A file of another process may be a copy in progress (``cp``, ``rsync``), and stays for a day.
        """
        place = self.place(storage, key)
        if place.is_link():
            return
        if key in self._uncommitted:
            place.delete_bytes()
            return
        for path in (place.file_path, place.base_path):
            if is_stale(storage, path):
                storage.delete(path)

    # Names of users

    def set_names(self, storage: Storage, added: Sequence[NamedStep], released: Sequence[NamedStep]) -> None:
        """Remove names, then give names. Raises: LevelError.

        A file of another program that has the place of a name stays, and counts as that name; the error is logged.
        """
        for named in released:
            release_from(storage, self.snapshot(named.key).directory, named.name)
            faults.point("keeper.names.released")
        for named in added:
            try:
                keep(storage, self.snapshot(named.key), named.name)
            except ConfigError as error:  # only a person can mend it: the level must not fail until then
                logger.error("step %d does not get the name %r: %s", named.key.step, named.name, error)
            faults.point("keeper.names.given")
