"""When what was captured is durable: at every level, the parts of all ranks."""

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace

from lazysnap.config import SnapshotConfig
from lazysnap.engine.direct import DirectStorage
from lazysnap.engine.world import World
from lazysnap.errors import WaitTimeout
from lazysnap.keeper.certificate import make_certificate
from lazysnap.keeper.client import Capture, KeeperClient
from lazysnap.keeper.events import KeeperEvent
from lazysnap.keeper.protocol import Peers

logger = logging.getLogger("lazysnap.engine")

Progress = Callable[[int, int], None]
"""Is told how many bytes of this node's part are stored, and how many there are at all levels together."""


class Durability:
    """Of one engine, from its making to its end."""

    def __init__(self, config: SnapshotConfig, direct: DirectStorage, world: World) -> None:
        self._config = config
        self._direct = direct
        self._client = direct.client
        self._world = world

    def events(self) -> list[KeeperEvent]:
        """What the keeper told since the last call."""
        return self._client.poll_events()

    def has(self, step: int) -> bool:
        """Whether that step or a later one is durable at the first level."""
        return self._client.wait_durable(step, 0.0)

    def has_any(self) -> bool:
        """Whether a snapshot of this start is known to be durable. Does not block."""
        return self._client.wait_durable(0, 0.0)

    def flush(self, newest: Capture | None, timeout_s: float, progress: Progress | None) -> bool:
        """Block until what is in memory, ``newest`` of this rank, is durable at every level; ``False`` after the
        deadline. Without levels: until a keeper has it.
        """
        if self._direct.has_newest:
            return self._direct.drain(timeout_s)
        return self._client.drain(timeout_s, progress, newest)

    def end(self, newest: Capture | None, progress: Progress | None, *, is_common: bool) -> bool:
        """As ``flush``, at the end: all ranks wait for each other, and hear if one of them failed. Blocks: at most
        ``drain_timeout_s``.

        Collective, if ``is_common``: all ranks came here.
        """
        timeout_s = self._config.drain_timeout_s

        def drain(last: Capture | None) -> bool:
            has_any = self._client.was_attached or self._direct.has_newest
            return self.flush(last, timeout_s, progress) if has_any else True

        if self._world.is_alone or not is_common:
            return drain(newest)
        try:
            steps = self._world.exchange("the last snapshot", None if newest is None else newest.step)
            is_same, last = len(set(steps)) == 1, newest
            if not is_same:  # of different steps there is no whole snapshot: what all have is waited for
                last = None if newest is None or None in steps else replace(newest, step=min(steps))
            done = self._world.exchange_after("making the last snapshot durable", lambda: drain(last))
        except WaitTimeout as error:
            logger.warning("whether the last snapshot is durable on all ranks is not known: %s", error)
            return False
        return all(done) and is_same


def meet_keepers(world: World, client: KeeperClient, config: SnapshotConfig, job_id: str) -> Peers | None:
    """How the keepers of all nodes reach that of rank 0's node; ``None``, if there is one node only, or no such way.

    Collective, with several nodes. Blocks: until rank 0 has a keeper, at most ``keeper_timeout_s``.
    Raises: WaitTimeout.
    """
    if not config.levels or len({place.node for place in world.places}) == 1:
        return None
    told = world.exchange("linking keepers", _open_door(client, config) if world.rank == 0 else None)[0]
    host, port, cert_pem, key_pem = told
    if not port:
        logger.warning("rank 0 has no keeper that others could reach: nothing will be stored: %s", host)
        return None
    return Peers(job_id, host, port, cert_pem, key_pem)


def _open_door(client: KeeperClient, config: SnapshotConfig) -> tuple[str, int, str, str]:
    host = config.link_address or own_address()
    try:
        client.connect(config.keeper_timeout_s)
        port = client.link_port(host, config.keeper_timeout_s)
    except Exception as error:  # noqa: BLE001  the others wait for an answer; whoever needs the keeper hears of it again
        return f"{type(error).__name__}: {error}", 0, "", ""
    if not port:
        return f"no port of {host} can be had; set SnapshotConfig(link_address=...)", 0, "", ""
    cert_pem, key_pem = make_certificate()
    return host, port, cert_pem.decode(), key_pem.decode()


def own_address() -> str:
    """The address of this machine at which the ranks of other nodes reach it already, as far as it is known."""
    host = os.environ.get("MASTER_ADDR")
    if host:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            address = socket.gethostbyname(host)
            probe.bind((address, 0))  # only an address of this machine can be bound
            return address
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it chooses the interface
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
