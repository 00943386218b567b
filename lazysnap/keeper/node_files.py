"""The files of one start of a job that one node writes and looks after at one level: their names and their bytes."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lazysnap.errors import FormatError
from lazysnap.grants.messages import StepKey
from lazysnap.keeper.frozen import FrozenTurn, FrozenWriter
from lazysnap.levels import SnapshotStore
from lazysnap.levels.blocks import FileBlocks, VerifiedSource
from lazysnap.levels.node_file import FilePlace, entries_of
from lazysnap.levels.shared_part import SharedPart, has_shared_rows
from lazysnap.levels.source import BlockSource, NodeSource, shard_of
from lazysnap.levels.storage import Storage
from lazysnap.levels.watchdog import Beat
from lazysnap.memory.arena import Slot
from lazysnap.memory.failures import CaptureAborted
from lazysnap.memory.slot_source import SlotSource, open_slot
from lazysnap.resolver import Entry
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.names import NodeName, SnapshotName, parse_file_name
from lazysnap.topology import Team

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeFiles:
    """Names files, and decides which are the node's. Pure, but for what takes a storage."""

    team: Team
    run_id: str
    start: str
    is_shared: bool
    """True if all nodes see the same place."""

    def directory(self, step: int) -> str:
        """The directory of a snapshot of this start."""
        return SnapshotName(self.run_id, step, self.start).directory

    @property
    def name(self) -> NodeName:
        """The name of the file that the node writes."""
        return NodeName(self.team.node, self.team.nodes)

    def found(self, storage: Storage, step: int) -> Manifest:
        """Read the manifest of the node's committed file. Blocks.

        Raises: FileNotFoundError, if it or a shard of its ranks is missing; FormatError; LevelError.
        """
        place = self.place(storage, step)
        manifest = place.read_manifest()
        if missing := set(self.team.node_ranks) - {shard.meta.rank for shard in manifest.shards}:
            raise FileNotFoundError(f"{place.where}: nothing of rank {min(missing)}")
        return manifest

    def place(self, storage: Storage, step: int) -> FilePlace:
        """The place of the node's file, written or not."""
        return FilePlace(storage, self.directory(step), self.name)

    def entry(self, url: str, speed: int, step: int) -> Entry:
        """The facts of the first shard of the node."""
        facts = (self.run_id, self.start, step, self.team.node_ranks[0], self.team.world_size)
        return Entry(url, speed, *facts, self.directory(step))

    def of_run(self, directories: Iterable[str]) -> dict[str, StepKey]:
        """Those directories that hold snapshots of this run, whichever start they are of."""
        found = {}
        for directory in directories:
            name = SnapshotName.parse(directory)
            if name is not None and name.run_id == self.run_id:
                found[directory] = StepKey(name.step, name.start)
        return found

    def mine(self, storage: Storage, directory: str, key: StepKey) -> list[FilePlace]:
        """The committed files in a directory that this node deletes when the snapshot goes.

        Of this start what it wrote, of earlier ones what is left to it. Blocks.
        """
        is_mine = self._is_own if key.start == self.start else self._is_left_to
        return [FilePlace(storage, directory, name) for name in _manifests(storage, directory) if is_mine(name)]

    def looks_after(self, name: NodeName) -> bool:
        """True if this node removes what dead writers left of files of that name."""
        return self._is_own(name) or self._is_left_to(name)

    def _is_own(self, name: NodeName) -> bool:
        return name == self.name

    def _is_left_to(self, name: NodeName) -> bool:
        """Share out files by number where all nodes see the same ones, so that each goes once.

        On a disk of its own a node finds files of whatever number it had when it wrote them.
        """
        return not self.is_shared or name.node % self.team.nodes == self.team.node


def _manifests(storage: Storage, directory: str) -> list[NodeName]:
    parsed = [found for found in map(parse_file_name, storage.list(directory)) if found is not None]
    return [name for name, suffix in parsed if suffix == "json"]


