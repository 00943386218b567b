"""Grants at work: the decisions of ``grants`` between a keeper's slots, its levels and its links.

One thread per keeper takes what happens from a queue, lets the pure code decide, and acts. On the node of rank 0, which
is node 0, it also plays the coordinator. With one node there are no links, and all else is the same.
"""

import heapq
import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from lazysnap.grants.alone import StoringAlone
from lazysnap.grants.coordinator import Coordinator, Own
from lazysnap.grants.messages import Order, Report
from lazysnap.grants.node import NodeGrants, NodeLevel, RankView, Write
from lazysnap.links.links import Links, Message

logger = logging.getLogger(__name__)

_draws = random.SystemRandom()
"""The global generators are the training's."""
COORDINATOR_NODE = 0
_POLL_S, _LONGEST_POLL_S = 0.02, 0.2
"""While a granted step is waited for, the words of the slots are looked at so often, or a few times per step."""
_POLLS_PER_STEP = 5
_IDLE_S = 1.0


class GrantActions(Protocol):
    """The keeper's work for the grants. Called on the grants' thread: nothing here may take long."""

    def views(self) -> Sequence[RankView]:
        """The words of the slots of all ranks of the node."""

    def settle(self, word: int | None) -> None:
        """Store the control word that the trainers read, *then* remove every pin of another step."""

    def pin(self, ranks: Sequence[int], step: int) -> None:
        """Pin the slots that hold the step, of these ranks."""

    def begin(self, write: Write) -> None:
        """Begin a write on a thread of its level, which tells ``GrantLoop`` what becomes of it."""

    def learned(self, levels: Sequence[NodeLevel]) -> None:
        """An order was obeyed: tell trainers what is complete or lost, and delete what expired, on other threads."""

    def give_notice(self) -> None:
        """Another node says that all processes are about to be killed. May be called again."""


