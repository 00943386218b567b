"""All messages of an engine to its user: one table of events, each with its counter, severity and text."""

import enum
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from lazysnap.console import say
from lazysnap.engine.statistics import Statistics

logger = logging.getLogger("lazysnap.engine")

SAID = logging.INFO + 1
"""Severity of lines that users see even if they never configured logging."""


class By(enum.Enum):
    """Ranks that say it; the others log it as INFO."""

    EACH = "each rank"
    NODE = "one rank of each node: all of them receive it"
    FIRST = "rank 0"


@dataclass(frozen=True, eq=False)
class Row:
    """One row of the table."""

    text: str
    """The message: what happened, what is lost, what to do; ``%(name)s`` stands for a value that the caller gives."""
    severity: int = logging.WARNING
    by: By = By.EACH
    counter: str = ""
    """Field of ``Statistics`` that counts it; one with an entry for each level counts it there."""
    topic: str = ""
    """Trouble that lasts. Logged again as DEBUG only, until an event ends it; without such an event once at all."""
    repeats: bool = False
    """True if it is printed each time."""
    ends: str = ""
    """Topic that this ends. It is printed only if the trouble was printed."""


class Event(enum.Enum):
    """The table."""

    # The start. Lines are composed in ``report``.
    STARTS = Row("%(line)s", SAID, By.FIRST)
    NEW_RUN = Row(
        "a new run %(new)s begins at step %(step)d of run %(run)s, which was chosen. The newest snapshot is step "
        "%(newest)d of run %(left)s: it stays where it is stored (in memory it is overwritten in the next steps), and "
        '"latest" means it until run %(new)s has a complete snapshot. To go back to it, restore("run:%(left)s") or '
        'ckpt_path="run:%(left)s"',
        by=By.FIRST,
    )
    BEGINS_AGAIN = Row(
        "boundary(%(step)d) after boundary(%(last)d): from here on snapshots are of a new start of this run. Stored "
        'snapshots of steps above %(step)d stay, and "latest" finds them until this start has stored a greater step. '
        "To train something else make another SnapshotEngine with a directory of its own; to go back call "
        "engine.rollback()",
        by=By.FIRST,
    )
    RESTART_EXACT = Row(
        "step %(step)d was trained again and is identical bit for bit: this training resumes exactly", SAID, By.FIRST
    )
    RESTART_DIFFERS = Row(
        "step %(step)d was trained again and is NOT identical (%(text)s): a restart of this program is not exact. This "
        "usually means %(cause)s; see docs/operations.md, The proof of a restart"
    )
    RESTART_NOT_COMPARED = Row(
        "step %(step)d was to be compared, to prove the restart, and was not: %(text)s", logging.INFO
    )
    TAKES = Row("%(line)s", SAID, By.FIRST)
    NO_ROOM = Row(
        "%(url)s: not even one snapshot fits: it takes %(needed)s, %(free)s are free; free space, or choose another "
        "place",
        by=By.NODE,
    )
    # Captures.
    TORN = Row("the snapshot of step %(step)d is dropped: %(text)s", counter="torn", topic="dropped")
    FAILED = Row("the snapshot of step %(step)d is dropped: %(text)s", counter="failed", topic="dropped")
    UNSUPPORTED = Row("step %(step)d is not captured: %(text)s", topic="state")
    NOT_CAPTURED = Row("step %(step)d is not captured: %(text)s", topic="capture")
    STEPPED_BESIDE = Row("an optimizer stepped beside a running copy; that snapshot is dropped", topic="gate")
    OTHER_OPTIMIZER = Row(
        "%(kind)s, which is not part of the state, trains parameters of a captured optimizer, which does not step: "
        "snapshots lack the state of %(kind)s, and a restart is not exact. Change the settings in param_groups of the "
        "captured optimizer instead of making a new one, or make a new SnapshotEngine with the new one",
        topic="optimizer",
    )
    GRADIENTS_WAIT = Row(
        "step %(step)d is not captured: gradients of %(names)s wait for the next step of that optimizer, and a "
        "snapshot holds no gradients. Such steps are left out: a capture waits for a boundary without such gradients. "
        "Call boundary() only after optimizer.step(), and clear gradients that are not used (zero_grad)",
        topic="waiting gradients",
    )
    GRADIENTS_LOST = Row(
        "step %(step)d is captured without the gradients of %(names)s that wait for the next step of that optimizer: a "
        "restart from it is not exact, unless they are cleared before that step. Call boundary() after "
        "optimizer.step(), and clear gradients that are not used (zero_grad)",
        topic="lost gradients",
    )
    IN_GRAPH = Row(
        "an optimizer step is being captured into a graph: hooks do not run when it is replayed, so snapshots are "
        "torn, and nobody notices, unless you call engine.gate() before every replay()",
        topic="graph",
    )
    SLOW_STATE = Row(
        "collecting the training state took %(ms).0f ms, at every snapshot; look for slow state_dict hooks (in "
        "Lightning also on_save_checkpoint), or raise every_n_steps",
        topic="collecting",
    )
    SLOW_ENCODING = Row(
        "encoding the small state (%(size)s of text) took %(ms).0f ms, at every snapshot; keep long lists of numbers "
        "in NumPy arrays or tensors, which are copied, or raise every_n_steps",
        topic="encoding",
    )
    REPLANNED = Row("the capture plan is made anew: %(cause)s", logging.INFO, counter="replans")
    VALUES_MISSING = Row(
        "%(count)d parameters of %(path)s are in no part of the state: a restart has their optimizer state, not their "
        "values; give the engine the module that they belong to",
        topic="values of %(path)s",
    )
    # Memory.
    NO_MEMORY = Row("NOT protected in memory: %(text)s; %(lost)s", topic="memory")
    STILL_NO_MEMORY = Row("still NOT protected in memory, for %(minutes).0f min: %(text)s; %(lost)s")
    MEMORY_AGAIN = Row("protected in memory again, after %(seconds).0f s without", ends="memory")
    STEPS_WITHOUT_MEMORY = Row(
        "%(count)d step%(s)s of this training were NOT protected in memory, so not captured: %(text)s; newest snapshot "
        "on storage: %(stored)s"
    )
    NO_PARITY = Row("NOT protected against the loss of a node, there is too little memory: %(text)s", topic="parity")
    FILES = Row(
        "captures go into files in %(directory)s: memory does not suffice. They outlive the training process as memory "
        "does, but a step may wait while the kernel writes them to that disk: free memory, or raise every_n_steps",
        topic="files",
    )
    # Levels and names.
    FIRST_STORED = Row(
        "%(level)s: a snapshot of %(size)s takes %(seconds).1f s (%(rate)s/s)", logging.INFO, topic="rate of %(level)s"
    )
    LEVEL_FAILED = Row(
        "step %(step)d is not persisted, training goes on and the next snapshot is tried again: %(text)s",
        by=By.NODE,
        counter="level_failures",
        topic="level %(level)s",
    )
    LEVEL_FAILED_AT_END = Row(
        "step %(step)d is not persisted: %(text)s", by=By.NODE, counter="level_failures", topic="level %(level)s"
    )
    LEVEL_AWAY = Row(
        "%(level)s: nothing can be stored there now, training goes on and it is tried again: %(text)s",
        by=By.NODE,
        topic="level %(level)s",
    )
    LEVEL_WORKS = Row("%(level)s works again: step %(step)d is durable there", by=By.NODE, ends="level %(level)s")
    NAME_LOST = Row("no snapshot is called %(name)r: %(text)s", by=By.NODE)
    NAME_NOT_AS_ASKED = Row("%(level)s: the name %(name)r is not as asked for: %(text)s", by=By.NODE)
    # Keepers.
    KEEPER_TROUBLE = Row("%(text)s", by=By.NODE)
    KEEPER_LOST = Row(
        "the keeper is gone, a new one is being started", by=By.NODE, counter="keepers_lost", topic="keeper"
    )
    KEEPER_SILENT = Row(
        "the keeper of this node (process %(pid)d on %(node)s) does not answer: training and captures into memory go "
        "on, but nothing of rank %(rank)d is stored until it answers. Look whether the process is stopped or its "
        "machine overloaded; if you kill it, another one is started and takes over its memory",
        topic="silent",
    )
    KEEPER_ANSWERS = Row("the keeper (process %(pid)d) answers again: snapshots are stored again", ends="silent")
    UNLINKED = Row(
        "nothing new is stored, or protected on other nodes: %(text)s", by=By.NODE, topic="links", repeats=True
    )
    LINKED = Row(
        "the keepers of all nodes reach each other again: storage and protection go on", by=By.NODE, ends="links"
    )
    NODE_UNPROTECTED = Row(
        "NOT protected against the loss of a node: %(text)s", by=By.NODE, topic="nodes", repeats=True
    )
    NODE_PROTECTED = Row("protected against the loss of a node again", by=By.NODE, ends="nodes")
    # Going back.
    ROLLED_BACK = Row(
        "rolled back from step %(from_step)d to step %(step)d%(reason)s: restored from %(level)s in %(took)s; the "
        "batches since step %(step)d are skipped",
        SAID,
        By.FIRST,
        counter="rollbacks",
    )
    NOT_CAPTURED_BACK = Row(
        "step %(step)d could not be captured after the rollback: until the next capture is whole, "
        '"latest" means the newest snapshot of the run before, which may be a bad one'
    )
    # The end. Lines are composed in ``report``.
    ENDS = Row("%(line)s", SAID, By.FIRST)
    NOT_DURABLE = Row("%(line)s", by=By.FIRST)
    NOT_AT_EVERY_LEVEL = Row("the last snapshot is not durable at every level. %(reason)s")
    END_UNKNOWN = Row("it is not known if the last snapshot is durable on all ranks: %(text)s")
    LAST_NOT_CAPTURED = Row(
        "step %(step)d, the last that was due, is not captured (so far: %(missing)s), so it is nowhere; the newest "
        "snapshot of this training is %(newest)s. %(reason)s"
    )


