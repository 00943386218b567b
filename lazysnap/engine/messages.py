"""The messages of an engine to its user: a table of events, each with severity, counter and text."""

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lazysnap.console import say
from lazysnap.engine.statistics import Statistics

logger = logging.getLogger("lazysnap.engine")

SHOWN = logging.INFO + 1
"""Severity of lines that users see without configuring logging."""


_FIRST_REMINDER_S = 60.0
"""Seconds from the first report of a problem to the second one."""
_REMINDER_S = 600.0
"""Seconds between later reports."""


class Speaker(enum.Enum):
    """Ranks that report an event; the others log it at INFO."""

    EACH = "each rank"
    NODE = "one rank of each node: all of them receive it"
    FIRST = "rank 0"


@dataclass(frozen=True, eq=False)
class MessageRow:
    """One row of the table."""

    text: str
    """The message: what happened, what is lost, what to do. ``%(name)s`` stands for a value of the caller."""
    over: str = ""
    """The message when this problem is over; empty if it has none."""
    severity: int = logging.WARNING
    by: Speaker = Speaker.EACH
    counter: str = ""
    """The field of ``Statistics`` that counts the event."""
    is_lasting: bool = False
    """True for a lasting problem. With ``over`` it is reported once. Without ``over`` it is reported again after a
    minute, then every ten minutes.
    """
    of: str = ""
    """The value that distinguishes the problems of this row, such as the level."""


