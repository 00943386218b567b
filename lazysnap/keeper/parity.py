"""The parity that a keeper holds for the other nodes of its group, and the tasks that compute it from their memory.

Redundancy is one more level: a step becomes due by the settings of the job, the core grants it, and ``run_parity_task``
stores it. One thread per other node reads its pieces block by block, as its captures fill, and adds each block to the
parity. So network and processor work at the same time. Reading takes one block of memory per node.
"""

import ctypes
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import xxhash

from lazysnap import faults
from lazysnap.core.actions import (
    DeleteFiles,
    Failed,
    Listed,
    ListLevel,
    Missed,
    ProbeLevel,
    StepStored,
    Task,
    TaskEnded,
    WriteLevel,
)
from lazysnap.core.messages import JobSettings, PeerSettings, RedundancySettings, StepKey
from lazysnap.errors import KeeperError, LazySnapError
from lazysnap.keeper.node_part import NodePart, read_index
from lazysnap.keeper.questions import HeldMember, HeldParity
from lazysnap.keeper.slot_table import NodeSlots
from lazysnap.keeper.tasks import TaskControl, open_captures
from lazysnap.levels.source import map_anonymous
from lazysnap.levels.threads import in_threads
from lazysnap.levels.watched import RateLimiter
from lazysnap.memory.budget import NODE
from lazysnap.memory.capture_reader import CaptureAborted, CaptureReader
from lazysnap.parity.codes import Code, multiply_add
from lazysnap.parity.groups import CHECKSUM_BYTES, Group, Pieces
from lazysnap.peers.messages import PartOf, PeerRefused
from lazysnap.peers.reader import PeerReader

logger = logging.getLogger(__name__)

AHEAD_S = 10.0
"""Seconds that a node waits until another one begins to capture the step."""
_PIECE_BYTES = 16 << 20
"""Bytes that are zeroed at a time."""
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class ParitySet:
    """The parity of one step."""

    description: HeldParity
    files: dict[int, memoryview]
    """Stripes by number; see ``parity.groups``."""
    identity: int = field(default_factory=partial(secrets.randbits, 63))
    """A random number that identifies this computation of the parity."""

    @property
    def key(self) -> StepKey:
        """The protected snapshot."""
        return StepKey(int(self.description.start, 16), self.description.step)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of memory that it takes."""
        return sum(len(file) for file in self.files.values())


class ParityStore:
    """The parity that a keeper holds. Thread-safe. It outlives starts: only ``delete`` and ``clear`` release parity."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sets: list[ParitySet] = []
        self._spare: list[memoryview] = []
        """Memory of the last released parity, for the next one."""

    def buffers(self, count: int, size_bytes: int, beat: Callable[[], None]) -> list[memoryview]:
        """Return zeroed and populated memory for the files of that many stripes.

        Blocks: ``beat`` is called again and again, and ends the call by what it raises. Raises: MemoryBoundExceeded.
        """
        with self._lock:
            spare = self._spare
            self._spare = []
        buffers = [buffer for buffer in spare if len(buffer) == size_bytes][:count]
        del spare  # memory of another size is returned to the machine first
        for buffer in buffers:
            for _ in _zero(buffer):
                beat()
        num_missing = count - len(buffers)
        with NODE.reserved(num_missing * size_bytes, "parity for other nodes") as populated:
            for _ in range(num_missing):
                buffer = map_anonymous(size_bytes)
                for piece_bytes in _zero(buffer):
                    populated(piece_bytes)
                    beat()
                buffers.append(buffer)
        return buffers

    def add(self, parity: ParitySet) -> None:
        """Hold the parity of a step. It replaces an earlier one of the same step."""
        with self._lock:
            other_sets = [other for other in self._sets if other.key != parity.key]
            self._sets = [*other_sets, parity]

    def delete(self, keys: Collection[StepKey]) -> None:
        """Release the parity of these snapshots. The next parity reuses the memory."""
        with self._lock:
            kept = []
            for parity in self._sets:
                if parity.key not in keys:
                    kept.append(parity)
                else:
                    self._spare = list(parity.files.values())
            self._sets = kept

    def clear(self) -> None:
        """Free all parity, and its memory."""
        with self._lock:
            self._sets = []
            self._spare = []

    @property
    def size_bytes(self) -> int:
        """Return the bytes of memory that it takes."""
        with self._lock:
            return sum(parity.size_bytes for parity in self._sets) + sum(map(len, self._spare))

    def inventory(self) -> list[HeldParity]:
        """Return the held parity of each step."""
        with self._lock:
            return [parity.description for parity in self._sets]

    def keys(self) -> tuple[StepKey, ...]:
        """Return the snapshots whose parity is held, the newest first."""
        with self._lock:
            return tuple(sorted((parity.key for parity in self._sets), reverse=True))

    def find(self, start: str, step: int) -> ParitySet | None:
        """Return the parity of a step; None if it is not held."""
        with self._lock:
            for parity in self._sets:
                if (parity.description.start, parity.description.step) == (start, step):
                    return parity
        return None


