"""The notes of a keeper for the reports of its run (``lazysnap.events``). It decides nothing, and may fail.

The main thread looks at the ranks from time to time, messages to trainers pass by on any thread. ``keeper.event_file``
writes them down.
"""

import contextlib
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, ParamSpec

from msgspec.structs import replace

from lazysnap import events
from lazysnap.config import is_path, resolve_url
from lazysnap.keeper import protocol
from lazysnap.keeper.event_file import EventFileWriter
from lazysnap.keeper.held import MAX_COMPLETE
from lazysnap.keeper.local_rank import LocalRank
from lazysnap.levels.redaction import Redaction
from lazysnap.memory.arena import SlotPhase, Word

logger = logging.getLogger(__name__)
P = ParamSpec("P")

_LEAST_S = 1.0
_MOST_S = 30.0
_SHARE = 1000
"""Seconds between two looks at a trainer: the thousandth of those that it has trained, within these bounds."""
_CLOSE_S = 5.0
# Not by import: what imports the package itself may import torch.
_VERSION: str = sys.modules["lazysnap"].__version__


def _guarded(work: Callable[P, None]) -> Callable[P, None]:
    """An error here must not reach what keeps snapshots safe."""

    @functools.wraps(work)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            work(*args, **kwargs)
        except Exception:
            logger.exception("events")

    return guarded


class EventLog:
    """The events of one keeper."""

    def __init__(self) -> None:
        self._file: EventFileWriter | None = None
        self._seen: dict[int, _Seen] = {}
        """The trainer of each local rank."""
        self._redaction = Redaction({})

    @_guarded
    def begin(self, rank: LocalRank, run: protocol.Run) -> None:
        """A trainer reported its run. Does not block."""
        if not rank.levels or (rank.team.node > 0 and not is_path(resolve_url(rank.levels[0].url))):
            return  # of a first level at a URL, node 0 alone writes the file
        if self._file is None or self._file.run_id != run.run_id:
            self._begin_file(rank, run)
        number = rank.team.local_rank
        seen = self._seen.get(number)
        if seen is not None and seen.start == run.start:
            return
        now = time.time()
        pid = rank.trainer_pid
        self._seen[number] = _Seen(run.start, run.floor, pid, run.step, run.every_n_steps, time.time_ns())
        started = events.TrainerStarted(
            t=now,
            rank=rank.team.rank,
            pid=pid,
            start=run.start,
            step=run.step,
            world_size=rank.team.world_size,
            every_n_steps=run.every_n_steps,
            began=min(now, _process_began(pid) or now),
            source=None if run.source is None else self._text(run.source),
        )
        self._add(started)

    def _begin_file(self, rank: LocalRank, run: protocol.Run) -> None:
        self.close(0.0)
        level = rank.levels[0]
        self._file = EventFileWriter(level, run.run_id, rank.team.node)
        self._redaction = Redaction(level.storage_options or {})
        started = events.KeeperStarted(
            t=time.time(),
            pid=os.getpid(),
            host=socket.gethostname(),
            node=rank.team.node,
            nodes=rank.team.nodes,
            version=_VERSION,
        )
        self._add(started)

    @_guarded
    def note(self, event: events.Event) -> None:
        """Take an event of the storage or the protection. Thread-safe."""
        changes: dict[str, object] = {}
        if isinstance(event, (events.Stored, events.Complete, events.LevelFailed)):
            changes["level"] = self._text(event.level)
        if isinstance(event, (events.LevelFailed, events.Alert)):
            changes["text"] = self._text(event.text)
        if isinstance(event, events.Complete):
            changes["steps"] = event.steps[-MAX_COMPLETE:]
        if isinstance(event, events.FILED):
            self._add(replace(event, **changes))

    def _text(self, text: str) -> str:
        return self._redaction.clean(text)[: events.MAX_TEXT]

    @_guarded
    def look(self, ranks: Mapping[int, LocalRank]) -> None:
        """Note how far the first rank is, and which ranks ended. Does not block; called about ten times a second."""
        if self._file is None:
            return
        now = time.time()
        for number, seen in self._seen.items():
            rank = ranks.get(number)
            if rank is None or seen.has_ended:
                continue
            if number == min(self._seen) and seen.is_due(now):
                self._note_progress(rank, seen, now)
            if rank.ended is not None:
                self._note_end(rank, seen, *rank.ended)

    def _note_progress(self, rank: LocalRank, seen: "_Seen", now: float) -> None:
        seen.looked_at = now
        progress = self._progress(rank, seen, now)
        if progress is not None and progress.step != seen.step:
            seen.step = progress.step
            seen.has_passed = True
            self._add(progress)

    def _note_end(self, rank: LocalRank, seen: "_Seen", how: Literal["goodbye", "left", "died"], t: float) -> None:
        seen.has_ended = True
        last = self._progress(rank, seen, t)
        if last is not None and last.step != seen.step:
            seen.step = last.step
            if rank.team.local_rank == min(self._seen):
                self._add(last)
        known = rank.inventory.end  # of a trainer that died within a capture
        if known is not None and known.ended_ns > seen.began_ns:
            seen.step = max(seen.step, known.step)
        ended = events.TrainerEnded(t=t, rank=rank.team.rank, pid=seen.pid, start=seen.start, step=seen.step, how=how)
        self._add(ended)

    def _progress(self, rank: LocalRank, seen: "_Seen", now: float) -> events.Progress | None:
        slots = [slot for slot in rank.slots() if slot.word(Word.SEQUENCE) > seen.floor]
        if not slots:
            return None
        newest = max(slots, key=lambda slot: slot.word(Word.SEQUENCE))
        whole = [slot for slot in slots if slot.status().phase is SlotPhase.WHOLE]
        captured = max(whole, key=lambda slot: slot.word(Word.SEQUENCE), default=None)
        taken = (-1, 0, 0)
        if captured is not None:
            taken = captured.word(Word.END) - 1, captured.word(Word.TAKEN), captured.word(Word.COPIED)
        return events.Progress(
            t=now,
            rank=rank.team.rank,
            start=seen.start,
            step=max(newest.word(Word.REACHED), newest.word(Word.BEGIN)) - 1,
            every=seen.every,
            waited_s=newest.word(Word.WAITED) / 1e9,
            captured=taken[0],
            taken=taken[1] / 1e9,
            copy_s=taken[2] / 1e9,
        )

    def _add(self, event: events.Event) -> None:
        file = self._file
        if file is not None:
            file.add(event)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write what is left. Blocks: at most ``timeout_s``."""
        file, self._file = self._file, None
        self._seen.clear()
        if file is not None:
            file.close(timeout_s)


@dataclass
class _Seen:
    """One trainer."""

    start: str
    floor: int
    pid: int
    step: int
    """The newest one that is noted; at first the one that it went on from."""
    every: int
    began_ns: int
    looked_at: float = 0.0
    """Unix time."""
    has_passed: bool = False
    """True if a boundary of it is noted."""
    has_ended: bool = False

    def is_due(self, now: float) -> bool:
        """True if it is time to look at it: until its first boundary always, so that its time is known."""
        if not self.has_passed:
            return True
        trained_s = now - self.began_ns / 1e9
        pause_s = min(_MOST_S, max(_LEAST_S, trained_s / _SHARE))
        return abs(now - self.looked_at) >= pause_s  # a clock that was set back holds up nothing


def _process_began(pid: int) -> float | None:
    """Return the Unix time at which a process was started; ``None``, if that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")
    return None
