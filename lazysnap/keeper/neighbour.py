"""Read the captures of another rank of this node from the job's keeper: mapped, not copied."""

import contextlib
import logging
import threading
import time

from lazysnap.errors import FormatError, KeeperError
from lazysnap.keeper.asking import answers
from lazysnap.keeper.client_slots import MappedSlots
from lazysnap.keeper.events import MemoryInventory
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.protocol import AskInventory, HandOver, Inventory

logger = logging.getLogger(__name__)


class NeighbourMemory:
    """The captures of one rank in a keeper, readable while this is open, even if the keeper ends."""

    def __init__(self, identity: JobIdentity, local_rank: int, timeout_s: float) -> None:
        """Blocks: at most ``timeout_s``. Raises: KeeperError, if there is no keeper, or it does not answer."""
        self._local_rank = local_rank
        self._slots = MappedSlots(threading.Condition())
        connection = try_connect(identity)
        if connection is None:
            raise KeeperError(f"no keeper of job {identity.job_id!r}")
        try:
            self.inventory = self._ask(connection, timeout_s)
        except OSError as error:
            self.close()
            raise KeeperError(f"the keeper of job {identity.job_id!r}: no answer: {error}") from error
        except BaseException:
            self.close()
            raise
        finally:
            connection.close()

    def _ask(self, connection: Connection, timeout_s: float) -> MemoryInventory:
        question, deadline = AskInventory(local_rank=self._local_rank), time.monotonic() + timeout_s
        for message, fds in answers(connection, question, deadline):
            if isinstance(message, HandOver) and message.slot is not None and fds:
                try:
                    self._slots.map(message.slot, fds[0])
                except (FormatError, OSError) as error:
                    logger.warning("a slot of the keeper cannot be mapped: %s", error)
            elif isinstance(message, Inventory):
                return MemoryInventory.of(message, self._slots.get)
        raise AssertionError("answers() raises at the end")

    def close(self) -> None:
        """Unmap. Views that others still hold keep the memory alive."""
        for slot in self._slots.take_all():
            with contextlib.suppress(OSError):
                slot.close()
