"""Reads that a keeper serves to other keepers and restarting trainers of its job: slots, its node's part, parity."""

import threading
from collections.abc import Callable, Sequence

from lazysnap.errors import FormatError
from lazysnap.keeper.frozen import FrozenPool
from lazysnap.keeper.local_rank import LocalRank
from lazysnap.keeper.node_part import open_part
from lazysnap.keeper.node_slots import NodeSlots
from lazysnap.keeper.parity import ParityStore
from lazysnap.levels.source import BlockSource, MemorySource
from lazysnap.links.links import Links
from lazysnap.links.listener import listen_when_free
from lazysnap.links.messages import FrozenOf, ParityOf, PartOf, What
from lazysnap.links.secret import Secret
from lazysnap.links.server import PeerServer
from lazysnap.memory.arena import Slot, SlotPhase, Word
from lazysnap.memory.failures import CaptureAborted
from lazysnap.shard.checksum import Checksums


class PeerReads:
    """One server at a time: that of the newest start. Who has the secret of an earlier one is refused."""

    def __init__(
        self, ranks: Callable[[], Sequence[LocalRank | None]], parity: ParityStore, frozen: FrozenPool
    ) -> None:
        """``ranks``: all that the keeper has, by number, also those that the newest start does not have."""
        self._ranks, self._parity, self._frozen = ranks, parity, frozen
        self._compared: set[str] = set()
        """Digests of frozen tensors whose memory has it."""
        self._lock = threading.Lock()
        self._server: PeerServer | None = None

    def serve(self, address: tuple[str, int], secret: Secret) -> None:
        """Serve there, if this is not done already. Raises: ConfigError.

        A port that a keeper before this one still has is waited for, on a thread.
        """
        with self._lock:
            if self._server is not None and self._server.secret == secret:
                return
            self._end()
            server = self._server = PeerServer(secret, self._open)
        try:
            listen_when_free(server.listen, address, lambda: server is self._server)
        except BaseException:
            self.close()
            raise

    def admit(self, links: Links) -> None:
        """Accept these links, if the server of their start is the newest: links of an earlier one are kept."""
        with self._lock:
            if self._server is not None and self._server.secret == links.secret:
                self._server.admit(links)

    def close(self) -> None:
        """Serve nobody any more. Blocks: for a moment."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _check_serving(self) -> None:
        """Raises: CaptureAborted, if the server has ended. Until then the reader's deadline counts."""
        if self._server is None:
            raise CaptureAborted("this keeper serves no reads of this start any more")

    def _open(self, what: What) -> BlockSource:
        """Raises: LazySnapError."""
        if isinstance(what, ParityOf):
            return self._parity.source(what.start, what.step, what.stripe)
        if isinstance(what, PartOf):
            slots = NodeSlots(lambda: self._ranks_of(what.start), what.start)
            return open_part(slots, what.step, what.most_lost, self._check_serving)
        if isinstance(what, FrozenOf):
            return self._frozen_of(what)
        ranks = self._ranks()
        rank = ranks[what.local_rank] if what.local_rank < len(ranks) else None
        for slot in () if rank is None else rank.slots():
            status = slot.status()
            if status.sequence == what.sequence and status.phase is SlotPhase.WHOLE:
                return _of_slot(slot, is_meta=what.part == "meta")
        raise CaptureAborted(f"capture {what.sequence} of local rank {what.local_rank} is not in memory any more")

    def _ranks_of(self, start: str) -> list[LocalRank | None]:
        """The ranks that the node had in that start."""
        ranks = self._ranks()
        count = max((rank.starts.num_ranks_of(start) for rank in ranks if rank is not None), default=0)
        return [*ranks[:count], *[None] * (count - len(ranks))]

    def _frozen_of(self, what: FrozenOf) -> BlockSource:
        slot = self._frozen.get(what.digest)
        if slot is None:
            raise CaptureAborted(f"frozen tensors {what.digest} are not in memory")
        if what.digest not in self._compared:
            found = Checksums.of(slot.read(0, slot.word(Word.IMAGE_BYTES))).whole
            if found != what.digest:
                raise FormatError(f"frozen tensors {what.digest}: their checksum in memory is {found}")
            self._compared.add(what.digest)
        return _of_slot(slot, is_meta=what.part == "meta")


def _of_slot(slot: Slot, *, is_meta: bool) -> MemorySource:
    if is_meta:
        meta = slot.read_meta()
        return MemorySource(memoryview(meta), len(meta))
    size = slot.word(Word.IMAGE_BYTES)
    return MemorySource(slot.read(0, size), size)
