"""Looking into the keepers of other processes of the same job on this node: mapped, not copied."""

import contextlib
import dataclasses
import logging
import time

from lazysnap.arena import Slot
from lazysnap.errors import FormatError, KeeperUnavailable
from lazysnap.keeper.events import MemoryEntry, MemoryHoldings
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.messages import Connection, Unclaimed

logger = logging.getLogger(__name__)

_MOST_PER_NODE = 256


def keepers_here(identity: JobIdentity) -> list[int]:
    """Local ranks that have a keeper of this job on this node. Blocks: reads the kernel's list of sockets."""
    try:
        with open("/proc/net/unix") as file:
            known = {line.rsplit(" ", 1)[-1].strip() for line in file}
    except OSError:
        return []
    addresses = (dataclasses.replace(identity, local_rank=number).address for number in range(_MOST_PER_NODE))
    return [number for number, address in enumerate(addresses) if address.replace("\0", "@") in known]


class Visit:
    """What one keeper holds, readable as long as this is open, whatever becomes of the keeper."""

    def __init__(self, identity: JobIdentity, timeout_s: float) -> None:
        """Blocks: at most ``timeout_s``. Raises: KeeperUnavailable, if there is no keeper, or it does not answer."""
        self._slots: dict[int, Slot] = {}
        self._frozen: dict[str, Slot] = {}
        connection = try_connect(identity)
        if connection is None:
            raise KeeperUnavailable(f"no keeper of local rank {identity.local_rank} of job {identity.job_id!r}")
        try:
            self.holdings = self._ask(connection, timeout_s)
        except OSError as error:
            self.close()
            raise KeeperUnavailable(f"the keeper of local rank {identity.local_rank}: no answer: {error}") from error
        except BaseException:
            self.close()
            raise
        finally:
            connection.close()

    def _ask(self, connection: Connection, timeout_s: float) -> MemoryHoldings:
        deadline = time.monotonic() + timeout_s
        connection.send({"type": "look"}, timeout_s=timeout_s)
        while time.monotonic() < deadline:
            connection.set_receive_timeout(max(0.05, deadline - time.monotonic()))
            received = connection.receive()
            if received is None:
                break
            with Unclaimed(received) as messages:
                for message, fds in messages:
                    if message["type"] == "inventory":
                        return self._holdings(message)
                    self._take(message, fds)
        raise KeeperUnavailable("the keeper did not tell what it holds")

    def _take(self, message: dict[str, object], fds: tuple[int, ...]) -> None:
        for fd in fds:
            try:
                slot = Slot.attach(fd)
            except (FormatError, OSError) as error:  # what is in it is not there, then
                logger.info("%s", error)
                continue
            if message["type"] == "slot":
                self._slots[int(str(message["slot"]))] = slot
            else:
                self._frozen[str(message["digest"])] = slot

    def _holdings(self, message: dict[str, object]) -> MemoryHoldings:
        entries = message["entries"]
        assert isinstance(entries, list)
        found = [MemoryEntry.of(item, self._slots[item["slot"]]) for item in entries if item["slot"] in self._slots]
        return MemoryHoldings(tuple(found), dict(self._frozen))

    def close(self) -> None:
        """Unmap. Views that others still hold keep the memory alive."""
        for slot in (*self._slots.values(), *self._frozen.values()):
            with contextlib.suppress(OSError):
                slot.close()
        self._slots.clear()
        self._frozen.clear()
