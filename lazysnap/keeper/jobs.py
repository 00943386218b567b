"""What does the thread of a level do? One job at a time: list, write, delete, name, or try a small write.

::

    loop ──Job──> run_level_job ──JobEnded──> loop
                    │
                    └─ WriteLevel: slots, or a faster level ──> file, manifest (commits) ──> read back ──> StepStored

``core.jobs`` decides which job is next, and handles a level that fails. A job that is cancelled or abandoned notices it
at its next ``beat``, which each operation of the storage calls first. Then it commits and deletes nothing more. A job
that is cancelled after its commit ends as ``Missed``, too; the core has its files deleted.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

from lazysnap import faults
from lazysnap.core.actions import (
    DeleteFiles,
    Event,
    Failed,
    Job,
    JobEnded,
    JobMoved,
    Listed,
    ListLevel,
    Missed,
    NamesSet,
    ProbeLevel,
    SetNames,
    StepStored,
    WriteLevel,
)
from lazysnap.errors import FormatError, LazySnapError
from lazysnap.keeper.level_files import LevelFiles
from lazysnap.levels import SnapshotStore
from lazysnap.levels.blocks import FileBlocks, VerifiedSource
from lazysnap.levels.shared_part import SharedPart, has_shared_rows
from lazysnap.levels.source import BlockSource, NodeSource, shard_of
from lazysnap.memory.capture_reader import CaptureAborted, CaptureReader
from lazysnap.memory.slots import Slot
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.manifest import CaptureMeta, Manifest

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""The least time between two messages of a job that it moves."""

NodeSlots = Mapping[int, Mapping[int, Slot]]
"""Slots of a node, by local rank and slot id."""


class JobControl:
    """Link between a job on the thread of a level and the loop."""

    def __init__(self, job: Job, post: Callable[[Event], None], level_url: str = "") -> None:
        """Begin the job.

        Args:
            job: what the thread does.
            post: hands an event to the loop, from any thread.
            level_url: the level; empty for redundancy.
        """
        self.job = job
        self.level_url = level_url
        self.is_cancelled = False
        """Set by the loop. Then the job commits nothing more."""
        self.moved_bytes = 0
        """Bytes that the job moved, for people."""
        self.checksums: dict[tuple[int, int], Checksums] = {}
        """Checksums of captures that a job stored as they are, by slot id and sequence. Set by the job."""
        self._counting = threading.Lock()
        self._post = post
        self._beat_at = time.monotonic()

    def beat(self) -> None:
        """Note that the job moves. Raises: CaptureAborted, if it was cancelled."""
        if self.is_cancelled:
            raise CaptureAborted("the job was cancelled")
        now = time.monotonic()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._post(JobMoved(self.job.level, self.job.job))

    def count(self, num_bytes: int) -> None:
        """Count bytes that were moved, on any thread. See ``levels.source.Progress``."""
        with self._counting:
            self.moved_bytes += num_bytes


def run_level_job(job: Job, files: LevelFiles, slots: NodeSlots, control: JobControl) -> JobEnded:
    """Do a job and return how it ended. Blocks. Never raises: storage packages may raise anything.

    Args:
        job: what is to be done.
        files: those of the level.
        slots: those that the job reads.
        control: the link to the loop.
    """
    try:
        return _do_job(job, files, slots, control)
    except CaptureAborted as error:
        if not isinstance(job, WriteLevel):
            return Failed(job.level, job.job, str(error))
        logger.info("%s: step %d is not stored: %s", files.url, job.key.step, error)
        return Missed(job.level, job.job, str(error))
    except Exception as error:
        # The last handler of the thread.
        is_foreseen = isinstance(error, (LazySnapError, OSError))
        if not isinstance(error, LazySnapError):
            files.reopen()
        text = str(error) or type(error).__name__
        logger.info("%s: %s: %s", files.url, _describe(job), text, exc_info=not is_foreseen)
        return Failed(job.level, job.job, text)


def _describe(job: Job) -> str:
    """Return what a job does, for the log."""
    match job:
        case WriteLevel(source=None):
            return f"writing step {job.key.step}"
        case WriteLevel():
            return f"copying step {job.key.step}"
        case ListLevel():
            return "looking for what is there"
        case DeleteFiles():
            return "deleting old snapshots"
        case SetNames():
            return "naming snapshots"
    return "trying a small write"


