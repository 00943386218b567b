"""All sources of one restart on one rank: open shards, and unusable ones."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lazysnap.errors import FormatError
from lazysnap.levels.blocks import Blocks, WantedBytes
from lazysnap.levels.watchdog import Beat
from lazysnap.resolver import MEMORY, PARITY, Entry
from lazysnap.restore.level import Level
from lazysnap.restore.node_memory import NodeMemory
from lazysnap.restore.parity import Parity
from lazysnap.restore.peer_memory import PeerMemory
from lazysnap.snapshots.reader import OpenShard, read
from lazysnap.state.codec import DecoderError


class Source(Protocol):
    """Memory of this node, memory of other nodes, parity, or a level. Each has a deadline."""

    def open(self, entry: Entry, where: str) -> OpenShard:
        """Return the bytes of a shard in blocks that are verified when they are read, its header read and verified.

        ``where``: the shard, for messages.
        Blocks. Raises: LazySnapError; FileNotFoundError; whatever the storage's package raises.
        """
        ...


@dataclass(frozen=True)
class Failure:
    """The reason why something cannot be read."""

    text: str
    may_try_others: bool = False
    """True if another source may have a whole copy of the shard; False if no source would help."""
    is_of_decoder: bool = False
    """True if a decoder of the program raised."""


class Sources:
    """Opens and reads shards. Errors become values (``Failure``), after which another source is tried.

    Not thread-safe.
    """

    def __init__(
        self,
        memory: NodeMemory,
        peers: PeerMemory,
        parity: Parity,
        levels: Mapping[str, Level],
        stack: contextlib.ExitStack,
    ) -> None:
        """``stack``: closes the opened shards."""
        self._memory = memory
        self._peers = peers
        self._parity = parity
        self._levels = levels
        self._stack = stack
        self.failures: dict[Entry, str] = {}
        """Entries that are not retried, with the reason."""
        self.has_vanished = False
        """True if a listed file has vanished."""
        self._opened: dict[Entry, OpenShard] = {}
        self._entries: dict[Blocks, Entry] = {}

    def forget(self) -> None:
        """Forget opened and failed shards: the levels are listed again, and may have changed."""
        self.failures.clear()
        self._opened.clear()
        self._entries.clear()
        for level in self._levels.values():
            level.forget()
        self.has_vanished = False

    def _source(self, entry: Entry) -> Source:
        """Return the source that listed it."""
        if entry.level == PARITY:
            return self._parity
        if entry.level != MEMORY:
            return self._levels[entry.level]
        if entry.node not in (None, self._memory.node):
            return self._peers
        return self._memory

    def open(self, entry: Entry) -> "OpenShard | Failure":
        """Open a shard. Blocks."""
        if entry in self.failures:
            return Failure(self.failures[entry], may_try_others=True)
        if entry not in self._opened:
            where = _where(entry)
            try:
                shard = self._source(entry).open(entry, where)
                self._stack.callback(shard.blocks.close)
                _compare(entry, shard, where)
            except Exception as error:  # noqa: BLE001  storage packages may raise anything
                return self.refuse(entry, error)
            self._opened[entry] = shard
            self._entries[shard.blocks] = entry
        return self._opened[entry]

    def read(self, shard: OpenShard, pieces: Sequence[WantedBytes]) -> Failure | None:
        """Read pieces of a shard that was opened here, and verify them. Blocks."""
        entry = self._entries[shard.blocks]
        jobs = {shard: pieces}

        def read_watched(beat: Beat) -> None:
            read(jobs, progress=lambda num_bytes: beat())

        try:
            source = self._source(entry)
            if isinstance(source, Level):
                source.watch(f"reading {shard.where}", read_watched)
            else:
                read(jobs)
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            return self.refuse(entry, error)
        return None

    def refuse(self, entry: Entry, error: "Exception | str") -> Failure:
        """Record that an entry is unusable and must not be retried."""
        self._opened.pop(entry, None)
        text = str(error) or repr(error)  # an empty text would mean no failure
        self.failures[entry] = text
        if isinstance(error, FileNotFoundError):
            self.has_vanished = True
        return Failure(text, may_try_others=True, is_of_decoder=isinstance(error, DecoderError))


def _where(entry: Entry) -> str:
    return f"step {entry.step} of rank {entry.rank} at {entry.level}"


def _compare(entry: Entry, shard: OpenShard, where: str) -> None:
    """Check that a shard is of the snapshot that was listed. Raises: FormatError."""
    meta = shard.meta
    listed = (entry.run_id, entry.step, entry.rank, entry.world_size, entry.start)
    if listed != (meta.run_id, meta.step, meta.rank, meta.world_size, meta.start):
        raise FormatError(f"{where}: holds step {meta.step} of rank {meta.rank} of {meta.world_size}")
