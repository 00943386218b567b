"""Shards in the memory of other nodes: read there, or computed from what is left of their group."""

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

import xxhash

from lazysnap import faults
from lazysnap.errors import LazySnapError, PeerUnreachable, ShardCorrupt
from lazysnap.keeper.node_part import find_shard
from lazysnap.levels.blocks import Blocks, Buffers, VerifiedSource
from lazysnap.levels.source import header_of
from lazysnap.links.client import PeerReader
from lazysnap.links.messages import FrozenOf, ParityOf, PartOf, SlotOf, What
from lazysnap.parity.codes import Code, multiply_add
from lazysnap.parity.pieces import CHECKSUM_BYTES
from lazysnap.ranks.meeting import Meeting
from lazysnap.restore.lost_parts import LostPart
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.reader import OpenShard

logger = logging.getLogger("lazysnap.engine")

_BLOCK_BYTES = 4 << 20
_FRESH_S = 60.0
"""A connection that was idle for longer is not used again: the other side closes it sooner or later."""


class Connections:
    """Connections to the keepers of other nodes, for one restart. An idle one is used again, whatever is read there
    next."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[float, PeerReader]]] = defaultdict(list)
        """Idle connections by node, each with the time since when."""

    @contextlib.contextmanager
    def reader(self, node: str, what: What) -> Iterator[PeerReader]:
        """A connection by which this is read, for one thread. Blocks. Raises: PeerUnreachable; PeerRefused."""
        reader = self._taken(node, what) or PeerReader(self.meeting.secret, self.meeting.reads[node])
        try:
            reader.read_from(what)
            yield reader
        except BaseException:
            reader.close()
            raise
        with self._lock:
            self._idle[node].append((time.monotonic(), reader))

    def _taken(self, node: str, what: What) -> PeerReader | None:
        """An idle connection; if there is one, that by which the same was read."""
        with self._lock:
            fresh = [one for one in self._idle[node] if time.monotonic() - one[0] < _FRESH_S]
            stale = [one for one in self._idle[node] if one not in fresh]
            taken = next((one for one in fresh if one[1].what == what), fresh[-1] if fresh else None)
            self._idle[node] = [one for one in fresh if one is not taken]
        for _, reader in stale:
            reader.close()
        return None if taken is None else taken[1]

    def close(self) -> None:
        """End those that are idle; the next read makes others."""
        with self._lock:
            idle = [reader for readers in self._idle.values() for _, reader in readers]
            self._idle.clear()
        for reader in idle:
            reader.close()


class PeerFile:
    """One thing that the keeper of another node lets others read. Thread-safe."""

    def __init__(self, connections: Connections, node: str, what: What) -> None:
        self._connections, self._node, self._what = connections, node, what

    @cached_property
    def size_bytes(self) -> int:
        """Blocks the first time. Raises: PeerUnreachable; PeerRefused."""
        with self._connections.reader(self._node, self._what) as reader:
            return reader.size_bytes

    def read_into(self, offset: int, out: memoryview) -> int:
        """See ``PeerReader.read_into``."""
        with self._connections.reader(self._node, self._what) as reader:
            return reader.read_into(offset, out)

    def read(self, offset: int, length: int) -> memoryview:
        """Some bytes. Blocks. Raises: as ``read_into``."""
        out = memoryview(bytearray(length))
        for at in range(0, length, _BLOCK_BYTES):
            self.read_into(offset + at, out[at : at + _BLOCK_BYTES])
        return out


class PeerBlocks:
    """See ``levels.blocks.Blocks``. What arrives is compared with what the other keeper has."""

    threads = 2
    block_bytes = _BLOCK_BYTES

    def __init__(self, file: PeerFile, where: str) -> None:
        self.where = where
        self.size_bytes = file.size_bytes
        self._file = file

    @contextlib.contextmanager
    def block(self, index: int, buffers: Buffers, *, verify: bool = True) -> Iterator[memoryview]:
        """See ``Blocks``."""
        start = index * self.block_bytes
        with buffers.buffer(min(self.block_bytes, self.size_bytes - start)) as data:
            self._file.read_into(start, data)
            yield data

    def rest(self) -> None:
        """Connections are closed when the restart is over."""

    def close(self) -> None:
        """Connections are closed when the restart is over."""


class _Source:
    """One piece of a stripe that is left."""

    def __init__(self, piece: int, file: PeerFile, name: str) -> None:
        self.piece, self.file, self.name = piece, file, name


class ParityBlocks:
    """The part of a lost node, computed from what is left of its group. See ``levels.blocks.Blocks``.

    Each block is compared with the checksum that its owner gave when parity was made of it. A source that does not
    answer, or whose bytes are others than then, is passed over, as long as there are enough.
    """

    threads = 4

    def __init__(
        self, lost: LostPart, parts: Mapping[int, PeerFile], parities: Mapping[int, dict[int, PeerFile]], where: str
    ) -> None:
        """``parts``: by position; ``parities``: by position and stripe."""
        self.where = where
        self._lost, self._parts, self._parities = lost, parts, parities
        self.size_bytes = lost.pieces.sizes[lost.position]
        self.block_bytes = lost.pieces.block_bytes
        self._code = Code(lost.pieces.group.pieces, lost.pieces.group.parity)
        self._bad: dict[PeerFile, str] = {}
        """Sources that are passed over, and why."""
        self._known: dict[PeerFile, memoryview] = {}
        """The checksums that each holder knows."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def block(self, index: int, buffers: Buffers, *, verify: bool = True) -> Iterator[memoryview]:
        """See ``Blocks``."""
        # A part ends in the middle of a piece; behind it are zeros.
        stripe, block = self._lost.pieces.locate(self._lost.position, index)
        length = self._lost.pieces.span(self._lost.position, stripe, block)[1]
        with buffers.buffer(self.block_bytes) as out, buffers.buffer(self.block_bytes) as spare:
            self._compute(stripe, block, out, spare, length)
            yield out[:length]

    def _compute(self, stripe: int, block: int, out: memoryview, spare: memoryview, length: int) -> None:
        """Blocks. Raises: ShardCorrupt."""
        faults.point("restore.compute")
        while True:
            chosen = list(islice(self._sources(stripe), self._code.pieces))
            if len(chosen) < self._code.pieces:
                reasons = "; ".join(list(self._bad.values())) or "too few"
                raise ShardCorrupt(f"{self.where}: not enough of its group is left: {reasons}")
            try:
                self._sum(stripe, block, chosen, out, spare)
                expected = self._expected(stripe, block, self._column(stripe, self._lost.position))
                got = xxhash.xxh3_64_intdigest(out[:length])
                if expected != got:
                    # What was read is as it was then, so the parity is of something else.
                    raise _Bad(chosen[-1], f"what it gives has checksum {got:016x}")
                return
            except _Bad as bad:
                logger.warning("%s: %s: %s", self.where, bad.source.name, bad)
                self._bad[bad.source.file] = f"{bad.source.name}: {bad}"

    def _column(self, stripe: int, position: int) -> int:
        return self._lost.pieces.group.data(stripe).index(position)

    def _sources(self, stripe: int) -> Iterator[_Source]:
        """Yield what is left of a stripe and not known to be bad: data first."""
        group = self._lost.pieces.group
        for column, position in enumerate(group.data(stripe)):
            if position in self._parts and self._parts[position] not in self._bad:
                yield _Source(column, self._parts[position], f"memory of {self._lost.parts[position].split('/')[0]}")
        for row, position in enumerate(group.holders(stripe)):
            file = self._parities.get(position, {}).get(stripe)
            if file is not None and file not in self._bad:
                name = f"parity at {self._lost.parities[position].split('/')[0]}"
                yield _Source(group.pieces + row, file, name)

    def _sum(self, stripe: int, block: int, chosen: Sequence[_Source], out: memoryview, spare: memoryview) -> None:
        pieces, group = self._lost.pieces, self._lost.pieces.group
        present = tuple(source.piece for source in chosen)
        weights = self._code.recovery(self._column(stripe, self._lost.position), present)
        is_first = True
        for source, weight in zip(chosen, weights, strict=True):
            is_parity = source.piece >= group.pieces
            if is_parity:
                offset, length = block * self.block_bytes, self.block_bytes
            else:
                offset, length = pieces.span(group.data(stripe)[source.piece], stripe, block)
            if not weight or not length:
                continue
            is_copy = is_first and (weight, length) == (1, len(out))
            if is_first and not is_copy:
                out[:] = bytes(len(out))
            data = out if is_copy else spare[:length]
            column = group.pieces if is_parity else source.piece
            try:
                got = source.file.read_into(offset, data)
                expected = self._expected(stripe, block, column, source.file if is_parity else None)
            except LazySnapError as error:
                raise _Bad(source, str(error)) from error
            if got != expected:
                raise _Bad(
                    source, f"block {block} of stripe {stripe} changed: checksum {got:016x}, was {expected:016x}"
                )
            if not is_copy:
                multiply_add(weight, data, out[:length])
            is_first = False

    def _expected(self, stripe: int, block: int, column: int, holder: PeerFile | None = None) -> int:
        """The checksum of a block, as the holders of the stripe, or that one, know it."""
        pieces = self._lost.pieces
        offset = pieces.checksum_at(column, block) - pieces.piece_bytes
        if holder is not None:
            table = self._table(stripe, holder)
        else:
            files = [files[stripe] for files in self._parities.values() if stripe in files]
            table = self._first_table(stripe, files)
        return int.from_bytes(table[offset : offset + CHECKSUM_BYTES], "little")

    def _first_table(self, stripe: int, files: Sequence[PeerFile]) -> memoryview:
        reasons = []
        for file in files:
            if file in self._bad:
                continue
            try:
                return self._table(stripe, file)
            except LazySnapError as error:
                reasons.append(str(error))
        raise ShardCorrupt(f"{self.where}: its checksums cannot be had: {'; '.join(reasons)}")

    def _table(self, stripe: int, file: PeerFile) -> memoryview:
        with self._lock:
            found = self._known.get(file)
            if found is None:
                pieces = self._lost.pieces
                if file.size_bytes != pieces.stripe_bytes:
                    raise ShardCorrupt(
                        f"parity of stripe {stripe}: {file.size_bytes} bytes, expected {pieces.stripe_bytes}"
                    )
                found = self._known[file] = file.read(pieces.piece_bytes, pieces.stripe_bytes - pieces.piece_bytes)
            return found

    def rest(self) -> None:
        """Connections are closed when the restart is over."""

    def close(self) -> None:
        """Connections are closed when the restart is over."""


