"""The links of a node to the keepers of other nodes, and what is said while some node is not reached."""

from collections.abc import Callable

from lazysnap.events import Event
from lazysnap.keeper.grant_loop import GrantLoop
from lazysnap.keeper.protocol import Run
from lazysnap.keeper.reminder import Reminder
from lazysnap.links.links import Hello, Links
from lazysnap.topology import Team

_UNREACHED_S = 10.0
"""Seconds until the warning that a node is not reached."""


class NodeLinks:
    """The links of one node, for one start. They end with ``loop``, which gets their messages."""

    def __init__(self, run: Run, team: Team, loop: GrantLoop, emit: Callable[[Event], None]) -> None:
        self._peers, self._start, self._team, self._loop = run.peers, run.start, team, loop
        self._reminder = Reminder("links", _UNREACHED_S, emit, is_open=team.nodes > 1 and not run.is_new)

    def begin(self, admit: Callable[[Links], None]) -> None:
        """Start ``loop`` with links to the other nodes, if there are any. ``admit`` accepts links, at node 0."""
        links, peers, node = None, self._peers, self._team.node
        if self._team.nodes > 1 and peers is not None:
            links = Links(peers.secret, Hello(peers.job, self._start, node), self._loop)
            if node == 0:
                admit(links)
            else:
                links.connect(0, peers.host, peers.port)
        self._loop.start(links)

    def look(self) -> None:
        """Say that nothing is stored, once in a while, as long as that is so. Called now and then."""
        nodes, seconds = self._loop.unreached

        def text() -> str:
            at = f"{self._peers.host}:{self._peers.port}" if self._peers is not None else "no address"
            who = "rank 0's node" if 0 in nodes else f"node {min(nodes)}" + (", …" if len(nodes) > 1 else "")
            return (
                f"node {self._team.node}: no link to the keeper of {who} for {seconds:.0f} s (all keepers meet "
                f"at {at}); look whether that keeper is stopped or its machine overloaded, and whether nodes reach "
                "each other there; the address is that of MASTER_ADDR"
            )

        self._reminder.look(seconds if nodes else None, text)