class GrantLoop:
    """The thread. Its methods may be called from any thread, and never block, but for ``close``."""

    def __init__(
        self,
        node: NodeGrants,
        actions: GrantActions,
        coordinator: Coordinator | None,
        alone: StoringAlone | None = None,
    ) -> None:
        """``coordinator``: on node 0. ``alone``: decides what is stored when not all nodes answer; default: nothing."""
        self._node, self._actions, self._coordinator, self._alone = node, actions, coordinator, alone
        self._links: Links | None = None
        self._events: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Callable[[], bool]]] = []
        self._count = itertools.count()
        self._lock = threading.RLock()
        self._is_left = self._is_closed = False
        self._unreached: frozenset[int] = frozenset()
        self._changed_at = time.monotonic()
        self._poll_s = _POLL_S
        self._begun = (-1, time.monotonic())
        """The newest step that a rank began, and when that was seen."""
        self._thread = threading.Thread(target=self._run, name="lazysnap-grants", daemon=True)

    def start(self, links: Links | None) -> None:
        """Begin, if it is not closed. ``links`` have this as their handler, and end with it; ``None``: of one node."""
        if self._coordinator is None:
            self._unreached = frozenset({COORDINATOR_NODE})
        else:
            self._unreached = frozenset(range(self._coordinator.num_nodes)) - {COORDINATOR_NODE}
            self._coordinator.is_parted = bool(self._unreached)
        with self._lock:
            self._links = links
            if not self._is_closed:
                self._thread.start()
                return
        if links is not None:
            links.close()

    def close(self) -> None:
        """Stop deciding. Blocks: until the present decision is done."""
        self._is_closed = True
        self._events.put(None)
        with self._lock:
            links, is_started = self._links, self._thread.is_alive()
        if is_started:
            self._thread.join()
        if links is not None:
            links.close()

    @property
    def unreached(self) -> tuple[frozenset[int], float]:
        """Nodes without which nothing is stored and to which there is no link, and for how many seconds that is so."""
        return self._unreached, time.monotonic() - self._changed_at

    @property
    def has_stored_alone(self) -> bool:
        """True if not all nodes answer, all trainers of this node are dead, and it stored alone what it could."""
        return self._alone is not None and self._alone.is_over

    # What the links tell

    def link_is_up(self, node: int) -> None:
        """Send the whole state: earlier messages may be lost."""
        self._events.put(lambda: self._greet(node))

    def link_is_down(self, node: int) -> None:
        """Nothing is lost that ``link_is_up`` would not repeat."""
        self._events.put(lambda: self._lose(node))

    def received(self, node: int, message: Message) -> None:
        """A report at node 0, an order elsewhere."""
        self._events.put(lambda: self._take(node, message))

    # What the keeper tells

    def slots_changed(self) -> None:
        """A trainer began a step, died or came back."""
        self._events.put(lambda: False)

    def wish(self, step: int, *, is_urgent: bool = False) -> None:
        """The step must be stored at every level."""
        self._events.put(lambda: self._node.wish(step, is_urgent=is_urgent))

    def give_notice(self) -> None:
        """All processes are about to be killed: tell the other nodes."""
        self._events.put(self._node.take_notice)

    def listed(self, level: int, steps: set[int] | None) -> None:
        """The snapshots that an earlier keeper of this start stored; ``None``: the level does not tell."""
        self._events.put(lambda: self._node.listed(level, steps))

    def wait_for_decision(self) -> None:
        """Block until the decision under way, if there is one, was carried out."""
        with self._lock:
            pass

    def is_wanted(self, write: Write) -> bool:
        """Ask just before the commit, and obey."""
        # When this start is over, what was under way may still come to its end: nobody counts it.
        with self._lock:
            return self._is_closed or self._node.is_wanted(write)

    def committed(self, write: Write) -> None:
        """The file is there; ``verified`` or ``failed`` follows."""
        self._events.put(lambda: self._node.committed(write))

    def verified(self, write: Write) -> None:
        """The file was read back."""
        self._events.put(lambda: self._end(write, self._node.verified))

    def missed(self, write: Write) -> None:
        """Record that the step to be written is not in memory any more."""
        self._events.put(lambda: self._end(write, self._node.missed))

    def failed(self, write: Write) -> None:
        """The level failed; ``probed`` follows once a small write works."""
        self._events.put(lambda: self._end(write, self._node.failed))

    def probed(self, level: int) -> None:
        """A small write to the level worked."""
        self._events.put(lambda: self._node.probed(level))

    def ask(self, level: int, digest: str | None) -> None:
        """Ask to write frozen tensors at a level; ``None``: it is done, or given up."""
        self._events.put(lambda: self._node.ask(level, digest))

    def is_to_write(self, level: int, digest: str) -> bool:
        """True if this node writes the frozen tensors that it asked for. Without a coordinator every node does."""
        with self._lock:
            is_without = self._is_closed or COORDINATOR_NODE in self._unreached
            return is_without or self._node.is_to_write(level, digest)

    def give_up(self, level: int, step: int) -> bool:
        """Ask before the node's file of this step is deleted, and obey."""
        with self._lock:
            return not self._is_closed and self._node.give_up(level, step)

    # The thread

    def _run(self) -> None:
        if self._coordinator is not None:
            self._order()
        while True:
            events = self._wait()
            if None in events:
                return
            try:
                self._act([event for event in events if event is not None])
            except Exception:
                logger.exception("grants: an event could not be dealt with; storage goes on with the next")

    def _wait(self) -> list[Callable[[], bool] | None]:
        """Return the events; at least one, or none when it is time to look."""
        is_waiting = self._node.word is not None
        timeout_s = self._poll_s if is_waiting else _IDLE_S
        if self._timers:
            timeout_s = min(timeout_s, max(0.0, self._timers[0][0] - time.monotonic()))
        events: list[Callable[[], bool] | None] = []
        try:
            events.append(self._events.get(timeout=timeout_s))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        while self._timers and self._timers[0][0] <= time.monotonic():
            events.append(heapq.heappop(self._timers)[2])
        return events

    def _act(self, events: Sequence[Callable[[], bool]]) -> None:
        """Deal with what came together; one report and one decision for all of it."""
        with self._lock:
            is_news = any([self._is_news(event) for event in events])
            while not self._is_closed:
                views = self._actions.views()
                self._time(views)
                decision = self._node.decide(views)
                if decision.pin and self._node.word is not None:
                    self._actions.pin(decision.pin, self._node.word)
                self._actions.settle(self._node.word)
                for write in decision.writes:
                    self._actions.begin(write)
                report = self._node.report(views)
                is_news = is_news or decision.is_news or (report.left is not None) != self._is_left
                self._is_left = report.left is not None
                self._send(report, is_news=is_news)
                if not self._decide(views):
                    self._store_alone(views)
                    return
                is_news = False

    def _time(self, views: Sequence[RankView]) -> None:
        """Long steps need to be looked for less often: a slot stays for a step and longer."""
        newest, now = max((view.begun for view in views), default=-1), time.monotonic()
        step, since = self._begun
        if newest > step:
            a_step_s = (now - since) / (newest - step)
            self._poll_s = min(max(_POLL_S, a_step_s / _POLLS_PER_STEP), _LONGEST_POLL_S)
            self._begun = newest, now

    @staticmethod
    def _is_news(event: Callable[[], bool]) -> bool:
        try:
            return event()
        except Exception:  # those that came with it must not be lost
            logger.exception("grants: an event could not be dealt with; storage goes on with the next")
            return True

    def _send(self, report: Report, *, is_news: bool) -> None:
        """Send the report to the coordinator; the own one always has the newest."""
        if self._coordinator is not None:
            self._hear(report)
        elif is_news and self._links is not None:
            self._links.send(COORDINATOR_NODE, report)

    def _take(self, node: int, message: Message) -> bool:
        """True if there is something to report."""
        if isinstance(message, Report):
            if self._coordinator is not None and message.node == node:
                self._hear(message)
            return False
        return node == COORDINATOR_NODE and self._obey(message)

    def _obey(self, order: Order) -> bool:
        is_news = self._node.receive(order)
        if order.is_ending:
            self._actions.give_notice()
        if order.epoch == self._node.epoch:
            self._actions.learned(self._node.levels)
        return is_news

    def _greet(self, node: int) -> bool:
        self._reach(self._unreached - {node})
        if self._coordinator is not None and self._links is not None:
            self._links.send(node, self._coordinator.order_to(node, self._coordinator.order()))
        return node == COORDINATOR_NODE

    def _lose(self, node: int) -> bool:
        if self._coordinator is not None:
            self._coordinator.forget(node)
        if self._coordinator is not None or node == COORDINATOR_NODE:
            self._reach(self._unreached | {node})
        return False

    def _reach(self, unreached: frozenset[int]) -> None:
        is_changed, self._unreached = bool(unreached) != bool(self._unreached), unreached
        if is_changed:
            self._changed_at = time.monotonic()
        if is_changed and self._coordinator is not None:
            self._coordinator.is_parted = bool(unreached)
            self._order()

    def _hear(self, report: Report) -> None:
        assert self._coordinator is not None
        if report.is_ending and not self._coordinator.is_ending:
            self._coordinator.is_ending = True  # at once: a node that does not answer must not hold it up
            self._order()
        if self._coordinator.receive(report):
            due = time.monotonic() + self._coordinator.pause_s(_draws.random())
            heapq.heappush(self._timers, (due, next(self._count), self._outbid))

    def _outbid(self) -> bool:
        assert self._coordinator is not None
        if self._coordinator.outbid():
            self._order()
        return False

    def _decide(self, views: Sequence[RankView]) -> bool:
        """True if the own node got an order."""
        if self._coordinator is None:
            return False
        held = set.intersection(*({slot.step for slot in rank.slots} for rank in views)) if views else set()
        begun = [rank.begun for rank in views] or [-1]
        own = Own(max(begun), frozenset(held), min(begun))
        if not self._coordinator.decide(own):
            return False
        self._order()
        return True

    def _order(self) -> None:
        """Send the coordinator's order to every node."""
        assert self._coordinator is not None
        order = self._coordinator.order()
        if self._links is not None:
            for node in range(self._coordinator.num_nodes):
                if node != self._node.node:
                    self._links.send(node, self._coordinator.order_to(node, order))
        self._obey(self._coordinator.order_to(self._node.node, order))

    def _end(self, write: Write, event: Callable[[Write], bool]) -> bool:
        is_news = event(write)
        if self._alone is not None:
            self._alone.ended(write)
        return is_news

    def _store_alone(self, views: Sequence[RankView]) -> None:
        if self._alone is None:
            return
        is_parted = bool(self._unreached) or self._node.is_parted
        writes = self._alone.decide(views, time.monotonic(), is_parted=is_parted)
        if writes:
            steps = [write.step for write in writes]
            logger.warning("all trainers here are dead and not all nodes answer: this node stores steps %s", steps)
        for write in writes:
            self._actions.begin(write)
