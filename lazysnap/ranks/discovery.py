"""Distributes the addresses of the keepers of several nodes at the start, through the process group."""

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
from lazysnap.peers.secret import draw_secret
from lazysnap.ranks.world import World

logger = logging.getLogger("lazysnap.engine")

_BLOCK_BYTES = 1 << 20
"""Bytes that are sent, compared and added up at a time: a multiple of 4 KiB."""


@dataclass(frozen=True)
class Discovery:
    """The addresses of the other nodes' keepers, for this rank's keeper and for a restart."""

    peers: PeerSettings | None = None
    """Addresses and secret of the keepers; ``None`` with one node, or if keepers do not reach each other."""
    redundancy: RedundancySettings | None = None
    """``None``: other nodes do not protect this one."""
    reads: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """The address at which a keeper serves the others, by the name of its node."""

    @property
    def group(self) -> tuple[int, int]:
        """Number of nodes in the group of this one, and of those that may be lost."""
        if self.redundancy is None:
            return (1, 0)
        return (len(self.redundancy.members), self.redundancy.parity)

    @property
    def secret(self) -> str:
        """The secret of the start; only if there are ``peers``."""
        assert self.peers is not None
        return self.peers.secret


NOBODY = Discovery()
"""One node alone."""


@dataclass(frozen=True)
class _Endpoint:
    """The addresses of a node's keeper."""

    host: str
    port: int
    """The port at which it serves the others; 0: none was free."""
    library: str
    """The library that computes parity there, if any."""


def discover_keepers(
    world: World, client: KeeperClient, config: SnapshotConfig, job_id: str, *, alone: bool = False
) -> Discovery:
    """Connect the keepers of all nodes. Collective with several nodes.

    Trainers reserve the ports of their keepers, so no keeper has to answer. A keeper that is silent now, or is replaced
    later, joins as soon as it answers.

    Blocks: until each node has a keeper, at most ``io_timeout_s``. Raises: WaitTimeout.

    Args:
        alone: with one node, let its keeper serve others, too: it may hold parity of lost nodes.
    """
    nodes = list(dict.fromkeys(world.nodes))
    if len(nodes) == 1 and not alone:
        return NOBODY
    secret, first_node_addresses = _agree_on_secret(world, is_first_node=world.place.node == nodes[0])
    if len(nodes) == 1:
        first_node_addresses = ["127.0.0.1"]
    endpoints = _exchange_endpoints(world, client, first_node_addresses)
    addresses = []
    reads = {}
    for node, endpoint in endpoints.items():
        addresses.append(PeerAddress(endpoint.host, endpoint.port))
        if endpoint.port:
            reads[node] = (endpoint.host, endpoint.port)
    peers = PeerSettings(
        job=job_id,
        node=nodes.index(world.place.node),
        secret=secret,
        addresses=tuple(addresses),
    )
    silences = _begin_serving(world, client, peers, config.io_timeout_s)
    if world.rank == 0:
        for node in nodes:
            _report(node.split("/")[0], endpoints[node], silences.get(node, ""), is_first=node == nodes[0])
    if not addresses[0].port:
        return NOBODY
    redundancy = _redundancy(world, config, list(endpoints.values()), peers.node)
    return Discovery(peers, redundancy, reads)


def _agree_on_secret(world: World, *, is_first_node: bool) -> tuple[str, list[str]]:
    """Return the secret of this start, and the addresses at which other nodes reach the node of rank 0. Collective."""
    # Rank 0 gives the secret. The address of its node comes from other nodes: its own name may mean 127.0.1.1 to it.
    contribution: Any = None
    if not is_first_node:
        contribution = address_of(os.environ.get("MASTER_ADDR"))
    if world.rank == 0:
        contribution = draw_secret()
    secret, *answers = world.exchange("linking keepers", contribution)
    return secret, [address for address in dict.fromkeys(answers) if address is not None]


def _exchange_endpoints(
    world: World, client: KeeperClient, first_node_addresses: Sequence[str]
) -> dict[str, _Endpoint]:
    """Reserve a port for the keeper of this node; return the endpoints of all keepers, in the order of the nodes'
    numbers. Collective.
    """
    fields: Any = None
    if world.place.local_rank == 0:
        host = own_address(first_node_addresses)
        try:
            endpoint = _Endpoint(host, client.reserve_port(host), _library())
        except OSError as error:
            endpoint = _Endpoint(f"{host}: {error}", 0, _library())
        fields = vars(endpoint)
    answers = world.exchange("where keepers are", fields)
    return {node: _Endpoint(**answer) for node, answer in _answers_of_nodes(world, answers).items()}


def _answers_of_nodes(world: World, answers: Sequence[Any]) -> dict[str, Any]:
    """Return the answer of the first rank of each node, in the order of the nodes' numbers."""
    return {place.node: answers[place.rank] for place in world.places if place.local_rank == 0}


