"""Shards of lost nodes, computed from the rest of their groups."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import xxhash

from lazysnap import faults
from lazysnap.errors import FormatError, LazySnapError
from lazysnap.keeper.node_part import find_shard
from lazysnap.levels.blocks import Blocks, Buffers
from lazysnap.parity.codes import Code, multiply_add
from lazysnap.parity.groups import CHECKSUM_BYTES
from lazysnap.peers.messages import ParityOf, PartOf
from lazysnap.resolver import Entry
from lazysnap.restore.lost_parts import LostPart
from lazysnap.restore.peer_memory import PeerFile, PeerMemory
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.reader import OpenShard, open_shard

logger = logging.getLogger("lazysnap.engine")


class Parity:
    """Shards that are computed from parity. See ``restore.sources.Source``."""

    def __init__(self, peers: PeerMemory) -> None:
        self._peers = peers
        self.lost: Sequence[LostPart] = ()
        """The parts that entries of parity refer to, by their number."""

    def open(self, entry: Entry, where: str) -> OpenShard:
        """See ``Source``. Computes the shard's metadata and header."""
        (number,) = entry.location
        lost = self.lost[number]
        part = PartOf(lost.start, lost.step, lost.most_lost)
        parts = {}
        for position, node in lost.parts.items():
            parts[position] = self._peers.file(node, part)
        parities = {}
        for position, node in lost.parities.items():
            files = {}
            for stripe, _ in lost.pieces.group.parities(position):
                files[stripe] = self._peers.file(node, ParityOf(lost.start, lost.step, stripe))
            parities[position] = files
        blocks = ParityBlocks(lost, parts, parities, where)
        text, offset, size_bytes = find_shard(blocks.view, blocks.size_bytes, entry.rank)
        return open_shard(CaptureMeta.from_bytes(text, where), blocks, offset, size_bytes)


@dataclass(frozen=True)
class _Piece:
    """One available piece of a stripe."""

    number: int
    file: PeerFile
    name: str


