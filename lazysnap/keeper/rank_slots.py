"""The slots of one rank, made on a thread of its own: for its captures, and for its frozen tensors."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from lazysnap.errors import LazySnapError
from lazysnap.keeper.frozen import FrozenPool
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.protocol import HandOver, Hello, MemoryRefused, Message, Reserve
from lazysnap.memory.arena import Slot
from lazysnap.memory.budget import NODE
from lazysnap.memory.slot_files import spill_dir
from lazysnap.memory.slot_pool import SlotPool

logger = logging.getLogger(__name__)

Emit = Callable[[Message, tuple[int, ...]], None]


class RankSlots:
    """Makes what the trainer asks for, within its bounds. Methods may be called from any thread, and do not block."""

    def __init__(
        self,
        frozen: FrozenPool,
        emit: Emit,
        is_attached: Callable[[], bool],
        is_reading: Callable[[Slot], bool],
    ) -> None:
        """``emit`` sends to the trainer; ``is_attached``: there is one; ``is_reading``: a level reads that slot."""
        self.pool = SlotPool(lambda number, slot: emit(HandOver(slot=number), (slot.fd,)))
        self.pool.is_outdated = lambda wanted: wanted != self._wanted
        self._frozen, self._emit, self._is_attached, self._is_reading = frozen, emit, is_attached, is_reading
        self._hello: Hello | None = None
        self._reserve: Reserve | None = None
        self._settled: Reserve | None = None
        """The last request that was met or refused."""
        self._frozen_asked: deque[tuple[Connection, Reserve]] = deque()
        self._wake = threading.Event()
        self._is_closed = False
        threading.Thread(target=self._run, name="memory", daemon=True).start()

    def serve(self, hello: Hello) -> None:
        """A trainer came."""
        self._hello, self._settled = hello, None

    def reserve(self, wanted: Reserve) -> None:
        """Make these slots."""
        NODE.expect(self, wanted.growth)
        self._reserve, self._settled = wanted, None  # what was there once may have been returned meanwhile
        self.wake()

    def take_back(self, number: int) -> None:
        """Free a slot that the trainer returned."""
        self.pool.take_back(number)
        self._settled = None  # it may be one of those that are wanted
        self.wake()

    def ask_frozen(self, trainer: Connection, asked: Reserve) -> None:
        """Answer with a slot for frozen tensors."""
        self._frozen_asked.append((trainer, asked))
        self.wake()

    def wake(self) -> None:
        """There may be memory now."""
        self._wake.set()

    def trainer_ended(self) -> None:
        """Nothing is written into the slots any more."""
        NODE.forget(self)
        self._frozen.filled(self._local_rank)

    def close(self) -> None:
        """Let everything go."""
        self._is_closed = True
        NODE.forget(self)
        self._frozen.forget(self._local_rank)
        self.wake()
        self.pool.close()

    @property
    def _local_rank(self) -> int:
        return 0 if self._hello is None else self._hello.team.local_rank

    @property
    def _wanted(self) -> tuple[int, int, int] | None:
        wanted = self._reserve
        return None if wanted is None else (wanted.meta, wanted.image, wanted.count)

    def _spill_dir(self) -> str | None:
        """Return the directory of slots that are files, used if memory does not suffice."""
        return None if self._hello is None else spill_dir(self._hello.memory, self._hello.levels)

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait()
            self._wake.clear()
            while self._frozen_asked:
                self._provide_frozen(*self._frozen_asked.popleft())
            wanted = self._reserve
            if wanted is None or wanted is self._settled or not self._is_attached():
                continue
            self._settled = wanted  # before: a message that comes meanwhile takes it back
            try:
                if not self._provide(wanted):
                    self._settled = None
            except LazySnapError as error:
                self._emit(MemoryRefused(text=str(error)), ())
            except Exception as error:  # the last handler of the thread; the trainer asks again later
                logger.exception("memory")
                self._emit(MemoryRefused(text=f"the keeper failed to make memory: {type(error).__name__}: {error}"), ())
        self.pool.close()  # what was made meanwhile

    def _provide(self, wanted: Reserve) -> bool:
        bound = self._bound(self._frozen.size_bytes(self._local_rank))
        place = self._spill_dir() if wanted.spills else None
        sizes = wanted.meta, wanted.image, wanted.count
        return self.pool.provide(sizes, bound, self._is_reading, wanted.least, place)

    def _bound(self, used_bytes: int) -> int | None:
        """Return the bytes that ``MemoryLevel.max_bytes`` leaves beside those that are used."""
        most = None if self._hello is None else self._hello.memory.max_bytes
        return None if most is None else most - used_bytes

    def _provide_frozen(self, trainer: Connection, asked: Reserve) -> None:
        """Another trainer than the one that asked needs no answer."""
        reply: Message
        fds: tuple[int, ...]
        try:
            rank, digest = self._local_rank, asked.frozen or ""
            free = self._bound(self._frozen.size_bytes(rank, without=digest) + self._capture_bytes())
            sizes = asked.meta, asked.image
            slot, fills = self._frozen.provide(rank, digest, sizes, free, self._spill_dir())
            reply, fds = HandOver(id=asked.id, slot=digest, fills=fills), (slot.fd,)
        except Exception as error:  # noqa: BLE001  the last handler of the thread; the trainer says what it means
            reply, fds = MemoryRefused(id=asked.id, text=str(error)), ()
        try:
            trainer.send(reply, fds)
        except OSError as error:
            logger.info("could not tell the trainer: %s", error)

    def _capture_bytes(self) -> int:
        """The memory of the slots for captures, once all are made."""
        slots, wanted = self.pool.all(), self._reserve
        held = sum(slot.memory_bytes for slot in slots)
        if wanted is None or any(slot.is_file for slot in slots):
            return held
        return max(held, wanted.count * Slot.bytes_for(wanted.meta, wanted.image))