class MessageKind(enum.Enum):
    """The table. ``docs/troubleshooting.md`` has an entry for each row."""

    # The start and the end. ``report`` composes these lines.
    START = MessageRow("%(line)s", severity=SHOWN, by=Speaker.FIRST)
    SIZES = MessageRow(
        "state %(state)s; %(use)s; %(available)s available; %(stored)s", severity=SHOWN, by=Speaker.FIRST
    )
    NEW_RUN = MessageRow(
        "a new run %(new)s begins at step %(step)d of run %(run)s, as you chose. The newest snapshot, step %(newest)d "
        'of run %(left)s, stays on storage, and "latest" means it until run %(new)s has a complete snapshot. To go '
        'back to it: restore("run:%(left)s") or ckpt_path="run:%(left)s"',
        by=Speaker.FIRST,
    )
    BEGINS_AGAIN = MessageRow(
        "boundary(%(step)d) after boundary(%(last)d): snapshots are of a new start of this run from here on. Stored "
        'snapshots of later steps stay, and "latest" finds them until this start has stored a later step. To train '
        "something else, make another SnapshotEngine with a directory of its own; to go back, call engine.rollback()",
        by=Speaker.FIRST,
    )
    RESTART_EXACT = MessageRow(
        "step %(step)d was trained again and is identical bit for bit: %(scope)s",
        severity=SHOWN,
        by=Speaker.FIRST,
    )
    RESTART_DIFFERS = MessageRow(
        "step %(step)d was trained again and is NOT identical (%(text)s): a restart of this program is not exact. This "
        "usually means %(cause)s; see docs/operations.md, The proof of a restart"
    )
    RESTART_NOT_COMPARED = MessageRow(
        "step %(step)d was to be compared, to prove the restart, and was not: %(text)s. Training is not affected",
        severity=SHOWN,
    )
    END = MessageRow("%(line)s", severity=SHOWN, by=Speaker.FIRST)
    NOT_DURABLE = MessageRow("NOT DURABLE: %(what)s; %(fate)s", by=Speaker.FIRST)
    LAST_NOT_CAPTURED = MessageRow(
        "step %(step)d, the last that was due, is not captured, so a restart trains it again; the newest snapshot of "
        "this training is %(newest)s. %(reason)s"
    )
    END_UNKNOWN = MessageRow(
        "a rank did not answer at the end, so it is unknown whether all ranks have stored the last snapshot; "
        "`lazysnap ls` shows which snapshots are complete: %(text)s"
    )
    # Captures.
    TORN = MessageRow(
        "the snapshot of step %(step)d is dropped, the one before it stays: %(text)s. If this comes often, call "
        "engine.gate() before the code that changes tensors",
        counter="torn",
        is_lasting=True,
    )
    FAILED = MessageRow(
        "the snapshot of step %(step)d is dropped, the one before it stays: %(text)s",
        counter="failed",
        is_lasting=True,
    )
    NOT_CAPTURED = MessageRow("step %(step)d is not captured: %(text)s", is_lasting=True, of="kind")
    OTHER_OPTIMIZER = MessageRow(
        "%(kind)s, which is not part of the state, trains parameters of a captured optimizer, which does not step: "
        "snapshots lack its state, and a restart is not exact. Change param_groups of the captured optimizer instead "
        "of making a new one, or make a new SnapshotEngine with the new one",
        is_lasting=True,
    )
    GRADIENTS_WAIT = MessageRow(
        "step %(step)d is not captured: gradients of %(names)s wait for the next step of that optimizer, and a "
        "snapshot holds no gradients. The next boundary without such gradients is captured. Call boundary() only after "
        "optimizer.step(), and clear gradients that are not used (zero_grad)",
        is_lasting=True,
    )
    GRADIENTS_LOST = MessageRow(
        "step %(step)d is captured without the gradients of %(names)s that wait for the next step of that optimizer: a "
        "restart from it is not exact, unless they are cleared before that step. Call boundary() after "
        "optimizer.step(), and clear gradients that are not used (zero_grad)",
        is_lasting=True,
    )
    IN_GRAPH = MessageRow(
        "an optimizer step is being captured into a graph: hooks do not run when it is replayed, so snapshots are "
        "torn, without a sign, unless you call engine.gate() before every replay()",
        is_lasting=True,
    )
    SLOW_STATE = MessageRow(
        "collecting the training state takes %(ms).0f ms of every snapshot, %(encoding_ms).0f ms of it for plain "
        "values: look for slow state_dict hooks (in Lightning also on_save_checkpoint), keep long lists of numbers in "
        "NumPy arrays or tensors, or raise every_n_steps",
        is_lasting=True,
    )
    VALUES_MISSING = MessageRow(
        "%(count)d parameters of %(path)s are in no part of the state: a restart has their optimizer state, not their "
        "values; give the engine the module that they belong to",
        is_lasting=True,
        of="path",
    )
    # Memory.
    NO_MEMORY = MessageRow(
        "NOT protected in memory%(since)s: %(text)s; %(lost)s",
        over="protected in memory again, after %(seconds).0f s without",
    )
    STEPS_WITHOUT_MEMORY = MessageRow(
        "%(count)d step%(s)s of this training were NOT protected in memory, so not captured: %(text)s; newest snapshot "
        "on storage: %(stored)s"
    )
    NO_PARITY = MessageRow(
        "NOT protected against the loss of a node, there is too little memory: %(text)s", is_lasting=True
    )
    FILES = MessageRow(
        "captures go into files in %(directory)s: memory does not suffice. They outlive the training process as memory "
        "does, but a step may wait while the kernel writes them to that disk: free memory, or raise every_n_steps",
        is_lasting=True,
    )
    # Levels and names.
    LEVEL_FAILS = MessageRow(
        "%(level)s cannot store %(what)s: %(text)s. It is tried again; until a message says that it works again, "
        "nothing newer is stored there. To test it: lazysnap doctor %(level)s",
        over="%(level)s works again: step %(step)d is durable there",
        by=Speaker.NODE,
        is_lasting=True,
        of="level",
    )
    NAME_FAILS = MessageRow("the name %(name)r is not as you asked for: %(text)s", by=Speaker.NODE)
    # Keepers.
    KEEPER_TROUBLE = MessageRow("%(text)s", by=Speaker.NODE)
    KEEPER_LOST = MessageRow(
        "the keeper is gone, a new one is being started and takes over the memory; until then a crash loses the steps "
        "that are not stored. If this comes again, look what ends it (a memory limit, pkill)",
        by=Speaker.NODE,
        counter="keepers_lost",
        is_lasting=True,
    )
    KEEPER_SILENT = MessageRow(
        "the keeper of this node (process %(pid)d on %(node)s) does not answer: training continues, and captures as "
        "long as a copy in memory is free, but nothing of rank %(rank)d is stored until it answers. Look whether the "
        "process is stopped or its machine overloaded; if you kill it, another one is started and takes over its "
        "memory",
        over="the keeper (process %(pid)d) answers again: snapshots are stored again",
        is_lasting=True,
    )
    UNLINKED = MessageRow(
        "nothing new is stored, or protected on other nodes%(since)s: %(text)s",
        over="the keepers of all nodes reach each other again: storage and protection continue",
        by=Speaker.NODE,
    )
    NODE_UNPROTECTED = MessageRow(
        "NOT protected against the loss of a node%(since)s: %(text)s",
        over="protected against the loss of a node again",
        by=Speaker.NODE,
    )
    # Rollback.
    ROLLED_BACK = MessageRow(
        "rolled back from step %(from_step)d to step %(step)d%(reason)s: restored from %(level)s in %(took)s; the "
        "batches since step %(step)d are skipped",
        severity=SHOWN,
        by=Speaker.FIRST,
        counter="rollbacks",
    )
    BRANCH_NOT_CAPTURED = MessageRow(
        "step %(step)d could not be captured after the rollback: until the next capture is whole, "
        '"latest" means the newest snapshot of the run before, which may be a bad one'
    )


