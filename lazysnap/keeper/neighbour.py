"""Looking at what the keeper of a job holds for another rank of this node: mapped, not copied."""

import contextlib
import logging
import time

from lazysnap.errors import FormatError, KeeperUnavailable
from lazysnap.keeper.events import MemoryEntry, MemoryInventory
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.messages import Connection, Unclaimed
from lazysnap.keeper.protocol import FrozenSlot, Inventory, Message, ShowRank, SlotMade
from lazysnap.memory.arena import Slot

logger = logging.getLogger(__name__)


class NeighbourMemory:
    """What a keeper holds for one rank, readable as long as this is open, whatever becomes of the keeper."""

    def __init__(self, identity: JobIdentity, local_rank: int, timeout_s: float) -> None:
        """Blocks: at most ``timeout_s``. Raises: KeeperUnavailable, if there is no keeper, or it does not answer."""
        self._local_rank = local_rank
        self._slots: dict[int, Slot] = {}
        self._frozen: dict[str, Slot] = {}
        connection = try_connect(identity)
        if connection is None:
            raise KeeperUnavailable(f"no keeper of job {identity.job_id!r}")
        try:
            self.inventory = self._ask(connection, timeout_s)
        except OSError as error:
            self.close()
            raise KeeperUnavailable(f"the keeper of job {identity.job_id!r}: no answer: {error}") from error
        except BaseException:
            self.close()
            raise
        finally:
            connection.close()

    def _ask(self, connection: Connection, timeout_s: float) -> MemoryInventory:
        deadline = time.monotonic() + timeout_s
        connection.send(ShowRank(self._local_rank), timeout_s=timeout_s)
        while time.monotonic() < deadline:
            connection.set_receive_timeout(max(0.05, deadline - time.monotonic()))
            received = connection.receive()
            if received is None:
                break
            with Unclaimed(received) as messages:
                for message, fds in messages:
                    if isinstance(message, Inventory):
                        return self._inventory(message)
                    self._take(message, fds)
        raise KeeperUnavailable("the keeper did not tell what it holds")

    def _take(self, message: Message, fds: tuple[int, ...]) -> None:
        for fd in fds:
            try:
                slot = Slot.attach(fd)
            except (FormatError, OSError) as error:  # what is in it is not there, then
                logger.info("%s", error)
                continue
            if isinstance(message, SlotMade):
                self._slots[message.slot] = slot
            elif isinstance(message, FrozenSlot):
                self._frozen[message.digest] = slot
            else:
                slot.close()

    def _inventory(self, told: Inventory) -> MemoryInventory:
        found = [MemoryEntry.of(held, self._slots[held.slot]) for held in told.entries if held.slot in self._slots]
        return MemoryInventory(tuple(found), dict(self._frozen), local_ranks=tuple(told.local_ranks))

    def close(self) -> None:
        """Unmap. Views that others still hold keep the memory alive."""
        for slot in (*self._slots.values(), *self._frozen.values()):
            with contextlib.suppress(OSError):
                slot.close()
        self._slots.clear()
        self._frozen.clear()