def _do_job(job: Job, files: LevelFiles, slots: NodeSlots, control: JobControl) -> JobEnded:
    match job:
        case WriteLevel():
            return _write(job, files, slots, control)
        case ListLevel():
            contents = files.find(files.open(control.beat))
            return Listed(job.level, job.job, contents.stored, contents.leftovers, contents.names, contents.unusable)
        case DeleteFiles():
            files.delete(files.open(control.beat), job.keys)
        case SetNames():
            store = files.open(control.beat)
            return NamesSet(job.level, job.job, files.set_names(store, job.added, job.released))
        case ProbeLevel():
            files.probe(control.beat)
    return JobEnded(job.level, job.job)


def _write(job: WriteLevel, files: LevelFiles, slots: NodeSlots, control: JobControl) -> StepStored:
    """Write the file of the node, commit it by its manifest, read it back. Only then it counts."""
    began = time.monotonic()
    store = files.open(control.beat)
    files.begin_write(job.key)
    if job.source is None:
        faults.point("keeper.persist.begin")
        manifest = _SlotWriter(job, files, slots, control).write(store)
    else:
        faults.point("keeper.persist.copy")
        manifest = _copy(job, files, files.faster[job.source], store, control)
    seconds = time.monotonic() - began
    written_bytes = manifest.written_bytes
    logger.info("step %d committed to %s: %d bytes in %.2f s", job.key.step, files.url, written_bytes, seconds)
    faults.point("keeper.persist.committed")
    read_back_s = _read_back(job, files, store, manifest)
    faults.point("keeper.persist.verified")
    files.end_write(job.key)
    return StepStored(job.level, job.job, written_bytes, seconds, manifest.checksums.seconds, read_back_s)


def _read_back(job: WriteLevel, files: LevelFiles, store: SnapshotStore, manifest: Manifest) -> float:
    """Read back what was written, unless the storage checks each part as it arrives. Return the seconds that it took.

    A file that was committed already was read just now (``SnapshotStore.write_file``).
    Raises: FormatError, and it is no snapshot any more; LevelError.
    """
    if store.storage.checks_writes() or not manifest.written_bytes:
        return 0.0
    began = time.monotonic()
    files.read_back(store, job.key, is_base_new=manifest.written_bytes == manifest.size_bytes)
    return time.monotonic() - began


class _SlotWriter:
    """Writes the shards of all ranks of the node out of their slots. For one job."""

    def __init__(self, job: WriteLevel, files: LevelFiles, slots: NodeSlots, control: JobControl) -> None:
        self._job = job
        self._files = files
        self._slots = slots
        self._control = control

    def write(self, store: SnapshotStore) -> Manifest:
        """Write and commit the node's file. Blocks: also until the captures are whole.

        Raises: CaptureAborted, if a slot does not hold the capture; LevelError; FormatError.
        """
        with contextlib.ExitStack() as attached:
            readers = self._open_captures(attached)
            self._files.use_run(self._job.key, readers[0].meta.run_id)
            shards = [_stored_part(reader.meta, reader, self._files) for reader in readers]
            manifest = _write_shards(store, self._files, shards, self._control)
        first = readers[0]
        if shards == [(first.meta, first)]:  # the file is what is in memory
            slot_id = dict(self._job.slots)[0]
            self._control.checksums[slot_id, first.sequence] = manifest.checksums
        return manifest

    def _open_captures(self, attached: contextlib.ExitStack) -> list[CaptureReader]:
        slot_ids = dict(self._job.slots)
        readers: list[CaptureReader] = []
        for local_rank in range(self._files.settings.num_ranks):
            slot = self._find_slot(local_rank, slot_ids.get(local_rank))
            own_slot = _attach(slot)
            attached.callback(own_slot.close)
            reader = self._open_capture(own_slot)
            self._check_owner(local_rank, reader.meta)
            readers.append(reader)
        if len({reader.meta.run_id for reader in readers}) > 1:
            raise CaptureAborted(f"the ranks captured step {self._job.key.step} in different runs")
        return readers

    def _find_slot(self, local_rank: int, slot_id: int | None) -> Slot:
        slot = None
        if slot_id is not None:
            slot = self._slots.get(local_rank, {}).get(slot_id)
        if slot is None:
            raise CaptureAborted(f"step {self._job.key.step} is not in memory any more")
        return slot

    def _open_capture(self, slot: Slot) -> CaptureReader:
        key = self._job.key
        view = slot.view()
        if (view.start, view.step) != (key.start, key.step):
            raise CaptureAborted(f"step {key.step} is not in memory any more")
        return CaptureReader(slot, view.sequence, self._control.beat)

    def _check_owner(self, local_rank: int, meta: CaptureMeta) -> None:
        """Files are named after ranks: what is stored under a name is theirs. Raises: CaptureAborted."""
        settings = self._files.settings
        key = self._job.key
        captured = (int(meta.start, 16), meta.step, meta.rank, meta.world_size)
        expected = (key.start, key.step, settings.ranks[local_rank], settings.world_size)
        if captured != expected:
            raise CaptureAborted(
                f"a slot: holds rank {meta.rank} of {meta.world_size} of {meta.name.directory}, "
                f"expected rank {expected[2]} of {expected[3]} of {self._files.directory(key)}"
            )


