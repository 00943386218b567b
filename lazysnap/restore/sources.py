"""All sources of one restart on one rank: what is open, and what turned out to be unusable."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lazysnap.errors import FormatError
from lazysnap.levels.blocks import Blocks, Wanted
from lazysnap.resolver import Entry, Item
from lazysnap.restore.level import Level
from lazysnap.restore.lost_parts import PARITY
from lazysnap.restore.node_memory import NodeMemory
from lazysnap.restore.parity import Parity
from lazysnap.restore.peer_memory import PeerMemory
from lazysnap.restore.snapshot import MEMORY
from lazysnap.snapshots.reader import OpenShard, read


class Source(Protocol):
    """Memory of one rank of this node, memory of other nodes, parity, or a level. Each has a deadline."""

    def open(self, item: Item, where: str) -> OpenShard:
        """Return the bytes of a shard in blocks that are verified when they are read, its header read and verified.

        ``where``: the shard, for messages.
        Blocks. Raises: LazySnapError; FileNotFoundError; whatever the storage's package raises.
        """
        ...


@dataclass(frozen=True)
class Failure:
    """Why something cannot be read."""

    text: str
    item: Item | None = None
    """The shard that is not tried again; ``None``: there is nothing else to try."""


@dataclass(frozen=True)
class Places:
    """The sources themselves."""

    memory: NodeMemory
    peers: PeerMemory
    parity: Parity
    levels: Mapping[str, Level]

    def source(self, item: Item) -> Source:
        """Return the source that listed it."""
        if item.level == PARITY:
            return self.parity
        if item.level != MEMORY:
            return self.levels[item.level]
        if item.node not in (None, self.memory.node):
            return self.peers
        return self.memory.rank(int(item.location.split("/")[0]))


class Sources:
    """Opens and reads shards. Errors become values: a ``Failure``, after which another source is tried.

    Not thread-safe.
    """

    def __init__(self, places: Places, stack: contextlib.ExitStack, note: Callable[[str], None]) -> None:
        """``stack`` closes what is opened. ``note`` receives a line for each skipped source of frozen tensors."""
        self._places = places
        self._stack = stack
        self._note = note
        self.failures: dict[Item, str] = {}
        """Items that are not tried again, and why."""
        self.has_vanished = False
        """True if something that was listed is not there any more."""
        self._opened: dict[Item, OpenShard] = {}
        self._items: dict[Blocks, Item] = {}

    def forget(self) -> None:
        """Open everything anew: the levels are listed again, and what failed may be there by now."""
        self.failures.clear()
        self._opened.clear()
        self._items.clear()
        for level in self._places.levels.values():
            level.forget()
        self.has_vanished = False

    def open(self, item: Item) -> "OpenShard | Failure":
        """Open a shard, or frozen tensors. Blocks."""
        if item in self.failures:
            return Failure(self.failures[item], item)
        if item not in self._opened:
            where = _where(item)
            try:
                shard = self._places.source(item).open(item, where)
                self._stack.callback(shard.blocks.close)
                _compare(item, shard, where)
            except Exception as error:  # noqa: BLE001  storage packages may raise anything
                return self.refuse(item, error)
            self._opened[item] = shard
            self._items[shard.blocks] = item
        return self._opened[item]

    def open_any(self, items: Sequence[Item], what: str) -> "OpenShard | Failure":
        """Open the first of several equal ones that can be opened. Blocks."""
        for item in items:
            found = self.open(item)
            if isinstance(found, OpenShard):
                return found
        reasons = "; ".join(self.failures[item] for item in items) or "they are not there"
        return Failure(f"{what} are nowhere whole: {reasons}")

    def read(self, shard: OpenShard, wanted: Sequence[Wanted]) -> Failure | None:
        """Read what is wanted of a shard that was opened here, verified. Blocks."""
        item = self._items[shard.blocks]
        jobs = {shard: wanted}
        try:
            source = self._places.source(item)
            if isinstance(source, Level):
                source.watch(f"reading {shard.where}", lambda beat: read(jobs, progress=lambda num_bytes: beat()))
            else:
                read(jobs)
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            return self.refuse(item, error)
        return None

    def refuse(self, item: Item, error: "Exception | str") -> Failure:
        """Record that an item cannot be used: it is not tried again."""
        self._opened.pop(item, None)
        text = self.failures[item] = str(error) or repr(error)  # an empty text would pass for no failure
        self.has_vanished = self.has_vanished or isinstance(error, FileNotFoundError)
        if not isinstance(item, Entry):
            self._note(f"{_where(item)} passed over: {text}")
        return Failure(text, item)


def _where(item: Item) -> str:
    if isinstance(item, Entry):
        return f"step {item.step} of rank {item.rank} at {item.level}"
    return f"frozen tensors {item.digest} at {item.level}"


def _compare(item: Item, shard: OpenShard, where: str) -> None:
    """Raises: FormatError, if a shard is of another snapshot than was listed."""
    meta = shard.meta
    if isinstance(item, Entry) and (meta.run_id, meta.step, meta.rank, meta.world_size, meta.start) != (
        item.run_id,
        item.step,
        item.rank,
        item.world_size,
        item.start,
    ):
        raise FormatError(f"{where}: holds step {meta.step} of rank {meta.rank} of {meta.world_size}")
