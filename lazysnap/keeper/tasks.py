"""Runs the tasks of a level on their threads: list, write, delete, name, or try a small write.

::

    loop ──Task──> run_level_task ──TaskEnded──> loop
                    │
                    └─ WriteLevel: slots, or a faster level ──> file, manifest (commits) ──> read back ──> StepStored

``core.tasks`` chooses the next task, and handles a level that fails. A cancelled task notices it at its next ``beat``,
which each operation of the storage calls first. Then it neither commits nor deletes anything more. A task that is
cancelled after its commit ends as ``Missed``, too; the core then deletes its files.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from lazysnap import faults
from lazysnap.core.actions import (
    DeleteFiles,
    Event,
    Failed,
    ListLevel,
    Missed,
    ProbeLevel,
    SetNames,
    StepStored,
    Task,
    TaskEnded,
    TaskMoved,
    WriteLevel,
)
from lazysnap.errors import FormatError, LazySnapError
from lazysnap.keeper.level_files import LevelFiles
from lazysnap.keeper.slot_table import NodeSlots
from lazysnap.levels.blocks import FileBlocks
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.shared_part import SharedPart, has_shared_rows
from lazysnap.levels.source import BlockSource, NodeSource, shard_of
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import write_node_file
from lazysnap.memory.capture_reader import CaptureAborted, CaptureReader
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import PAGE
from lazysnap.shard.manifest import CaptureMeta, Manifest

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""Minimum seconds between two progress messages of a task."""


class TaskControl:
    """Connects a task on its thread with the loop."""

    def __init__(self, task: Task, post: Callable[[Event], None], level_url: str = "") -> None:
        """Begin the task.

        Args:
            task: the task of the thread.
            post: passes an event to the loop, from any thread.
            level_url: the level; empty for redundancy.
        """
        self.task = task
        self.level_url = level_url
        self.is_cancelled = False
        """Set by the loop. The task then commits nothing more."""
        self.moved_bytes = 0
        """Bytes that the task has moved, for reports."""
        self.checksums: dict[tuple[int, int], Checksums] = {}
        """Checksums of captures that a task stored unchanged, by slot id and sequence. Set by the task."""
        self._counting = threading.Lock()
        self._post = post
        self._beat_at = time.monotonic()

    def beat(self) -> None:
        """Record that the task makes progress. Raises: CaptureAborted, if it was cancelled."""
        if self.is_cancelled:
            raise CaptureAborted("the task was cancelled")
        now = time.monotonic()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._post(TaskMoved(self.task.number, self.moved_bytes))

    def count(self, num_bytes: int) -> None:
        """Count bytes that were moved, on any thread. See ``levels.source.ByteCounter``."""
        with self._counting:
            self.moved_bytes += num_bytes


def run_level_task(task: Task, files: LevelFiles, slots: NodeSlots, control: TaskControl) -> TaskEnded:
    """Do a task and return how it ended. Blocks. Never raises: storage packages may raise anything.

    Args:
        task: the task.
        files: the files of the level.
        slots: the slots that the task reads.
        control: the link to the loop.
    """
    try:
        return _do_task(task, files, slots, control)
    except CaptureAborted as error:
        if not isinstance(task, WriteLevel):
            return Failed(task.number, str(error))
        logger.info("%s: step %d is not stored: %s", files.url, task.key.step, error)
        return Missed(task.number, str(error))
    except Exception as error:
        # The last handler of the thread.
        is_foreseen = isinstance(error, (LazySnapError, OSError))
        if not isinstance(error, LazySnapError):
            files.reopen()
        text = str(error) or type(error).__name__
        logger.info("%s: %s: %s", files.url, _describe(task), text, exc_info=not is_foreseen)
        return Failed(task.number, text)


def _describe(task: Task) -> str:
    """Return the description of a task for the log."""
    match task:
        case WriteLevel(source=None):
            return f"writing step {task.key.step}"
        case WriteLevel():
            return f"copying step {task.key.step}"
        case ListLevel():
            return "listing the level"
        case DeleteFiles():
            return "deleting old snapshots"
        case SetNames():
            return "naming snapshots"
    return "trying a small write"


def _do_task(task: Task, files: LevelFiles, slots: NodeSlots, control: TaskControl) -> TaskEnded:
    match task:
        case WriteLevel():
            return _write(task, files, slots, control)
        case ListLevel():
            return files.list_snapshots(files.open(control.beat), task)
        case DeleteFiles():
            files.delete(files.open(control.beat), task.keys)
        case SetNames():
            files.set_names(files.open(control.beat), task.added, task.released)
        case ProbeLevel():
            files.probe(control.beat)
    return TaskEnded(task.number)


