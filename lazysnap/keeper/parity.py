"""The parity that a keeper holds for the other nodes of its group, and how it is computed out of their memory.

One thread per node reads its pieces block by block, as its captures fill, and adds each block to the parity. So links
and processor work at the same time. Reading takes one block of memory per node.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import xxhash

from lazysnap.errors import LazySnapError
from lazysnap.keeper.held import HeldMember, HeldParity
from lazysnap.keeper.node_part import open_part, read_index
from lazysnap.keeper.node_slots import NodeSlots
from lazysnap.keeper.protocol import Parity, Run
from lazysnap.levels.source import MemorySource, map_anonymous
from lazysnap.levels.threads import in_threads
from lazysnap.levels.watched import RateLimiter
from lazysnap.links.client import PeerReader
from lazysnap.links.messages import PartOf
from lazysnap.links.secret import Secret
from lazysnap.memory.budget import NODE
from lazysnap.memory.failures import CaptureAborted
from lazysnap.parity.codes import Code, multiply_add
from lazysnap.parity.groups import Group
from lazysnap.parity.pieces import CHECKSUM_BYTES, Pieces
from lazysnap.topology import Team


@dataclass(frozen=True, eq=False)
class ParitySet:
    """The parity of one step."""

    held: HeldParity
    files: dict[int, memoryview]
    """Stripes by number; see ``parity.pieces``."""


class ParityStore:
    """Thread-safe. It outlasts starts: what an earlier one protected stays until this one has protected a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sets: list[ParitySet] = []
        self._spare: list[memoryview] = []

    def buffers(self, count: int, size_bytes: int) -> list[memoryview]:
        """Zeroed memory for the files of that many stripes. Blocks. Raises: MemoryBoundExceeded."""
        with self._lock:
            spare, self._spare = self._spare, []
        found = [buffer for buffer in spare if len(buffer) == size_bytes][:count]
        for buffer in found:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), 0, size_bytes)
        del spare
        missing = count - len(found)
        if missing:
            NODE.check(missing * size_bytes, "parity for other nodes")
        return found + [map_anonymous(size_bytes) for _ in range(missing)]

    def add(self, done: ParitySet) -> None:
        """Parity of a step is whole."""
        with self._lock:
            self._sets.append(done)

    def keep(self, stays: Callable[[HeldParity], bool]) -> list[HeldParity]:
        """Release all parity but that for which ``stays`` is true; the parity that is left."""
        with self._lock:
            kept = [one for one in self._sets if stays(one.held)]
            gone = [one for one in self._sets if one not in kept]
            self._sets = kept
            if gone:
                self._spare = [buffer for one in gone for buffer in one.files.values()]
            return [one.held for one in kept]

    def clear(self) -> None:
        """Release all parity: no restart needs it."""
        with self._lock:
            self._sets, self._spare = [], []

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that it takes."""
        with self._lock:
            return sum(len(buffer) for one in self._sets for buffer in one.files.values()) + sum(map(len, self._spare))

    def inventory(self) -> list[HeldParity]:
        """The parity of each step that is held."""
        with self._lock:
            return [one.held for one in self._sets]

    def source(self, start: str, step: int, stripe: int) -> MemorySource:
        """The file of a stripe. Raises: CaptureAborted, if it is not there."""
        with self._lock:
            found = next((one for one in self._sets if (one.held.start, one.held.step) == (start, step)), None)
        if found is None or stripe not in found.files:
            raise CaptureAborted(f"no parity of stripe {stripe} of step {step} of start {start} is held here")
        return MemorySource(found.files[stripe], len(found.files[stripe]))


Result = TypeVar("Result")
_FRESH_S = 60.0
"""Connections that were not used for longer are made anew: the other side closes what nobody uses."""


class Encoding:
    """Computes the parity of one node. Not thread-safe."""

    def __init__(self, parity: Parity, run: Run, team: Team, secret: Secret, pace: RateLimiter) -> None:
        self._parity, self._run, self._secret, self._pace = parity, run, secret, pace
        self._world_size = team.world_size
        self._group = Group(tuple(number for number, _, _ in parity.members), parity.parity)
        self._position = self._group.members.index(team.node)
        self._readers: dict[int, PeerReader] = {}
        """The peers by position."""
        self._used_at = 0.0

    @property
    def _others(self) -> list[int]:
        return [position for position in range(len(self._group.members)) if position != self._position]

    def connect(self) -> None:
        """Reach all of the group. Blocks. Raises: LazySnapError, naming a node that cannot be reached."""
        if time.monotonic() - self._used_at > _FRESH_S:
            self.close()
        self._used_at = time.monotonic()
        in_threads([partial(self._reach, at) for at in self._others], len(self._others), "lazysnap-parity")

    def _reach(self, position: int) -> None:
        if position in self._readers:
            return
        node, host, port = self._parity.members[position]
        try:
            self._readers[position] = PeerReader(self._secret, (host, port))
        except LazySnapError as error:
            raise type(error)(f"node {node}: {error}") from error

    def interrupt(self) -> None:
        """Reads that are in progress fail at once; ``close`` must follow. From any thread."""
        for reader in list(self._readers.values()):
            reader.interrupt()

    def close(self) -> None:
        """End all connections; ``connect`` makes new ones."""
        while self._readers:
            self._readers.popitem()[1].close()

    def encode(self, step: int, store: ParityStore, slots: NodeSlots, check: Callable[[], None]) -> ParitySet:
        """Return the parity of that step. Blocks. Raises: LazySnapError; what ``check`` raises, which ends the work.

        ``check`` is called for each block, and while bytes are missing.
        """
        self.connect()
        opened = self._of_all(lambda position: self._open(position, step))
        own = open_part(slots, step, self._parity.most_lost, check)
        members = dict(zip(self._others, opened, strict=True))
        members[self._position] = _member(own.view, own.size_bytes)
        held = HeldParity(
            self._run.run_id,
            self._run.start,
            step,
            self._world_size,
            members=[members[position] for position in sorted(members)],
            parity=self._parity.parity,
            most_lost=self._parity.most_lost,
            block_bytes=self._parity.block_bytes,
            position=self._position,
        )
        pieces = Pieces(self._group, tuple(member.size_bytes for member in held.members), held.block_bytes)
        stripes = self._group.held(self._position)
        files = store.buffers(len(stripes), pieces.stripe_bytes)
        sums = [_Stripe(pieces, stripe, row, file) for (stripe, row), file in zip(stripes, files, strict=True)]
        self._of_all(lambda position: self._read(position, sums, check))
        own.finish()  # nobody here reads it, and it may be the last one to be whole
        for one in sums:
            one.finish()
        return ParitySet(held, {one.stripe: one.file for one in sums})

    def _of_all(self, ask: Callable[[int], Result]) -> list[Result]:
        """Ask every other node, each on a thread. The first failure ends the others: nobody delays its report."""
        tasks = [partial(ask, position) for position in self._others]
        return in_threads(tasks, len(self._others), "lazysnap-parity", self.interrupt)

    def _open(self, position: int, step: int) -> HeldMember:
        reader = self._readers[position]
        size = reader.open(PartOf(self._run.start, step, self._parity.most_lost))

        def read(offset: int, length: int) -> memoryview:
            out = memoryview(bytearray(length))
            reader.read_into(offset, out)
            return out

        return _member(read, size)

    def _read(self, position: int, stripes: "Sequence[_Stripe]", check: Callable[[], None]) -> None:
        """All that is wanted of one node."""
        reader, buffer = self._readers[position], map_anonymous(self._parity.block_bytes)
        for stripe in stripes:
            for block in range(stripe.num_blocks(position)):
                check()
                offset, length = stripe.span(position, block)
                self._pace.take(length, check)
                checksum = reader.read_into(offset, buffer[:length])
                stripe.add(position, block, buffer[:length], checksum)
        reader.finish()


class _Stripe:
    """The file of a stripe that is being filled, by several threads."""

    def __init__(self, pieces: Pieces, stripe: int, row: int, file: memoryview) -> None:
        self.stripe, self.file = stripe, file
        self._pieces, self._row = pieces, row
        self._data = pieces.group.data(stripe)
        self._code = Code(pieces.group.pieces, pieces.group.parity)
        self._lock = threading.Lock()

    def num_blocks(self, position: int) -> int:
        """Return the bytes of that member's piece here, without zeros behind its end."""
        if position not in self._data:
            return 0
        return sum(self.span(position, block)[1] > 0 for block in range(self._pieces.num_blocks))

    def span(self, position: int, block: int) -> tuple[int, int]:
        """See ``Pieces.span``."""
        return self._pieces.span(position, self.stripe, block)

    def add(self, position: int, block: int, data: memoryview, checksum: int) -> None:
        """A block of that member's piece is here."""
        column, start = self._data.index(position), block * self._pieces.block_bytes
        with self._lock:
            multiply_add(self._code.weight(self._row, column), data, self.file[start : start + len(data)])
        self._note(column, block, checksum)

    def _note(self, column: int, block: int, checksum: int) -> None:
        at = self._pieces.checksum_at(column, block)
        self.file[at : at + CHECKSUM_BYTES] = checksum.to_bytes(CHECKSUM_BYTES, "little")

    def finish(self) -> None:
        """All blocks are in."""
        size = self._pieces.block_bytes
        for block in range(self._pieces.num_blocks):
            parity = self.file[block * size : (block + 1) * size]
            self._note(self._pieces.group.pieces, block, xxhash.xxh3_64_intdigest(parity))


def _member(read: Callable[[int, int], memoryview], size_bytes: int) -> HeldMember:
    entries = read_index(read, size_bytes)
    return HeldMember([rank for rank, *_ in entries], size_bytes, [frozen for *_, frozen in entries])