class ParityBlocks(Blocks):
    """The part of a lost node, computed from the rest of its group. See ``levels.blocks.Blocks``.

    Each block is compared with the checksum of its owner from the time of the parity. A piece that cannot be read, or
    whose bytes have changed, is no longer used if enough others are available.
    """

    threads = 4

    def __init__(
        self, lost: LostPart, parts: Mapping[int, PeerFile], parities: Mapping[int, dict[int, PeerFile]], where: str
    ) -> None:
        """``parts``: by position; ``parities``: by position and stripe."""
        self.where = where
        self._lost = lost
        self._parts = parts
        self._parities = parities
        self.size_bytes = lost.pieces.sizes[lost.position]
        self.block_bytes = lost.pieces.block_bytes
        self._code = Code(lost.pieces.group.pieces, lost.pieces.group.parity)
        self._bad: dict[PeerFile, str] = {}
        """Excluded pieces, with the reason."""
        self._tables: dict[PeerFile, memoryview] = {}
        """The checksums of each holder of parity, read at the first use."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def block(self, index: int, buffers: Buffers) -> Iterator[memoryview]:
        """See ``Blocks``."""
        # A part ends within a piece; zeros follow.
        stripe, block = self._lost.pieces.locate(self._lost.position, index)
        length = self._lost.pieces.span(self._lost.position, stripe, block)[1]
        with buffers.buffer(self.block_bytes) as out, buffers.buffer(self.block_bytes) as spare:
            self._compute(stripe, block, out, spare, length)
            yield out[:length]

    def _compute(self, stripe: int, block: int, out: memoryview, spare: memoryview, length: int) -> None:
        """Blocks. Raises: FormatError."""
        faults.point("restore.compute")
        column = self._lost.pieces.group.data(stripe).index(self._lost.position)
        while True:
            chosen = list(islice(self._usable(stripe), self._code.pieces))
            if len(chosen) < self._code.pieces:
                reasons = "; ".join(list(self._bad.values())) or "too few"
                raise FormatError(f"{self.where}: not enough of its group is left: {reasons}")
            weights = self._code.recovery(column, tuple(piece.number for piece in chosen))
            bad, reason = self._sum(stripe, block, list(zip(chosen, weights, strict=True)), out, spare)
            if bad is None:
                got = xxhash.xxh3_64_intdigest(out[:length])
                if got == self._checksum(stripe, block, column):
                    return
                # All read pieces are unchanged, so the parity is of other data.
                bad = chosen[-1]
                reason = f"what it gives has checksum {got:016x}"
            logger.warning("%s: %s: %s", self.where, bad.name, reason)
            self._bad[bad.file] = f"{bad.name}: {reason}"

    def _usable(self, stripe: int) -> Iterator[_Piece]:
        """Yield the pieces of a stripe that exist and are not known to be bad: data first."""
        group = self._lost.pieces.group
        for column, position in enumerate(group.data(stripe)):
            if position in self._parts and self._parts[position] not in self._bad:
                yield _Piece(column, self._parts[position], f"memory of {self._lost.parts[position].split('/')[0]}")
        for row, position in enumerate(group.holders(stripe)):
            file = self._parities.get(position, {}).get(stripe)
            if file is not None and file not in self._bad:
                yield _Piece(group.pieces + row, file, f"parity at {self._lost.parities[position].split('/')[0]}")

    def _sum(
        self, stripe: int, block: int, weighted: Sequence[tuple[_Piece, int]], out: memoryview, spare: memoryview
    ) -> tuple[_Piece | None, str]:
        """Add the blocks of the pieces. Return the first unusable piece, with the reason."""
        pieces = self._lost.pieces
        group = pieces.group
        is_first = True
        for piece, weight in weighted:
            is_parity = piece.number >= group.pieces
            if is_parity:
                offset = block * self.block_bytes
                length = self.block_bytes
            else:
                offset, length = pieces.span(group.data(stripe)[piece.number], stripe, block)
            if not weight or not length:
                continue
            is_copy = is_first and weight == 1 and length == len(out)
            if is_copy:
                data = out
            else:
                data = spare[:length]
                if is_first:
                    out[:] = bytes(len(out))
            try:
                got = piece.file.read_into(offset, data)
                if is_parity:
                    expected = self._checksum(stripe, block, group.pieces, [piece.file])
                else:
                    expected = self._checksum(stripe, block, piece.number)
            except LazySnapError as error:
                return piece, str(error)
            if got != expected:
                return piece, f"block {block} of stripe {stripe} changed: checksum {got:016x}, was {expected:016x}"
            if not is_copy:
                multiply_add(weight, data, out[:length])
            is_first = False
        return None, ""

    def _checksum(self, stripe: int, block: int, column: int, holders: Sequence[PeerFile] = ()) -> int:
        """Return the checksum of a block that the first of these holders of the stripe (default: all) has.

        Raises: FormatError, if none has it.
        """
        pieces = self._lost.pieces
        reasons = []
        for file in holders or [files[stripe] for files in self._parities.values() if stripe in files]:
            if file in self._bad:
                continue
            try:
                offset = pieces.checksum_at(column, block) - pieces.piece_bytes
                return int.from_bytes(self._table(stripe, file)[offset : offset + CHECKSUM_BYTES], "little")
            except LazySnapError as error:
                reasons.append(str(error))
        raise FormatError(f"{self.where}: its checksums are not available: {'; '.join(reasons)}")

    def _table(self, stripe: int, file: PeerFile) -> memoryview:
        with self._lock:
            if file not in self._tables:
                pieces = self._lost.pieces
                if file.size_bytes != pieces.stripe_bytes:
                    raise FormatError(
                        f"parity of stripe {stripe}: {file.size_bytes} bytes, expected {pieces.stripe_bytes}"
                    )
                self._tables[file] = file.read(pieces.piece_bytes, pieces.stripe_bytes - pieces.piece_bytes)
            return self._tables[file]
