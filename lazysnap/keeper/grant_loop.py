"""Grants at work: ``grants.core`` between a keeper's slots, its levels and its links.

One thread per keeper takes events from a queue, hands them to the core, and carries out its actions. With one node
there are no links, and all else is the same.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from lazysnap.grants.core import COORDINATOR_NODE, Action, Begin, Core, GiveNotice, Hold, Learn, Pin, Send, Settle
from lazysnap.grants.node import NodeLevel, RankView, Write
from lazysnap.links.links import Links, Message

logger = logging.getLogger(__name__)

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

    def hold(self, ranks: Sequence[int], step: int) -> None:
        """Hold the slots of the step for parity, of these ranks."""

    def begin(self, write: Write) -> None:
        """Begin a write on a thread of its level, which reports its progress and end to ``GrantLoop``."""

    def learned(self, levels: Sequence[NodeLevel]) -> None:
        """Report complete and lost snapshots to the trainers, and delete expired ones, on other threads."""

    def give_notice(self) -> None:
        """Another node says that all processes are about to be killed. May be called again."""


class GrantLoop:
    """The thread. Its methods may be called from any thread, and never block, but for ``close``."""

    def __init__(self, core: Core, actions: GrantActions) -> None:
        self._core, self._node, self._actions = core, core.node, actions
        self._links: Links | None = None
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._is_closed = False
        self._poll_s = _POLL_S
        self._begun = (-1, time.monotonic())
        """The newest step that a rank began, and when that was seen."""
        self._thread = threading.Thread(target=self._run, name="lazysnap-grants", daemon=True)

    def start(self, links: Links | None) -> None:
        """Begin, if it is not closed. ``links`` have this as their handler, and end with it; ``None``: of one node."""
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
        return self._core.unreached, time.monotonic() - self._core.unreached_since

    @property
    def has_stored_alone(self) -> bool:
        """True if not all nodes answer, all trainers of this node are dead, and it stored alone what it could."""
        return self._core.alone is not None and self._core.alone.is_over

    # Events of the links

    def link_is_up(self, node: int) -> None:
        """Send the whole state: earlier messages may be lost."""
        self._events.put(lambda: self._core.link_is_up(node, time.monotonic()))

    def link_is_down(self, node: int) -> None:
        """Nothing is lost that ``link_is_up`` would not repeat."""
        self._events.put(lambda: self._core.link_is_down(node, time.monotonic()))

    def received(self, node: int, message: Message) -> None:
        """A report at node 0, an order elsewhere."""
        self._events.put(lambda: self._core.received(node, message))

    # Events of the keeper

    def slots_changed(self) -> None:
        """A trainer began a step, died or came back."""
        self._events.put(lambda: None)

    def wish(self, step: int, levels: Sequence[int], *, is_urgent: bool = False) -> None:
        """The step must be stored at these levels."""
        self._events.put(lambda: self._node.wish(step, levels, is_urgent=is_urgent))

    def give_notice(self) -> None:
        """All processes are about to be killed: report that to the other nodes."""
        self._events.put(lambda: self._node.take_notice())

    def leave(self, level: int, end: Callable[[], None]) -> None:
        """Decide nothing on a level from now on, and end what it holds. Blocks: until the present decision is done."""
        with self._lock:
            self._node.levels[level].leave()
            end()

    def listed(self, level: int, steps: set[int] | None) -> None:
        """Record what an earlier keeper of this start stored at a level; ``None``: the level does not answer."""
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
        self._events.put(lambda: self._core.verified(write))

    def missed(self, write: Write) -> None:
        """Record that the step to be written is not in memory any more."""
        self._events.put(lambda: self._core.missed(write))

    def failed(self, write: Write) -> None:
        """The level failed; ``probed`` follows once a small write works."""
        self._events.put(lambda: self._core.failed(write))

    def probed(self, level: int) -> None:
        """A small write to the level worked."""
        self._events.put(lambda: self._node.probed(level))

    def ask(self, level: int, digest: str | None) -> None:
        """Ask to write frozen tensors at a level; ``None``: it is done, or given up."""
        self._events.put(lambda: self._node.ask(level, digest))

    def is_to_write(self, level: int, digest: str) -> bool:
        """True if this node writes the frozen tensors that it asked for. Without a coordinator every node does."""
        with self._lock:
            is_without = self._is_closed or COORDINATOR_NODE in self._core.unreached
            return is_without or self._node.is_to_write(level, digest)

    def give_up(self, level: int, step: int) -> bool:
        """Ask before the node's file of this step is deleted, and obey."""
        with self._lock:
            return not self._is_closed and self._node.give_up(level, step)

    # The thread

    def _run(self) -> None:
        while True:
            events = self._wait()
            if None in events:
                return
            with self._lock:
                # One report and one decision for what came together. No error of one costs another.
                for event in (*events, self._step):
                    try:
                        if event is not None:
                            event()
                    except Exception:
                        logger.exception("grants: an event could not be dealt with; storage goes on with the next")

    def _wait(self) -> list[Callable[[], None] | None]:
        """Return the events; at least one, or none when it is time to look."""
        is_waiting = (self._node.word, self._node.held) != (None, None)
        timeout_s = self._poll_s if is_waiting else _IDLE_S
        events: list[Callable[[], None] | None] = []
        try:
            events.append(self._events.get(timeout=timeout_s))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        return events

    def _step(self) -> None:
        for action in self._core.step(self._look, time.monotonic()):
            if self._is_closed:
                return
            try:
                self._do(action)
            except Exception:
                # The core takes every action as done: the next ones follow, and a write that did not begin is given up.
                logger.exception("grants: %s failed; storage goes on with what follows", type(action).__name__)
                if isinstance(action, Begin):
                    self._core.missed(action.write)

    def _do(self, action: Action) -> None:
        match action:
            case Pin(ranks, step):
                self._actions.pin(ranks, step)
            case Hold(ranks, step):
                self._actions.hold(ranks, step)
            case Settle(word):
                self._actions.settle(word)
            case Begin(write):
                if write.is_alone:
                    logger.warning(
                        "all trainers here are dead and not all nodes answer: this node stores step %d", write.step
                    )
                self._actions.begin(write)
            case Send(node, message):
                if self._links is not None:
                    self._links.send(node, message)
            case GiveNotice():
                self._actions.give_notice()
            case Learn():
                self._actions.learned(self._node.levels)

    def _look(self) -> Sequence[RankView]:
        """Read the slots. With long steps that is needed less often: a slot stays for a step and longer."""
        views = self._actions.views()
        newest, now = max((view.begun for view in views), default=-1), time.monotonic()
        step, since = self._begun
        if newest > step:
            a_step_s = (now - since) / (newest - step)
            self._poll_s = min(max(_POLL_S, a_step_s / _POLLS_PER_STEP), _LONGEST_POLL_S)
            self._begun = newest, now
        return views
