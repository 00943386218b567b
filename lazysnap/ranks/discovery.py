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
from lazysnap.core.messages import KeeperState, PeerAddress, PeerSettings, RedundancySettings
from lazysnap.errors import ConfigError, LazySnapError
from lazysnap.keeper.client import KeeperClient
from lazysnap.parity.codes import library
from lazysnap.parity.groups import groups_of
from lazysnap.peers.secret import Secret, draw_secret
from lazysnap.ranks.world import World

logger = logging.getLogger("lazysnap.engine")

_BLOCK_BYTES = 1 << 20
"""Bytes that are sent, compared and added up at a time: a multiple of 4 KiB."""


@dataclass(frozen=True)
class Discovery:
    """The addresses of the other nodes' keepers, for this rank's keeper and for a restart that reads from them."""

    peers: PeerSettings | None = None
    """How keepers reach each other; ``None``: there is one node, or they do not."""
    redundancy: RedundancySettings | None = None
    """``None``: other nodes do not protect this one."""
    reads: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """The address at which a keeper serves the others, by the name of its node."""

    @property
    def group(self) -> tuple[int, int]:
        """Nodes that protect this one and each other, and how many of them may be lost."""
        if self.redundancy is None:
            return (1, 0)
        return (len(self.redundancy.members), self.redundancy.parity)

    @property
    def secret(self) -> Secret:
        """The secret of the start; only if there are ``peers``."""
        assert self.peers is not None
        return Secret(self.peers.secret)


NOBODY = Discovery()
"""One node alone."""


@dataclass(frozen=True)
class _Endpoint:
    """The addresses of a node's keeper."""

    host: str
    port: int
    """The port at which it serves the others; 0: none was free."""
    library: str
    """The library that computes parity there; empty if there is none."""


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
    secret, of_first = _agree_on_secret(world, is_first_node=world.place.node == nodes[0])
    if len(nodes) == 1:
        of_first = ["127.0.0.1"]
    endpoints = _exchange_endpoints(world, client, of_first)
    peers = PeerSettings(
        job=job_id,
        node=nodes.index(world.place.node),
        secret=secret.hex,
        addresses=tuple(
            PeerAddress(number, endpoints[node].host, endpoints[node].port) for number, node in enumerate(nodes)
        ),
    )
    silences = _begin_serving(world, client, peers, config.io_timeout_s)
    if world.rank == 0:
        for node in nodes:
            _report(node.split("/")[0], endpoints[node], silences.get(node, ""), is_first=node == nodes[0])
    if not endpoints[nodes[0]].port:
        return NOBODY
    reads = {node: (endpoint.host, endpoint.port) for node, endpoint in endpoints.items() if endpoint.port}
    redundancy = _redundancy(world, config, [endpoints[node] for node in nodes], peers.node)
    return Discovery(peers, redundancy, reads)


def _agree_on_secret(world: World, *, is_first_node: bool) -> tuple[Secret, list[str]]:
    """Return the secret of this start, and the addresses at which other nodes see that of rank 0. Collective."""
    # Only other nodes know where they reach that of rank 0: to itself its name may mean 127.0.1.1.
    told: Any = None
    if not is_first_node:
        told = address_of(os.environ.get("MASTER_ADDR"))
    if world.rank == 0:
        told = draw_secret().hex
    secret_hex, *addresses = world.exchange("linking keepers", told)
    return Secret(secret_hex), list(dict.fromkeys(address for address in addresses if address is not None))


def _exchange_endpoints(world: World, client: KeeperClient, of_first: Sequence[str]) -> dict[str, _Endpoint]:
    """Reserve a port for the keeper of this node; return the addresses of all keepers, by node. Collective."""
    own: Any = None
    if world.place.local_rank == 0:
        host = own_address(of_first)
        try:
            own = vars(_Endpoint(host, client.reserve_port(host), _library()))
        except OSError as error:
            own = vars(_Endpoint(f"{host}: {error}", 0, _library()))
    answers = world.exchange("where keepers are", own)
    endpoints = {}
    for place in world.places:
        if place.local_rank == 0:
            endpoints[place.node] = _Endpoint(**answers[place.rank])
    return endpoints


def _begin_serving(world: World, client: KeeperClient, peers: PeerSettings, timeout_s: float) -> dict[str, str]:
    """Let the keepers of all nodes serve each other; return why one does not yet, by node. Collective. Blocks."""
    [first, *_] = peers.addresses
    if first.port:
        client.set_peers(peers)

    def wait() -> str:
        if world.place.local_rank or not first.port:
            return ""
        return _silence(client, timeout_s)

    answers = world.exchange_after("keepers that serve others", wait)
    return {place.node: answers[place.rank] for place in world.places if place.local_rank == 0}


def _redundancy(
    world: World, config: SnapshotConfig, endpoints: Sequence[_Endpoint], own: int
) -> RedundancySettings | None:
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
    group = next(group for group in groups if own in group.members)
    return RedundancySettings(
        every_n_steps=redundancy.every_n_steps,
        members=tuple(group.members),
        parity=group.parity,
        most_lost=group.parity * len(groups),
        block_bytes=_BLOCK_BYTES,
        max_bytes_per_s=redundancy.max_bytes_per_s,
    )


def _silence(client: KeeperClient, timeout_s: float) -> str:
    """Return why this node's keeper does not serve the others yet; empty if it does.

    Blocks: at most ``timeout_s`` for the keeper, and again for its answer.
    """
    try:
        client.connect(timeout_s)
    except LazySnapError as error:  # the other nodes wait for an answer; the next use of the keeper raises it again
        return str(error)
    is_serving = client.wait(_is_serving, timeout_s)
    return "" if is_serving else f"it did not answer within {timeout_s:g} s"


def _is_serving(state: KeeperState) -> bool:
    return state.is_serving_peers


def _library() -> str:
    try:
        return library()
    except ConfigError as error:
        logger.info("%s", error)
        return ""


def _report(node: str, endpoint: _Endpoint, silence: str, *, is_first: bool) -> None:
    """Warn of a keeper that the others do not reach. ``silence``: why it does not serve them yet."""
    lost = "nothing new is complete at a level or protected" if is_first else "nothing is protected by other nodes"
    if not endpoint.port:
        logger.warning(
            "other nodes cannot reach the keeper of %s, so %s: no port can be had: %s; set MASTER_ADDR to an address "
            "of the first node that all others reach",
            node,
            lost,
            endpoint.host,
        )
    elif silence:
        logger.warning(
            "the keeper of %s does not answer yet, and until it does nothing new is complete at a level or protected; "
            "training and captures into memory go on, and it joins by itself: %s",
            node,
            silence,
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