class Messages:
    """Counts and prints events. Used on the training thread."""

    def __init__(self, statistics: Statistics, *, is_first: bool = True, speaks_for_node: bool = True) -> None:
        self.statistics = statistics
        self._speaks = {By.EACH: True, By.NODE: speaks_for_node, By.FIRST: is_first}
        self._open: set[str] = set()

    def tell(self, event: Event, **values: Any) -> None:
        """Count the event, and print it unless its trouble is known."""
        row: Row = event.value
        if row.counter:
            self._count(row.counter, values)
        topic, ends = row.topic % values, row.ends % values
        if ends and ends not in self._open:
            return
        self._open.discard(ends)
        severity = row.severity if self._speaks[row.by] else logging.INFO
        if topic in self._open and not row.repeats:
            severity = logging.DEBUG
        if topic:
            self._open.add(topic)
        if severity == SAID:
            say(row.text % values)
        else:
            logger.log(severity, row.text, *([values] if values else []))

    def is_known(self, topic: str) -> bool:
        """True if trouble of this topic was printed, and nothing ended it."""
        return topic in self._open

    def over(self, *topics: str) -> None:
        """Trouble of these topics ended. Prints nothing."""
        self._open -= {*topics}

    def _count(self, counter: str, values: dict[str, Any]) -> None:
        found = getattr(self.statistics, counter)
        if isinstance(found, Counter):
            found[values["level"]] += 1
        else:
            setattr(self.statistics, counter, found + 1)