@dataclass
class _OpenTrouble:
    since_s: float
    """Time of the first report."""
    next_s: float
    """Time of the next report."""


class Messages:
    """Counts and prints events. Used on the training thread.

    Example::

        messages = Messages(Statistics())
        messages.tell(MessageKind.LEVEL_FAILS, level="/disk", what="step 4", text="disk full")
        messages.tell_over(MessageKind.LEVEL_FAILS, level="/disk", step=5)
    """

    def __init__(
        self,
        statistics: Statistics,
        *,
        is_first: bool = True,
        speaks_for_node: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.statistics = statistics
        self._speaks = {Speaker.EACH: True, Speaker.NODE: speaks_for_node, Speaker.FIRST: is_first}
        self._clock = clock
        self._open: dict[tuple[MessageKind, Any], _OpenTrouble] = {}
        """Problems that were reported and are not over."""

    def tell(self, event: MessageKind, **values: Any) -> None:
        """Count the event, and print it unless the problem is already reported."""
        row: MessageRow = event.value
        if row.counter:
            count = getattr(self.statistics, row.counter)
            setattr(self.statistics, row.counter, count + 1)
        trouble = (event, values.get(row.of))
        now_s = self._clock()
        known = self._open.get(trouble)
        is_due = known is None or not row.is_lasting or (not row.over and now_s >= known.next_s)
        if not is_due:
            logger.debug("%s", row.text % values)
            return
        if known is not None:
            known.next_s = now_s + _REMINDER_S
        elif row.is_lasting or row.over:
            self._open[trouble] = _OpenTrouble(now_s, now_s + _FIRST_REMINDER_S)
        self._print(row, row.text, {"since": "", **values})

    def tell_again(self, event: MessageKind, **values: Any) -> None:
        """Print lasting problems again if it is time: after a minute, then every ten. Hot."""
        row: MessageRow = event.value
        trouble = self._open.get((event, values.get(row.of)))
        now_s = self._clock()
        if trouble is not None and now_s >= trouble.next_s:
            trouble.next_s = now_s + _REMINDER_S
            minutes = (now_s - trouble.since_s) / 60
            self._print(row, row.text, {"since": f" for {minutes:.0f} min", **values})

    def tell_over(self, event: MessageKind, **values: Any) -> None:
        """Print that a problem is over, if it was reported."""
        row: MessageRow = event.value
        trouble = self._open.pop((event, values.get(row.of)), None)
        if trouble is not None:
            self._print(row, row.over, {"seconds": self._clock() - trouble.since_s, **values})

    def forget(self, event: MessageKind) -> None:
        """Record that a problem is over. Prints nothing."""
        self._open.pop((event, None), None)

    def _print(self, row: MessageRow, text: str, values: dict[str, Any]) -> None:
        severity = row.severity
        if not self._speaks[row.by]:
            severity = logging.INFO
        if severity == SHOWN:
            say(text % values)
        else:
            logger.log(severity, "%s", text % values)