def _begin_serving(world: World, client: KeeperClient, peers: PeerSettings, timeout_s: float) -> dict[str, str]:
    """Let the keepers of all nodes serve each other; return the reasons of those that do not yet, by node. Collective.
    Blocks.
    """
    first = peers.addresses[0]
    if first.port:
        client.set_peers(peers)

    def wait() -> str:
        if world.place.local_rank or not first.port:
            return ""
        return _silence(client, peers.addresses[peers.node], timeout_s)

    answers = world.exchange_after("keepers that serve others", wait)
    return _answers_of_nodes(world, answers)


def _redundancy(
    world: World, config: SnapshotConfig, endpoints: Sequence[_Endpoint], node: int
) -> RedundancySettings | None:
    """Return how other nodes protect ``node``; ``None`` if they do not. ``endpoints``: by the number of their node."""
    redundancy = redundancy_for(config, len(endpoints))
    if redundancy is None:
        return None
    libraries = {endpoint.library for endpoint in endpoints}
    obstacle = ""
    if "" in libraries:
        obstacle = "parity needs ISA-L or numpy on every node: pip install 'lazysnap[parity]'"
    if not all(endpoint.port for endpoint in endpoints):
        obstacle = "not every node has an address at which the others reach its keeper"
    if obstacle:
        if world.rank == 0:
            logger.warning("NOT protected against the loss of a node: %s", obstacle)
        return None
    if world.rank == 0:
        text = too_few_nodes(config, len(endpoints))
        if text is not None:
            logger.warning("%s", text)
        slow_libraries = libraries - {"ISA-L"}
        if slow_libraries:
            say(
                f"parity is computed by {min(slow_libraries)} on some nodes; ISA-L is faster: pip install "
                "'lazysnap[parity]'"
            )
    groups = groups_of(len(endpoints), redundancy.group_size, redundancy.parity)
    group = next(group for group in groups if node in group.members)
    return RedundancySettings(
        every_n_steps=redundancy.every_n_steps,
        members=tuple(group.members),
        parity=group.parity,
        most_lost=group.parity * len(groups),
        block_bytes=_BLOCK_BYTES,
        max_bytes_per_s=redundancy.max_bytes_per_s,
    )


def _silence(client: KeeperClient, address: PeerAddress, timeout_s: float) -> str:
    """Return the reason why this node's keeper does not serve the others at that address yet; empty if it does.

    Blocks: at most ``timeout_s`` for the keeper, and again for its answer.
    """
    try:
        client.connect(timeout_s)
    except LazySnapError as error:  # the other nodes wait for an answer; the next use of the keeper raises again
        return str(error)

    def is_serving(state: KeeperState) -> bool:
        return state.serves_at == address

    if not client.wait(is_serving, timeout_s):
        return f"it did not answer within {timeout_s:g} s"
    return ""


def _library() -> str:
    try:
        return library()
    except ConfigError as error:
        logger.info("%s", error)
        return ""


def _report(node: str, endpoint: _Endpoint, silence: str, *, is_first: bool) -> None:
    """Warn about a keeper that the others do not reach. ``silence``: the reason why it does not serve them yet."""
    if not endpoint.port:
        consequence = "nothing is protected by other nodes"
        if is_first:
            consequence = "nothing new is complete at a level or protected"
        logger.warning(
            "other nodes cannot reach the keeper of %s, so %s: no port is available: %s; set MASTER_ADDR to an address "
            "of the first node that all others reach",
            node,
            consequence,
            endpoint.host,
        )
    elif silence:
        logger.warning(
            "the keeper of %s does not answer yet, and until it does nothing new is complete at a level or protected; "
            "training and captures into memory continue, and it joins by itself: %s",
            node,
            silence,
        )


def address_of(host: str | None) -> str | None:
    """Return the address of a host, or ``None`` if this machine does not know it."""
    if not host:
        return None
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    _, _, _, _, socket_address = answers[0]
    return str(socket_address[0])


def own_address(first_node_addresses: Sequence[str]) -> str:
    """Return the address of this machine at which other nodes reach it.

    ``first_node_addresses``: the addresses at which others reach rank 0's node. Each is an address of this machine, or
    the route to it shows the interface that other nodes reach.
    """
    for address in first_node_addresses:
        with contextlib.suppress(OSError), _probe(address) as probe:
            probe.bind((address, 0))  # only an address of this machine can be bound
            return address
    for address in [*first_node_addresses, "192.0.2.1"]:
        with contextlib.suppress(OSError), _probe(address) as probe:
            probe.connect((address, 9))  # sends nothing: it chooses the interface
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _probe(address: str) -> socket.socket:
    family = socket.AF_INET
    if ":" in address:
        family = socket.AF_INET6
    return socket.socket(family, socket.SOCK_DGRAM)
