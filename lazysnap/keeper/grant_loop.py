"""Grants at work: ``grants.core`` between a keeper's slots, its levels and its links.

One thread per keeper takes events from a queue, hands them to the core, and has its actions carried out. With one node
there are no links, and all else is the same.
"""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec

from lazysnap.config import PersistentLevel
from lazysnap.grants.alone import StoringAlone
from lazysnap.grants.coordinator import Coordinator, LevelGrants
from lazysnap.grants.core import COORDINATOR_NODE, Action, Begin, Core, Send
from lazysnap.grants.messages import Progress, StepKey
from lazysnap.grants.node import NodeGrants, NodeLevel, RankView, Write
from lazysnap.keeper.protocol import Run
from lazysnap.links.links import Links, Message
from lazysnap.topology import Team

logger = logging.getLogger(__name__)

P = ParamSpec("P")
_POLL_S, _LONGEST_POLL_S = 0.02, 0.2
"""While a granted step is waited for, the words of the slots are looked at so often, or a few times per step."""
_POLLS_PER_STEP = 5
_IDLE_S = 1.0


def make_core(levels: Sequence[PersistentLevel], run: Run, team: Team, alone_after_s: float) -> Core:
    """Return the grants of one node for one start; on node 0 with the coordinator.

    What the restart saw at a level counts as complete: the coordinator lists only the newest. ``alone_after_s``: how
    long other nodes may be silent before this node stores its captures alone.
    """
    earlier = [frozenset(StepKey(step, start) for start, step in run.stored.get(level.url, ())) for level in levels]
    node_levels = [NodeLevel(progress=Progress.LISTING, complete={*known}) for known in earlier]
    for settings, node_level in zip(levels, node_levels, strict=True):
        node_level.remembered = max(node_level.remembered, settings.keep_last)
    every = run.every_n_steps
    grants = [
        LevelGrants(level, earlier=known, captures_every=every) for level, known in zip(levels, earlier, strict=True)
    ]
    if run.parity is not None and run.peers is not None:
        node_levels.append(NodeLevel(is_memory=True))
        # It has no place: its interval counts.
        settings = PersistentLevel("parity", every_n_steps=run.parity.every_n_steps)
        grants.append(LevelGrants(settings, is_memory=True, captures_every=every))
    node = NodeGrants(team.node, run.start, tuple(node_levels))
    coordinator = None
    if team.node == COORDINATOR_NODE:
        coordinator = Coordinator(secrets.randbits(62), run.start, team.nodes, tuple(grants))
    return Core(node, coordinator, StoringAlone(node, run.num_kept, alone_after_s), time.monotonic())


class GrantLoop:
    """The thread. Its methods may be called from any thread, and never block, but for ``close``."""

    def __init__(self, core: Core, look: Callable[[], Sequence[RankView]], act: Callable[[Action], None]) -> None:
        """``look`` reads the words of the slots of all ranks of the node. ``act`` carries out an action.

        Both are called on the grants' thread: nothing there may take long. ``act`` never gets a ``Send``.
        """
        self.core, self.node = core, core.node
        """Their events are handed to ``post``."""
        self.lock = threading.RLock()
        """Held while a decision is made and carried out."""
        self._look_at_slots, self._act = look, act
        self._links: Links | None = None
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._poll_s = _POLL_S
        self._begun = (-1, time.monotonic())
        """The newest step that a rank began, and when that was seen."""
        self._thread = threading.Thread(target=self._run, name="lazysnap-grants", daemon=True)

    def start(self, links: Links | None) -> None:
        """Begin, if it is not closed. ``links`` have this as their handler, and end with it; ``None``: of one node."""
        with self.lock:
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
        with self.lock:
            links, is_started = self._links, self._thread.is_alive()
        if is_started:
            self._thread.join()
        if links is not None:
            links.close()

    @property
    def unreached(self) -> tuple[frozenset[int], float]:
        """Nodes without which nothing is stored and to which there is no link, and for how many seconds that is so."""
        return self.core.unreached, time.monotonic() - self.core.unreached_since

    def post(self, event: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Hand an event of ``core`` or ``node`` over: it is dealt with soon, and a decision follows."""
        self._events.put(partial(event, *args, **kwargs))

    def slots_changed(self) -> None:
        """A trainer began a step, died or came back."""
        self._events.put(lambda: None)

    # Events of the links

    def link_is_up(self, node: int) -> None:
        """Send the whole state: earlier messages may be lost."""
        self._events.put(lambda: self.core.link_is_up(node, time.monotonic()))

    def link_is_down(self, node: int) -> None:
        """Nothing is lost that ``link_is_up`` would not repeat."""
        self._events.put(lambda: self.core.link_is_down(node, time.monotonic()))

    def received(self, node: int, message: Message) -> None:
        """A report at node 0, an order elsewhere."""
        self.post(self.core.received, node, message)

    # Questions of the writers

    def is_wanted(self, write: Write) -> bool:
        """Ask just before the commit, and obey."""
        # When this start is over, what was under way may still come to its end: nobody counts it.
        with self.lock:
            return self._is_closed or self.node.is_wanted(write)

    def is_to_write(self, level: int, digest: str) -> bool:
        """True if this node writes the frozen tensors that it asked for. Without a coordinator every node does."""
        with self.lock:
            is_without = self._is_closed or COORDINATOR_NODE in self.core.unreached
            return is_without or self.node.is_to_write(level, digest)

    def give_up(self, level: int, step: int) -> bool:
        """Ask before the node's file of this step is deleted, and obey."""
        with self.lock:
            return not self._is_closed and self.node.give_up(level, step)

    # The thread

    def _run(self) -> None:
        while True:
            events = self._wait()
            if None in events:
                return
            with self.lock:
                # One report and one decision for what came together. No error of one costs another.
                for event in (*events, self._step):
                    try:
                        if event is not None:
                            event()
                    except Exception:
                        logger.exception("grants: an event could not be dealt with; storage goes on with the next")

    def _wait(self) -> list[Callable[[], None] | None]:
        """Return the events; at least one, or none when it is time to look."""
        is_waiting = (self.node.word, self.node.held) != (None, None)
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
        for action in self.core.step(self._look, time.monotonic()):
            if self._is_closed:
                return
            try:
                if not isinstance(action, Send):
                    self._act(action)
                elif self._links is not None:
                    self._links.send(action.node, action.message)
            except Exception:
                # The core takes every action as done: the next ones follow, and a write that did not begin is given up.
                logger.exception("grants: %s failed; storage goes on with what follows", type(action).__name__)
                if isinstance(action, Begin):
                    self.core.missed(action.write)

    def _look(self) -> Sequence[RankView]:
        """Read the slots. With long steps that is needed less often: a slot stays for a step and longer."""
        views = self._look_at_slots()
        newest, now = max((view.begun for view in views), default=-1), time.monotonic()
        step, since = self._begun
        a_step_s = (now - since) / max(1, newest - step)
        if newest > step:
            self._poll_s, self._begun = 0.0, (newest, now)
        # The step in progress takes at least as long as it did so far: while training rests, little is looked at.
        self._poll_s = min(max(_POLL_S, self._poll_s, a_step_s / _POLLS_PER_STEP), _LONGEST_POLL_S)
        return views