def _attach(slot: Slot) -> Slot:
    """Return the slot once more: it stays readable when the loop closes its own. Raises: CaptureAborted."""
    try:
        return Slot.attach(os.dup(slot.descriptor))
    except (OSError, FormatError) as error:
        raise CaptureAborted(f"a slot was closed, or cannot be mapped: {error}") from error


def _copy(
    job: WriteLevel, files: LevelFiles, origin_files: LevelFiles, store: SnapshotStore, control: JobControl
) -> Manifest:
    """Write what a faster level has. Raises: CaptureAborted, if that is not whole; LevelError."""
    if origin_files.is_shared and not files.is_shared:
        raise CaptureAborted(f"{origin_files.url}: has this node's share alone of what several nodes hold")
    origin = origin_files.open_for_copy(control.beat)
    try:
        manifest = origin_files.read_own_manifest(origin, job.key)
    except (FileNotFoundError, FormatError) as error:
        raise CaptureAborted(str(error)) from error
    files.use_run(job.key, manifest.meta.run_id)
    place = origin_files.place(origin.storage, job.key)
    blocks = FileBlocks(place, manifest)
    try:
        with contextlib.closing(blocks):
            blocks.header(manifest.shards[0])  # opened once: also what is deleted meanwhile is copied
            return _write_blocks(store, files, blocks, control)
    except (FileNotFoundError, FormatError) as error:  # the file is not what its manifest says
        raise CaptureAborted(f"{place.where}: {error}") from error


def _write_blocks(store: SnapshotStore, files: LevelFiles, blocks: FileBlocks, control: JobControl) -> Manifest:
    """Write and commit the part of a file that this level gets."""
    manifest = blocks.manifest
    source = VerifiedSource(blocks)
    is_cut = files.is_shared and any(has_shared_rows(shard.meta) for shard in manifest.shards)
    if not is_cut:
        return store.write_file(manifest.name, manifest.shards, source, control.count, former=files.newest_directory)
    parts: list[tuple[CaptureMeta, BlockSource]] = []
    for shard in manifest.shards:
        part = SharedPart(shard.meta, source, shard.offset, shard.size_bytes)
        parts.append((part.meta, part))
    return _write_shards(store, files, parts, control)


def _stored_part(meta: CaptureMeta, source: BlockSource, files: LevelFiles) -> tuple[CaptureMeta, BlockSource]:
    """Return the part of a shard that this level gets."""
    if not files.is_shared or not has_shared_rows(meta):
        return meta, source
    part = SharedPart(meta, source)
    return part.meta, part


def _write_shards(
    store: SnapshotStore, files: LevelFiles, shards: list[tuple[CaptureMeta, BlockSource]], control: JobControl
) -> Manifest:
    if len(shards) == 1:
        meta, source = shards[0]
        return store.write_file(
            files.name, [shard_of(meta, source)], source, control.count, former=files.newest_directory
        )
    together = NodeSource(shards)
    return store.write_file(files.name, together.shards, together, control.count, former=files.newest_directory)
