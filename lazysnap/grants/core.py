"""The grants of one keeper: its node's side, on node 0 the coordinator as well. Pure: events in, actions out.

An event is a call of one of the methods here, or of ``node``. After one or several events, or when slots may have
changed, ``step`` says what to do. ``keeper.grant_loop`` runs it on a thread, the simulations in ``tests/support`` in
simulated time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lazysnap.grants.alone import StoringAlone
from lazysnap.grants.coordinator import Coordinator, LocalView
from lazysnap.grants.messages import Order, Report
from lazysnap.grants.node import NodeGrants, RankView, Write

COORDINATOR_NODE = 0


@dataclass(frozen=True)
class Pin:
    """Pin the slots that hold the step, of these ranks."""

    ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True)
class Hold:
    """Hold the slots of the step for parity, of these ranks."""

    ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True)
class ReleaseStalePins:
    """Store the control word that the trainers read, *then* remove every pin of another step."""

    word: int | None


@dataclass(frozen=True)
class Begin:
    """Begin a write. ``node.committed`` follows, and at the end ``verified``, ``missed`` or ``failed``."""

    write: Write


@dataclass(frozen=True)
class Send:
    """Send a message to another node, if there is a link."""

    node: int
    message: Report | Order


@dataclass(frozen=True)
class Learn:
    """Report complete and lost snapshots to the trainers, and delete expired ones: an order was obeyed."""


@dataclass(frozen=True)
class GiveNotice:
    """Some node reports that all processes are about to be killed. May come again."""


Action = Pin | Hold | ReleaseStalePins | Begin | Send | Learn | GiveNotice


class Core:
    """Not thread-safe. Times are by the monotonic clock."""

    def __init__(self, node: NodeGrants, coordinator: Coordinator | None, alone: StoringAlone, now: float) -> None:
        """``coordinator``: on node 0. ``alone``: decides what is stored when not all nodes answer."""
        self.node, self.coordinator, self.alone = node, coordinator, alone
        nodes = 1 if coordinator is None else coordinator.num_nodes
        self.unreached = frozenset(range(nodes)) - {node.node}
        """Nodes without which nothing is stored and to which there is no link."""
        self.unreached_since = now
        """The time since when there are such nodes, or none."""
        self._sent: Report | None = None
        """The last report to the coordinator of another node."""
        self._waiting: list[Action] = []
        """Actions that follow from events."""
        if coordinator is not None:
            coordinator.is_parted = bool(self.unreached)
            self._order()

    # Events

    def link_is_up(self, node: int, now: float) -> None:
        """Send the whole state: earlier messages may be lost."""
        self._reach(self.unreached - {node}, now)
        if self.coordinator is not None:
            self._waiting.append(Send(node, self.coordinator.order_to(node, self.coordinator.order())))
        self._sent = None

    def link_is_down(self, node: int, now: float) -> None:
        """Nothing is lost that ``link_is_up`` would not repeat."""
        if self.coordinator is not None:
            self.coordinator.forget(node)
        if self.coordinator is not None or node == COORDINATOR_NODE:
            self._reach(self.unreached | {node}, now)

    def received(self, node: int, message: Report | Order) -> None:
        """A report at node 0, an order elsewhere."""
        if isinstance(message, Report):
            if message.node == node:
                self._hear(message)
        elif node == COORDINATOR_NODE:
            self._obey(message)

    def verified(self, write: Write) -> None:
        """The node stored the step; see ``NodeGrants.verified``."""
        self._end(write, self.node.verified)

    def missed(self, write: Write) -> None:
        """The step to be written is not in memory any more."""
        self._end(write, self.node.missed)

    def failed(self, write: Write) -> None:
        """The level failed; ``node.probed`` follows once a small write works."""
        self._end(write, self.node.failed)

    def _end(self, write: Write, event: Callable[[Write], None]) -> None:
        event(write)
        self.alone.ended(write)

    # Decisions

    def step(self, look: Callable[[], Sequence[RankView]], now: float) -> Iterator[Action]:
        """Yield what to do; each action is to be carried out before the next one is asked for.

        ``look`` reads the words of the slots of all ranks of the node.
        """
        yield from self._take_waiting()
        while True:
            views = look()
            decision = self.node.decide(views)
            if decision.pin and self.node.word is not None:
                yield Pin(decision.pin, self.node.word)
            if decision.hold and self.node.held is not None:
                yield Hold(decision.hold, self.node.held)
            yield ReleaseStalePins(self.node.word)
            yield from map(Begin, decision.writes)
            report = self.node.report(views)
            self._hear(report)
            yield from self._take_waiting()
            if self.coordinator is None and report != self._sent:
                self._sent = report
                yield Send(COORDINATOR_NODE, report)
            if not self._decide(views):
                break
            yield from self._take_waiting()
        is_parted = bool(self.unreached) or self.node.is_parted
        yield from map(Begin, self.alone.decide(views, now, is_parted=is_parted))

    def _take_waiting(self) -> Iterator[Action]:
        while self._waiting:
            yield self._waiting.pop(0)

    def _decide(self, views: Sequence[RankView]) -> bool:
        """True if the own node got an order."""
        if self.coordinator is None:
            return False
        held = set.intersection(*({slot.step for slot in rank.slots} for rank in views)) if views else set()
        begun = [rank.begun for rank in views] or [-1]
        if not self.coordinator.decide(LocalView(max(begun), frozenset(held), min(begun))):
            return False
        self._order()
        return True

    def _order(self) -> None:
        """Send the coordinator's order to every node."""
        assert self.coordinator is not None
        order = self.coordinator.order()
        for node in range(self.coordinator.num_nodes):
            addressed = self.coordinator.order_to(node, order)
            if node == self.node.node:
                self._obey(addressed)
            else:
                self._waiting.append(Send(node, addressed))

    def _hear(self, report: Report) -> None:
        if self.coordinator is None:
            return
        self.coordinator.receive(report)
        if report.is_ending and not self.coordinator.is_ending:
            self.coordinator.is_ending = True  # at once: a node that does not answer must not hold it up
            self._order()

    def _obey(self, order: Order) -> None:
        if order.is_ending:
            self._waiting.append(GiveNotice())
        self.node.receive(order)
        self._waiting.append(Learn())

    def _reach(self, unreached: frozenset[int], now: float) -> None:
        is_changed, self.unreached = bool(unreached) != bool(self.unreached), unreached
        if is_changed:
            self.unreached_since = now
        if is_changed and self.coordinator is not None:
            self.coordinator.is_parted = bool(unreached)
            self._order()
