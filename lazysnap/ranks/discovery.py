"""Discovery: the keepers of several nodes learn each other's addresses at the start, through the process group."""

import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lazysnap.config import SnapshotConfig, redundancy_for, too_few_nodes
from lazysnap.console import say
from lazysnap.errors import ConfigError, LazySnapError
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.protocol import Parity, Peers
from lazysnap.links.secret import Secret, draw_secret
from lazysnap.parity.codes import library
from lazysnap.parity.groups import groups_of
from lazysnap.ranks.slots import slots_needed
from lazysnap.ranks.world import World

logger = logging.getLogger("lazysnap.engine")

_BLOCK_BYTES = 1 << 20
"""Bytes that are sent, compared and added up at a time: a multiple of 4 KiB."""


@dataclass(frozen=True)
class Discovery:
    """The addresses of the other nodes' keepers, for this rank's keeper and for a restart that reads from them."""

    peers: Peers | None = None
    parity: Parity | None = None
    """``None``: other nodes do not protect this one."""
    reads: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """The address from which others read, by node."""

    @property
    def group(self) -> tuple[int, int]:
        """Nodes that protect this one and each other, and how many of them may be lost."""
        return (1, 0) if self.parity is None else (len(self.parity.members), self.parity.parity)

    @property
    def secret(self) -> Secret:
        """The secret of the job; only if there are ``peers``."""
        assert self.peers is not None
        return self.peers.secret


NOBODY = Discovery()
"""One node alone."""


@dataclass(frozen=True)
class _Endpoint:
    """The addresses of a node's keeper."""

    host: str
    port: int
    """The port at which others read, and at node 0 keepers link; 0: none was free."""
    library: str
    """The library that computes parity there; empty if there is none."""
    silence: str = ""
    """Why the keeper does not serve others yet; empty: it does."""


def discover_keepers(
    world: World, client: KeeperClient, config: SnapshotConfig, job_id: str, *, alone: bool = False
) -> Discovery:
    """Let the keepers of all nodes meet. Collective, with several nodes. Blocks: until each node has a keeper, at most
    ``io_timeout_s``. ``alone``: also if there is one node only, whose keeper holds parity of others that are lost.

    Trainers reserve the ports of their keepers, so nothing here depends on a keeper: one that is silent now, or is
    replaced later, is let in as soon as it comes.

    Raises: WaitTimeout.
    """
    places = world.places
    nodes = list(dict.fromkeys(place.node for place in places))
    if len(nodes) == 1 and not alone:
        return NOBODY
    # Only other nodes know where they reach that of rank 0: to itself its name may mean 127.0.1.1.
    seen: Any = None if world.place.node == nodes[0] else address_of(os.environ.get("MASTER_ADDR"))
    if world.rank == 0:
        seen = vars(draw_secret())
    made, *of_first = world.exchange("linking keepers", seen)
    secret = Secret(**made)
    mine = None
    if world.place.local_rank == 0:
        targets = ["127.0.0.1"]
        if len(nodes) > 1:
            targets = list(dict.fromkeys(address for address in of_first if address is not None))
        host = own_address(targets)
        try:
            port = client.reserve_port(host)
        except OSError as error:
            mine = vars(_Endpoint(f"{host}: {error}", 0, _library()))
        else:
            silence = _silence(client, host, secret, config.io_timeout_s)
            mine = vars(_Endpoint(host, port, _library(), silence))
    told = world.exchange("where keepers are", mine)
    endpoints = {place.node: _Endpoint(**told[place.rank]) for place in places if place.local_rank == 0}
    first, own = endpoints[nodes[0]], endpoints[world.place.node]
    if world.rank == 0:
        for node in nodes:
            _tell(node.split("/")[0], endpoints[node], is_first=node == nodes[0])
    if not first.port:
        return NOBODY
    peers = Peers(job_id, first.host, first.port, secret, own=(own.host, own.port))
    reads = {node: (endpoint.host, endpoint.port) for node, endpoint in endpoints.items() if endpoint.port}
    return Discovery(
        peers, _parity(world, config, [endpoints[node] for node in nodes], nodes.index(world.place.node)), reads
    )


def _parity(world: World, config: SnapshotConfig, endpoints: Sequence[_Endpoint], own: int) -> Parity | None:
    redundancy = redundancy_for(config, len(endpoints))
    if redundancy is None:
        return None
    lack = ""
    if not all(endpoint.library for endpoint in endpoints):
        lack = "parity needs ISA-L or numpy on every node: pip install 'lazysnap[parity]'"
    if not all(endpoint.port for endpoint in endpoints):
        lack = "not every node has an address at which the others reach its keeper"
    if lack:
        if world.rank == 0:
            logger.warning("NOT protected against the loss of a node: %s", lack)
        return None
    groups = groups_of(len(endpoints), redundancy.group_size, redundancy.parity)
    if world.rank == 0:
        text = too_few_nodes(config, len(endpoints))
        if text is not None:
            logger.warning("%s", text)
        slow = {endpoint.library for endpoint in endpoints} - {"ISA-L"}
        if slow:
            say(f"parity is computed by {min(slow)} on some nodes; ISA-L is faster: pip install 'lazysnap[parity]'")
    group = next(one for one in groups if own in one.members)
    return Parity(
        [(number, endpoints[number].host, endpoints[number].port) for number in group.members],
        group.parity,
        group.parity * len(groups),
        slots_needed(config, world.size, runs_ahead=world.runs_ahead, is_redundant=True),
        every_n_steps=redundancy.every_n_steps,
        max_bytes_per_s=redundancy.max_bytes_per_s,
        block_bytes=_BLOCK_BYTES,
    )


def _silence(client: KeeperClient, host: str, secret: Secret, timeout_s: float) -> str:
    """Have this node's keeper serve the others. Blocks: at most ``timeout_s``. Why it does not yet; empty: it does."""
    try:
        client.connect(timeout_s)
    except LazySnapError as error:  # the other nodes wait for an answer; the next use of the keeper raises it again
        return str(error)
    return "" if client.serve_peers(host, secret, timeout_s) else f"it did not answer within {timeout_s:g} s"


def _library() -> str:
    try:
        return library()
    except ConfigError as error:
        logger.info("%s", error)
        return ""


def _tell(node: str, endpoint: _Endpoint, *, is_first: bool) -> None:
    lost = "nothing new is complete at a level or protected" if is_first else "nothing is protected by other nodes"
    if not endpoint.port:
        logger.warning(
            "other nodes cannot reach the keeper of %s, so %s: no port can be had: %s; set MASTER_ADDR to an address "
            "of the first node that all others reach",
            node,
            lost,
            endpoint.host,
        )
    elif endpoint.silence:
        logger.warning(
            "the keeper of %s does not answer yet, and until it does nothing new is complete at a level or protected; "
            "training and captures into memory go on, and it joins by itself: %s",
            node,
            endpoint.silence,
        )


def address_of(host: str | None) -> str | None:
    """The address of a host, as far as this machine knows it."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]) if host else None
    return None


def own_address(of_first: Sequence[str]) -> str:
    """The address of this machine at which other nodes reach it. ``of_first``: what others have seen of rank 0's node,
    an address of this machine or one that the way leads to.
    """
    for address in of_first:
        with contextlib.suppress(OSError), _probe(address) as probe:
            probe.bind((address, 0))  # only an address of this machine can be bound
            return address
    for address in [*of_first, "192.0.2.1"]:
        with contextlib.suppress(OSError), _probe(address) as probe:
            probe.connect((address, 9))  # sends nothing: it chooses the interface
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _probe(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