def _zero(buffer: memoryview) -> Iterator[int]:
    """Write zeros, which populates the pages. Yields the bytes of each piece once they are written."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    for offset in range(0, len(buffer), _PIECE_BYTES):
        piece_bytes = min(_PIECE_BYTES, len(buffer) - offset)
        ctypes.memset(address + offset, 0, piece_bytes)
        yield piece_bytes


@dataclass
class ParityContext:
    """The data of a start for the tasks of redundancy. ``settings.redundancy`` is set."""

    settings: JobSettings
    peers: PeerSettings | None
    """The other nodes; None if they are not known yet."""
    store: ParityStore
    pace: RateLimiter
    """Limit for the bytes read from other nodes. See ``RedundancySettings.max_bytes_per_s``."""
    is_failing: bool = False
    """True from a failed task until one succeeds: only the first failure is a warning."""

    @property
    def redundancy(self) -> RedundancySettings:
        """Return the settings of redundancy."""
        assert self.settings.redundancy is not None
        return self.settings.redundancy


def run_parity_task(task: Task, context: ParityContext, slots: NodeSlots, control: TaskControl) -> TaskEnded:
    """Do a task of redundancy and return how it ended. Blocks. Never raises.

    Args:
        task: the task.
        context: the start.
        slots: the slots of this node, by local rank and slot id.
        control: ends the task when it was cancelled.
    """
    try:
        ended = _run(task, context, slots, control)
        if isinstance(task, WriteLevel):
            context.is_failing = False
        return ended
    except (CaptureAborted, PeerRefused) as error:
        logger.info("%s: %s", _purpose(task), error)
        return Missed(task.number, str(error))
    except Exception as error:  # noqa: BLE001  the last handler of the thread
        text = str(error) if isinstance(error, LazySnapError) else f"{type(error).__name__}: {error}"
        level = logging.INFO if context.is_failing else logging.WARNING
        context.is_failing = True
        logger.log(level, "%s, tried again: %s", _purpose(task), text)
        return Failed(task.number, text)


def _purpose(task: Task) -> str:
    """Return the text for what is not protected, for a message about a task that did not end well."""
    if isinstance(task, WriteLevel):
        return f"step {task.key.step} is not protected by other nodes"
    return "nothing is protected by other nodes"


def _run(task: Task, context: ParityContext, slots: NodeSlots, control: TaskControl) -> TaskEnded:
    match task:
        case ListLevel():
            return Listed(task.number, context.store.keys())
        case WriteLevel():
            return _protect(task, context, slots, control)
        case DeleteFiles():
            context.store.delete(task.keys)
        case ProbeLevel():
            group = GroupReader(context, control)
            try:
                group.connect()
            finally:
                group.close()
    return TaskEnded(task.number)


def _protect(task: WriteLevel, context: ParityContext, slots: NodeSlots, control: TaskControl) -> StepStored:
    faults.point("keeper.parity.begin")
    began = time.monotonic()
    readers = open_captures(task, slots, control.beat)
    own_part = NodePart(readers, context.redundancy.most_lost)
    group = GroupReader(context, control)
    try:
        description = group.describe(readers, own_part)
        parity = group.encode(description)
    finally:
        group.close()
    # Nothing else here reads the own part, and it may be the last one to become whole.
    own_part.finish()
    faults.point("keeper.parity.done")
    control.beat()
    context.store.add(parity)
    return StepStored(task.number, written_bytes=parity.size_bytes, seconds=time.monotonic() - began)


class GroupReader:
    """Reads the parts of the other nodes of a group, for one task."""

    def __init__(self, context: ParityContext, control: TaskControl) -> None:
        redundancy = context.redundancy
        self._context = context
        self._redundancy = redundancy
        self._control = control
        self._group = Group(tuple(redundancy.members), redundancy.parity)
        self._position = redundancy.members.index(context.settings.node)
        self._others = [position for position in range(len(redundancy.members)) if position != self._position]
        self._readers: dict[int, PeerReader] = {}
        """By position."""
        for position in self._others:
            self._readers[position] = self._reader(redundancy.members[position])

    def _reader(self, node: int) -> PeerReader:
        peers = self._context.peers
        if peers is None:
            raise KeeperError("the other nodes of this start are not known yet")
        address = peers.addresses[node]
        if not address.port:
            raise KeeperError(f"node {node} has no address at which others reach its keeper")
        return PeerReader(peers.secret, (address.host, address.port), beat=self._control.beat)

    def connect(self) -> None:
        """Connect to all nodes of the group. Blocks. Raises: LazySnapError, naming a node that cannot be reached."""
        self._of_all(lambda position: self._readers[position].connect())

    def close(self) -> None:
        """End all connections."""
        for reader in self._readers.values():
            reader.close()

    def describe(self, captures: Sequence[CaptureReader], own_part: NodePart) -> HeldParity:
        """Return the facts about the parity of a step, once all nodes have begun to capture it.

        Args:
            captures: the captures of this node.
            own_part: the part made of them.

        Blocks. Raises: LazySnapError.
        """
        meta = captures[0].meta
        subject = PartOf(meta.start, meta.step, self._redundancy.most_lost)
        described = self._of_all(partial(self._describe, subject))
        members = dict(zip(self._others, described, strict=True))
        members[self._position] = HeldMember([rank for rank, *_ in own_part.index], own_part.size_bytes)
        return HeldParity(
            meta.run_id,
            meta.start,
            meta.step,
            meta.world_size,
            members=[members[position] for position in sorted(members)],
            parity=self._redundancy.parity,
            most_lost=self._redundancy.most_lost,
            block_bytes=self._redundancy.block_bytes,
            position=self._position,
        )

    def _describe(self, subject: PartOf, position: int) -> HeldMember:
        reader = self._readers[position]
        size_bytes = reader.size(subject, patience_s=AHEAD_S)

        def read(offset: int, length: int) -> memoryview:
            out = memoryview(bytearray(length))
            reader.read_into(subject, offset, out)
            return out

        return HeldMember([rank for rank, *_ in read_index(read, size_bytes)], size_bytes)

    def encode(self, description: HeldParity) -> ParitySet:
        """Return the parity that this node must hold. Blocks. Raises: LazySnapError."""
        pieces = Pieces(
            self._group, tuple(member.size_bytes for member in description.members), description.block_bytes
        )
        stripe_rows = self._group.parities(self._position)
        files = self._context.store.buffers(len(stripe_rows), pieces.stripe_bytes, self._control.beat)
        stripes = []
        for (number, row), file in zip(stripe_rows, files, strict=True):
            stripes.append(_Stripe(pieces, number, row, file))
        subject = PartOf(description.start, description.step, description.most_lost)
        self._of_all(partial(self._add_pieces, subject, stripes))
        for stripe in stripes:
            stripe.finish(self._control.beat)
        return ParitySet(description, {stripe.number: stripe.file for stripe in stripes})

    def _add_pieces(self, subject: PartOf, stripes: "Sequence[_Stripe]", position: int) -> None:
        """Add all required pieces of one node."""
        reader = self._readers[position]
        buffer = map_anonymous(self._redundancy.block_bytes)
        for stripe in stripes:
            for block in range(stripe.num_blocks(position)):
                self._control.beat()
                offset, length = stripe.span(position, block)
                self._context.pace.wait_for(length, self._control.beat)
                checksum = reader.read_into(subject, offset, buffer[:length])
                stripe.add(position, block, buffer[:length], checksum)
                self._control.count(length)
        reader.finish(subject)

    def _of_all(self, ask: Callable[[int], Result]) -> list[Result]:
        """Ask every other node, each on a thread. The first failure cancels the others, so that it is reported at
        once.
        """
        tasks = [partial(self._ask, ask, position) for position in self._others]
        return in_threads(tasks, len(self._others), "lazysnap-parity", self._interrupt)

    def _ask(self, ask: Callable[[int], Result], position: int) -> Result:
        try:
            return ask(position)
        except (KeeperError, PeerRefused) as error:
            raise type(error)(f"node {self._redundancy.members[position]}: {error}") from error

    def _interrupt(self) -> None:
        for reader in self._readers.values():
            reader.interrupt()


class _Stripe:
    """The file of a stripe that several threads fill."""

    def __init__(self, pieces: Pieces, number: int, row: int, file: memoryview) -> None:
        """``row``: the index of this parity in the stripe."""
        self.number = number
        self.file = file
        self._pieces = pieces
        self._row = row
        self._data = pieces.group.data(number)
        self._code = Code(pieces.group.pieces, pieces.group.parity)
        self._lock = threading.Lock()

    def num_blocks(self, position: int) -> int:
        """Return the number of blocks of that member's piece, without those after the end of its part."""
        if position not in self._data:
            return 0
        return sum(self.span(position, block)[1] > 0 for block in range(self._pieces.num_blocks))

    def span(self, position: int, block: int) -> tuple[int, int]:
        """See ``Pieces.span``."""
        return self._pieces.span(position, self.number, block)

    def add(self, position: int, block: int, data: memoryview, checksum: int) -> None:
        """Add a block of that member's piece."""
        column = self._data.index(position)
        start = block * self._pieces.block_bytes
        with self._lock:
            multiply_add(self._code.weight(self._row, column), data, self.file[start : start + len(data)])
        self._set_checksum(column, block, checksum)

    def _set_checksum(self, column: int, block: int, checksum: int) -> None:
        offset = self._pieces.checksum_at(column, block)
        self.file[offset : offset + CHECKSUM_BYTES] = checksum.to_bytes(CHECKSUM_BYTES, "little")

    def finish(self, beat: Callable[[], None]) -> None:
        """Record the checksums of the parity after all blocks were added. ``beat`` is called before each one."""
        block_bytes = self._pieces.block_bytes
        for block in range(self._pieces.num_blocks):
            beat()
            parity = self.file[block * block_bytes : (block + 1) * block_bytes]
            self._set_checksum(self._pieces.group.pieces, block, xxhash.xxh3_64_intdigest(parity))