class FileWriter:
    """Writes the node's file of a snapshot at one level, out of memory or from a faster level, and reads it back.

    Its methods block, on one thread; ``slots`` and ``moved_bytes`` may be read from any.
    """

    def __init__(
        self, files: NodeFiles, slots_of: Callable[[int], Sequence[Slot | None]], frozen: FrozenWriter
    ) -> None:
        """``slots_of``: see ``level_writer.WriterContext``."""
        self._files = files
        self._slots_of = slots_of
        self._frozen = frozen
        self.moved_bytes = 0
        """The bytes written so far of the current step."""
        self._counting = threading.Lock()
        self.slots: tuple[Slot, ...] = ()
        """The slots that are read now."""

    def rest(self) -> None:
        """Nothing is read any more."""
        self.moved_bytes = 0
        self.slots = ()

    def store(self, store: SnapshotStore, step: int, turn: FrozenTurn | None, beat: Beat) -> Manifest:
        """Write the shards of all ranks out of their slots. Raises: CaptureAborted, LevelError, FormatError.

        ``beat``: of the job, called while captures fill the slots.
        """
        held = [self._source(number, step, beat) for number in range(len(self._files.team.node_ranks))]
        self.slots = tuple(slot for slot, _ in held)
        for _, source in held:
            self._frozen.bring(store, source.meta, turn=turn)
        shards = [self._stored(source.meta, source) for _, source in held]
        manifest = self._store_shards(store, self._files.name, shards)
        slot, first = held[0]
        if shards == [(first.meta, first)]:  # the file is what is in memory
            slot.set_checksums(first.sequence, manifest.checksums)
        return manifest

    def _stored(self, meta: CaptureMeta, source: BlockSource) -> tuple[CaptureMeta, BlockSource]:
        """Return the part of a shard that this level gets."""
        if not self._files.is_shared or not has_shared_rows(meta):
            return meta, source
        part = SharedPart(meta, source)
        return part.meta, part

    def _store_shards(
        self, store: SnapshotStore, name: NodeName, shards: Sequence[tuple[CaptureMeta, BlockSource]]
    ) -> Manifest:
        if len(shards) == 1:
            [(meta, source)] = shards
            return store.write_file(name, [shard_of(meta, source)], source, self._moved)
        together = NodeSource(shards)
        return store.write_file(name, together.shards, together, self._moved)

    def _source(self, number: int, step: int, beat: Beat) -> tuple[Slot, SlotSource]:
        """Raises: CaptureAborted; FormatError."""
        slot, source = open_slot(lambda: self._slots_of(step)[number], step, beat)
        self._check_own(number, source.meta)
        return slot, source

    def _check_own(self, number: int, meta: CaptureMeta) -> None:
        """Files are named after ranks: what is stored under a name is theirs. Raises: CaptureAborted."""
        files = self._files
        wanted = (files.run_id, files.start, files.team.node_ranks[number], files.team.world_size)
        if (meta.run_id, meta.start, meta.rank, meta.world_size) != wanted:
            raise CaptureAborted(
                f"a slot of the arena: holds rank {meta.rank} of {meta.world_size} of {meta.name.directory}, "
                f"expected rank {wanted[2]} of {wanted[3]} of {files.directory(meta.step)}"
            )

    def copy(self, store: SnapshotStore, origin: SnapshotStore, step: int, turn: FrozenTurn | None) -> Manifest:
        """Write what a faster level has. Raises: CaptureAborted, if that is not whole; LevelError."""
        try:
            manifest = self._files.found(origin.storage, step)
        except (FileNotFoundError, FormatError) as error:
            raise CaptureAborted(str(error)) from error
        place = self._files.place(origin.storage, step)
        blocks = FileBlocks(place, manifest)
        try:
            with contextlib.closing(blocks):
                blocks.header(manifest.shards[0])  # opened once: also what is deleted meanwhile is copied
                for shard in manifest.shards:
                    self._frozen.bring(store, shard.meta, origin, turn)
                source = VerifiedSource(blocks)
                if not self._files.is_shared or not any(has_shared_rows(shard.meta) for shard in manifest.shards):
                    return store.write_file(manifest.name, manifest.shards, source, self._moved)
                parts = [SharedPart(one.meta, source, one.offset, one.size_bytes) for one in manifest.shards]
                return self._store_shards(store, manifest.name, [(part.meta, part) for part in parts])
        except (FileNotFoundError, FormatError) as error:  # what is there is not what the manifest says
            raise CaptureAborted(f"{place.where}: {error}") from error

    def _moved(self, num_bytes: int) -> None:
        with self._counting:
            self.moved_bytes += num_bytes

    def check(self, store: SnapshotStore, step: int) -> None:
        """Read a file back. Raises: FormatError, and it is no snapshot any more."""
        place = self._files.place(store.storage, step)
        try:
            for entry in entries_of(place.read_manifest(), store.url, store.speed, place.directory):
                store.check_frozen(entry)
            store.verify(place)
        except (FormatError, FileNotFoundError) as error:
            with contextlib.suppress(FileNotFoundError):
                place.withdraw()
            if not place.is_link():
                place.delete_or_leave()  # a place where all is read back damaged would fill up
            raise FormatError(f"{store.url}: step {step}: it was read back damaged: {error}") from error

    def listed(self, store: SnapshotStore) -> set[int]:
        """Return the steps of this start that the node has, by their manifests and the sizes of their files.

        Frozen tensors that they refer to are read in full.
        """
        found = set()
        for key in self._files.of_run(store.storage.list()).values():
            if key.start != self._files.start:
                continue
            try:
                manifest = self._files.found(store.storage, key.step)
            except FileNotFoundError:
                continue  # it was never whole
            except FormatError as error:
                logger.warning("%s: step %d does not count: %s", store.url, key.step, error)
                continue
            try:
                self._files.place(store.storage, key.step).check_size(manifest.size_bytes)
            except (FormatError, FileNotFoundError) as error:
                # It does not count, but stays: what it refers to may be brought again.
                logger.warning("%s: step %d does not count: %s", store.url, key.step, error)
                continue
            references = [shard.meta.frozen for shard in manifest.shards if shard.meta.frozen is not None]
            if all(self._frozen.is_whole(store, reference.digest) for reference in references):
                found.add(key.step)
        return found