class _Bad(Exception):
    """A source that is passed over from now on."""

    def __init__(self, source: _Source, text: str) -> None:
        super().__init__(text)
        self.source = source


class PeerShards:
    """Opens them, for one restart. Not thread-safe."""

    def __init__(self, meeting: Meeting) -> None:
        self._connections = Connections(meeting)
        self._lost: list[LostPart] = []

    def meet(self, meeting: Meeting) -> None:
        """Other nodes are reached by this."""
        self._connections.meeting = meeting

    def reaches(self, node: str | None) -> bool:
        """True if the keeper of that node lets this process read."""
        return node in self._connections.meeting.reads

    def know(self, lost: list[LostPart]) -> None:
        """Add the parts that entries of parity refer to."""
        self._lost = lost

    def shard(self, node: str, local_rank: int, sequence: int, where: str) -> OpenShard:
        """A capture in the memory of another node. Blocks. Raises: LazySnapError."""
        return self._slot(node, SlotOf(local_rank, sequence, "meta"), SlotOf(local_rank, sequence, "image"), where)

    def frozen(self, node: str, digest: str, where: str) -> OpenShard:
        """Frozen tensors in the memory of another node. Blocks. Raises: LazySnapError."""
        return self._slot(node, FrozenOf(digest, "meta"), FrozenOf(digest, "image"), where)

    def _slot(self, node: str, meta: What, image: What, where: str) -> OpenShard:
        file = self._file(node, meta)
        text = bytes(file.read(0, file.size_bytes))
        blocks = PeerBlocks(self._file(node, image), where)
        return _opened(CaptureMeta.from_bytes(text, where), _whole(blocks), blocks, 0, blocks.size_bytes)

    def computed(self, number: int, rank: int, where: str) -> OpenShard:
        """A shard of a lost part. Blocks: computes its metadata and its header. Raises: LazySnapError."""
        lost = self._lost[number]
        what = PartOf(lost.start, lost.step, lost.most_lost)
        parts = {position: self._file(node, what) for position, node in lost.parts.items()}
        parities = {
            position: {
                stripe: self._file(node, ParityOf(lost.start, lost.step, stripe))
                for stripe, _ in lost.pieces.group.held(position)
            }
            for position, node in lost.parities.items()
        }
        blocks = ParityBlocks(lost, parts, parities, where)
        whole = _whole(blocks)
        text, offset, size = find_shard(whole.view, blocks.size_bytes, rank)
        return _opened(CaptureMeta.from_bytes(text, where), whole, blocks, offset, size)

    def _file(self, node: str, what: What) -> PeerFile:
        if not self.reaches(node):
            raise PeerUnreachable(f"the keeper of {node.split('/')[0]} cannot be reached")
        return PeerFile(self._connections, node, what)

    def close(self) -> None:
        """End all connections; what was opened makes others, if it is read again."""
        self._connections.close()


def _opened(meta: CaptureMeta, whole: VerifiedSource, blocks: Blocks, offset: int, size_bytes: int) -> OpenShard:
    header = header_of(whole, offset, size_bytes)
    return OpenShard(meta.rank, meta, Layout.parse(header, size_bytes, blocks.where), blocks, offset)


def _whole(blocks: Blocks) -> VerifiedSource:
    return VerifiedSource(blocks, lambda count: None)
