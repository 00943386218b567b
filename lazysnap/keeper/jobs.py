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
from lazysnap.levels.blocks import FileBlocks
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.shared_part import SharedPart, has_shared_rows
from lazysnap.levels.source import BlockSource, NodeSource, shard_of
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import write_unless_committed
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
            self._post(JobMoved(self.job.level, self.job.number))

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
            return Failed(job.number, str(error))
        logger.info("%s: step %d is not stored: %s", files.url, job.key.step, error)
        return Missed(job.number, str(error))
    except Exception as error:
        # The last handler of the thread.
        is_foreseen = isinstance(error, (LazySnapError, OSError))
        if not isinstance(error, LazySnapError):
            files.reopen()
        text = str(error) or type(error).__name__
        logger.info("%s: %s: %s", files.url, _describe(job), text, exc_info=not is_foreseen)
        return Failed(job.number, text)


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
            return files.find(files.open(control.beat), job)
        case DeleteFiles():
            files.delete(files.open(control.beat), job.keys)
        case SetNames():
            storage = files.open(control.beat)
            return NamesSet(job.number, files.set_names(storage, job.added, job.released))
        case ProbeLevel():
            files.probe(control.beat)
    return JobEnded(job.number)


def _write(job: WriteLevel, files: LevelFiles, slots: NodeSlots, control: JobControl) -> StepStored:
    """Write the file of the node, commit it by its manifest, read it back. Only then it counts."""
    began = time.monotonic()
    storage = files.open(control.beat)
    files.begin_write(job.key)
    if job.source is None:
        faults.point("keeper.persist.begin")
        manifest = _write_slots(job, files, slots, storage, control)
    else:
        faults.point("keeper.persist.copy")
        manifest = _copy(job, files, files.faster[job.source], storage, control)
    seconds = time.monotonic() - began
    written_bytes = manifest.written_bytes
    logger.info("step %d committed to %s: %d bytes in %.2f s", job.key.step, files.url, written_bytes, seconds)
    faults.point("keeper.persist.committed")
    read_back_s = _read_back(job, files, storage, manifest)
    faults.point("keeper.persist.verified")
    files.end_write(job.key)
    return StepStored(job.number, written_bytes, seconds, manifest.checksums.seconds, read_back_s)


def _read_back(job: WriteLevel, files: LevelFiles, storage: Storage, manifest: Manifest) -> float:
    """Read back what was written, unless the storage checks each part as it arrives. Return the seconds that it took.

    A file that was committed already was read just now (``levels.store.write_unless_committed``).
    Raises: FormatError, and it is no snapshot any more; LevelError.
    """
    if storage.checks_writes() or not manifest.written_bytes:
        return 0.0
    began = time.monotonic()
    files.read_back(storage, job.key, is_base_new=manifest.written_bytes == manifest.size_bytes)
    return time.monotonic() - began


def open_captures(job: WriteLevel, slots: NodeSlots, beat: Callable[[], None]) -> list[CaptureReader]:
    """Return a reader of each capture that a job stores, by rank. A slot that the loop frees meanwhile stays readable.

    Args:
        job: names rank and slot of each capture.
        slots: the slots of the node.
        beat: see ``CaptureReader``.

    Raises: CaptureAborted, if a slot does not hold the step; FormatError.
    """
    readers = []
    for rank, slot_id in job.slots:
        slot = slots.get(rank, {}).get(slot_id)
        view = None if slot is None else slot.view()
        if slot is None or view is None or (view.start, view.step) != (job.key.start, job.key.step):
            raise CaptureAborted(f"step {job.key.step} is not in memory any more")
        readers.append(CaptureReader(slot, view.sequence, beat))
    return readers


def _write_slots(
    job: WriteLevel, files: LevelFiles, slots: NodeSlots, storage: Storage, control: JobControl
) -> Manifest:
    """Write the shards of all ranks of the node out of their slots. Blocks: also until the captures are whole.

    Raises: CaptureAborted, if a slot does not hold the capture; LevelError; FormatError.
    """
    readers = open_captures(job, slots, control.beat)
    for rank, reader in zip(files.settings.ranks, readers, strict=True):
        _check_owner(job, files, rank, reader.meta)
    if len({reader.meta.run_id for reader in readers}) > 1:
        raise CaptureAborted(f"the ranks captured step {job.key.step} in different runs")
    first = readers[0]
    files.use_run(job.key, first.meta.run_id)
    shards = [_stored_part(reader.meta, reader, files) for reader in readers]
    manifest = _write_shards(storage, files, shards, control)
    if shards == [(first.meta, first)]:  # the file is what is in memory
        _, slot_id = job.slots[0]
        control.checksums[slot_id, first.sequence] = manifest.checksums
    return manifest


def _check_owner(job: WriteLevel, files: LevelFiles, rank: int, meta: CaptureMeta) -> None:
    """Files are named after ranks: what is stored under a name is theirs. Raises: CaptureAborted."""
    world_size = files.settings.world_size
    captured = (int(meta.start, 16), meta.step, meta.rank, meta.world_size)
    if captured != (job.key.start, job.key.step, rank, world_size):
        raise CaptureAborted(
            f"a slot: holds rank {meta.rank} of {meta.world_size} of {meta.name.directory}, "
            f"expected rank {rank} of {world_size} of {files.directory(job.key)}"
        )


def _copy(
    job: WriteLevel, files: LevelFiles, origin_files: LevelFiles, storage: Storage, control: JobControl
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
    place = origin_files.place(origin, job.key)
    blocks = FileBlocks(place, manifest)
    try:
        with contextlib.closing(blocks):
            blocks.header(manifest.shards[0])  # opened once: also what is deleted meanwhile is copied
            return _write_blocks(storage, files, blocks, control)
    except (FileNotFoundError, FormatError) as error:  # the file is not what its manifest says
        raise CaptureAborted(f"{place.where}: {error}") from error


def _write_blocks(storage: Storage, files: LevelFiles, blocks: FileBlocks, control: JobControl) -> Manifest:
    """Write and commit the part of a file that this level gets."""
    manifest = blocks.manifest
    is_cut = files.is_shared and any(has_shared_rows(shard.meta) for shard in manifest.shards)
    if not is_cut:
        place = FilePlace(storage, manifest.meta.name.directory, manifest.name)
        return write_unless_committed(place, manifest.shards, blocks, control.count, former=files.newest_directory)
    parts: list[tuple[CaptureMeta, BlockSource]] = []
    for shard in manifest.shards:
        part = SharedPart(shard.meta, blocks, shard.offset, shard.size_bytes)
        parts.append((part.meta, part))
    return _write_shards(storage, files, parts, control)


def _stored_part(meta: CaptureMeta, source: BlockSource, files: LevelFiles) -> tuple[CaptureMeta, BlockSource]:
    """Return the part of a shard that this level gets."""
    if not files.is_shared or not has_shared_rows(meta):
        return meta, source
    part = SharedPart(meta, source)
    return part.meta, part


def _write_shards(
    storage: Storage, files: LevelFiles, shards: list[tuple[CaptureMeta, BlockSource]], control: JobControl
) -> Manifest:
    meta, source = shards[0]
    place = FilePlace(storage, meta.name.directory, files.name)
    if len(shards) == 1:
        return write_unless_committed(
            place, [shard_of(meta, source)], source, control.count, former=files.newest_directory
        )
    together = NodeSource(shards)
    return write_unless_committed(place, together.shards, together, control.count, former=files.newest_directory)