def _write(task: WriteLevel, files: LevelFiles, slots: NodeSlots, control: TaskControl) -> StepStored:
    """Write the file of the node, commit it by its manifest, and read it back. Only then it counts."""
    began = time.monotonic()
    storage = files.open(control.beat)
    files.begin_write(task.key)
    if task.source is None:
        faults.point("keeper.persist.begin")
        manifest = _write_slots(task, files, slots, storage, control)
    else:
        faults.point("keeper.persist.copy")
        manifest = _copy(task, files, files.faster[task.source], storage, control)
    written_bytes = manifest.written_bytes
    commit_s = time.monotonic() - began
    logger.info("step %d committed to %s: %d bytes in %.2f s", task.key.step, files.url, written_bytes, commit_s)
    faults.point("keeper.persist.committed")
    # A file that was committed already was just verified: ``levels.store.write_node_file``.
    if written_bytes and not storage.checks_writes():
        files.read_back(storage, task.key, is_base_new=written_bytes == manifest.size_bytes)
    faults.point("keeper.persist.verified")
    files.end_write(task.key)
    return StepStored(task.number, written_bytes, time.monotonic() - began)


def open_captures(task: WriteLevel, slots: NodeSlots, beat: Callable[[], None]) -> list[CaptureReader]:
    """Return a reader of each capture that a task stores, by rank. A slot that the loop frees stays readable.

    Args:
        task: names rank and slot of each capture.
        slots: the slots of the node.
        beat: see ``CaptureReader``.

    Raises: CaptureAborted, if a slot does not hold the step; FormatError.
    """
    readers = []
    for rank, slot_id in task.slots:
        slot = slots.get(rank, {}).get(slot_id)
        view = None if slot is None else slot.view()
        if slot is None or view is None or (view.start, view.step) != (task.key.start, task.key.step):
            raise CaptureAborted(f"step {task.key.step} is not in memory any more")
        readers.append(CaptureReader(slot, view.sequence, beat))
    return readers


def _write_slots(
    task: WriteLevel, files: LevelFiles, slots: NodeSlots, storage: Storage, control: TaskControl
) -> Manifest:
    """Write the shards of all ranks of the node from their slots. Blocks: also until the captures are whole.

    Raises: CaptureAborted, if a slot does not hold the capture; LevelError; FormatError.
    """
    readers = open_captures(task, slots, control.beat)
    for rank, reader in zip(files.settings.ranks, readers, strict=True):
        _check_owner(task, files, rank, reader.meta)
    if len({reader.meta.run_id for reader in readers}) > 1:
        raise CaptureAborted(f"the ranks captured step {task.key.step} in different runs")
    first = readers[0]
    files.use_run(task.key, first.meta.run_id)
    shards = [_stored_part(reader.meta, reader, files) for reader in readers]
    manifest = _write_shards(storage, files, shards, control)
    if shards == [(first.meta, first)]:  # the file has exactly the bytes in memory
        _, slot_id = task.slots[0]
        control.checksums[slot_id, first.sequence] = manifest.checksums
    return manifest


def _check_owner(task: WriteLevel, files: LevelFiles, rank: int, meta: CaptureMeta) -> None:
    """Check that the captures belong to the ranks in the file name. Raises: CaptureAborted."""
    world_size = files.settings.world_size
    captured = (int(meta.start, 16), meta.step, meta.rank, meta.world_size)
    if captured != (task.key.start, task.key.step, rank, world_size):
        raise CaptureAborted(
            f"a slot: holds rank {meta.rank} of {meta.world_size} of {meta.name.directory}, "
            f"expected rank {rank} of {world_size} of {files.directory(task.key)}"
        )


def _copy(
    task: WriteLevel, files: LevelFiles, origin_files: LevelFiles, storage: Storage, control: TaskControl
) -> Manifest:
    """Copy from a faster level. Raises: CaptureAborted, if its file is not whole; LevelError."""
    if origin_files.is_shared and not files.is_shared:
        raise CaptureAborted(f"{origin_files.url}: has this node's share alone of what several nodes hold")
    origin = origin_files.open_for_copy(control.beat)
    try:
        manifest = origin_files.read_own_manifest(origin, task.key)
    except (FileNotFoundError, FormatError) as error:
        raise CaptureAborted(str(error)) from error
    files.use_run(task.key, manifest.meta.run_id)
    place = origin_files.place(origin, task.key)
    blocks = FileBlocks(place, manifest)
    try:
        with contextlib.closing(blocks):
            blocks.view(0, PAGE)  # opened once, so that a file that is deleted meanwhile is still copied
            return _write_blocks(storage, files, blocks, control)
    except (FileNotFoundError, FormatError) as error:  # the file does not match its manifest
        raise CaptureAborted(f"{place.where}: {error}") from error


def _write_blocks(storage: Storage, files: LevelFiles, blocks: FileBlocks, control: TaskControl) -> Manifest:
    """Write and commit the part of a file that this level gets."""
    manifest = blocks.manifest
    is_cut = files.is_shared and any(has_shared_rows(shard.meta) for shard in manifest.shards)
    if not is_cut:
        place = FilePlace(storage, manifest.meta.name.directory, manifest.name)
        return write_node_file(place, manifest.shards, blocks, control.count, former=files.newest_directory)
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
    storage: Storage, files: LevelFiles, shards: list[tuple[CaptureMeta, BlockSource]], control: TaskControl
) -> Manifest:
    meta, source = shards[0]
    place = FilePlace(storage, meta.name.directory, files.name)
    if len(shards) == 1:
        return write_node_file(place, [shard_of(meta, source)], source, control.count, former=files.newest_directory)
    together = NodeSource(shards)
    return write_node_file(place, together.shards, together, control.count, former=files.newest_directory)
