"""Records the events of a keeper for reports (``lazysnap.events``) and for ``lazysnap status`` (``keeper.node_state``).

The loop calls ``note`` after each event; nothing is polled. Errors here affect nothing else. ``keeper.event_file``
writes the events.
"""

import contextlib
import functools
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, ParamSpec

from lazysnap import events, faults
from lazysnap.config import is_path
from lazysnap.core.actions import StepStored, TaskEnded
from lazysnap.core.core import Core
from lazysnap.core.messages import Farewell, JobSettings, KeeperAlert, KeeperState, LevelState, StepKey
from lazysnap.core.ranks import Rank
from lazysnap.keeper.event_file import EventFileWriter
from lazysnap.keeper.questions import TrainerEnd
from lazysnap.keeper.slot_table import NodeSlots, captured_ns, reached_step
from lazysnap.levels.redaction import Redaction
from lazysnap.memory.slot_choice import SlotView, newest_whole

logger = logging.getLogger(__name__)
P = ParamSpec("P")

_HOW_ENDED: dict[Farewell, Literal["goodbye", "left", "died"]] = {
    Farewell.NONE: "died",
    Farewell.LEFT: "left",
    Farewell.OVER: "goodbye",
}
_LEAST_S = 1.0
_MOST_S = 30.0
_SHARE = 1000
"""Seconds between two progress events of a trainer: a thousandth of its training time, within these bounds."""
_REMEMBERED = 64
"""Maximum stored snapshots per level that are remembered until they are complete."""
_CLOSE_S = 5.0


def _guarded(work: Callable[P, None]) -> Callable[P, None]:
    """Keep errors of the event log from the rest of the keeper."""

    @functools.wraps(work)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            work(*args, **kwargs)
        except Exception:
            logger.exception("events")

    return guarded


@dataclass
class LevelHistory:
    """The state of one level for events, with wall-clock times, which the core does not have."""

    stored: deque[StepKey] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Snapshots whose part of the node this keeper stored since the job began."""
    complete: set[StepKey] = field(default_factory=set)
    """Recorded complete snapshots since the job began."""
    state: LevelState = field(default_factory=LevelState)
    """The last recorded state since the job began."""
    completed: StepKey | None = None
    """The newest snapshot that became complete during the life of this keeper."""
    completed_ns: int | None = None
    failure: str = ""
    """The last failure, also after recovery. It contains no secrets."""
    failed_ns: int | None = None

    def begin_job(self) -> None:
        """Forget the previous job, except what ``lazysnap status`` shows."""
        self.stored.clear()
        self.complete.clear()
        self.state = LevelState()

    def note_complete(self, key: StepKey, now_s: float) -> None:
        """Record a complete snapshot."""
        if self.completed is None or key > self.completed:
            self.completed = key
            self.completed_ns = int(now_s * 1e9)

    def note_failure(self, text: str, now_s: float) -> None:
        """Record a failure of the level."""
        self.failure = text
        self.failed_ns = int(now_s * 1e9)


@dataclass
class _Trainer:
    """One trainer in the current file."""

    start: int
    rank: int
    """Its number among all ranks."""
    step: int
    """The newest recorded step; at first the resumed one."""
    began_s: float
    """Unix time when it reported its start."""
    noted_s: float = 0.0
    """Unix time of the last progress event."""
    has_passed: bool = False
    """True if a boundary of it was recorded."""
    has_ended: bool = False

    def is_due(self, now: float) -> bool:
        """True if it is time for a progress event: always before its first boundary, so that its time is exact."""
        if not self.has_passed:
            return True
        trained_s = now - self.began_s
        pause_s = min(_MOST_S, max(_LEAST_S, trained_s / _SHARE))
        return abs(now - self.noted_s) >= pause_s  # a clock may be set back


class EventLog:
    """The events of one keeper. Used on the thread of the loop; nothing but ``close`` blocks.

    Example::

        log = EventLog()
        log.job_began(settings)
        log.task_ended("/scratch/run", StepStored(number=1, written_bytes=1000), key)
        log.note(core, slots)
        log.close()
    """

    def __init__(self) -> None:
        self.processes: dict[int, tuple[int, float]] = {}
        """The last process of each local rank, and the Unix time in seconds when it connected."""
        self.ends: dict[int, TrainerEnd] = {}
        """The end of the last trainer of each local rank that captured anything."""
        self._levels: dict[str, LevelHistory] = {}
        """By URL."""
        self._settings: JobSettings | None = None
        self._protected: StepKey | None = None
        self._alerts: tuple[KeeperAlert, ...] = ()
        self._is_preempted = False
        self._file: EventFileWriter | None = None
        self._pids: dict[int, int] = {}
        """The training process, by local rank; only of ranks that have one."""
        self._trainers: dict[int, _Trainer] = {}
        """By local rank, also of ended trainers."""
        self._redaction = Redaction({})

    def level(self, url: str) -> LevelHistory:
        """Return the history of a level, created if necessary."""
        return self._levels.setdefault(url, LevelHistory())

    @_guarded
    def job_began(self, settings: JobSettings) -> None:
        """Record that the keeper serves a job from now on, or the same one with other settings."""
        before = self._settings
        self._settings = settings
        self._protected = None
        options: dict[str, object] = {}
        for level in settings.levels:
            self.level(level.url).begin_job()
            options[level.url] = level.storage_options or {}
        self._redaction = Redaction(options)
        if before is None or _file_key(before) != _file_key(settings):
            self._end_file(0.0)
            self._begin_file(settings)

    def _begin_file(self, settings: JobSettings) -> None:
        if not settings.levels:
            return
        first = settings.levels[0]
        if settings.node > 0 and not is_path(first.url):
            return  # only node 0 writes the file of a level at a URL
        self._file = EventFileWriter(first, settings.run, settings.node)
        self._file.add(events.KeeperStarted(t=time.time(), nodes=settings.num_nodes))

    # Trainers

    @_guarded
    def note(self, core: Core, slots: NodeSlots) -> None:
        """Record changes: new and ended trainers, the progress of the first rank, and the state for trainers.

        Called after each event, when the words of all slots have been read.

        Args:
            core: the decisions of the keeper.
            slots: all slots of the node.
        """
        now = time.time()
        for rank in core.ranks.all:
            known_pid = self._pids.get(rank.number)
            if known_pid is not None and (not rank.is_served or rank.pid != known_pid):
                self._note_end(rank, slots, now)
            if rank.is_served and rank.number not in self._pids:
                self._pids[rank.number] = rank.pid
                faults.point("keeper.attached")
            self._note_start(rank, now)
            trainer = self._trainers.get(rank.number)
            if trainer is None or trainer.has_ended or rank.number != min(self._trainers):
                continue
            if trainer.is_due(now):
                self._note_progress(rank, trainer, slots, now)
        self.note_state(core.common_state())

    def _note_end(self, rank: Rank, slots: NodeSlots, now: float) -> None:
        """Record the end of a trainer: its process died or reported its end, or another one replaced it."""
        del self._pids[rank.number]
        faults.point("keeper.trainer_died")
        state = rank.state
        reached = None
        if state is not None and state.job is not None:
            reached = reached_step(_views_of(rank, state.start))
        if reached is not None and state is not None and state.job is not None:
            self.ends[rank.number] = TrainerEnd(int(now * 1e9), state.job.run, reached)
        trainer = self._trainers.get(rank.number)
        if trainer is None or trainer.has_ended:
            return
        if rank.number == min(self._trainers):
            self._note_progress(rank, trainer, slots, now)
        if reached is not None:
            trainer.step = max(trainer.step, reached)
        trainer.has_ended = True
        farewell = Farewell.NONE
        if state is not None and not rank.is_served:
            farewell = state.farewell
        ended = events.TrainerEnded(
            t=now,
            rank=trainer.rank,
            start=_text_of(trainer.start),
            step=trainer.step,
            how=_HOW_ENDED[farewell],
        )
        self._add(ended)

    def _note_start(self, rank: Rank, now: float) -> None:
        state = rank.state
        if state is None:
            return
        if rank.number not in self.processes or self.processes[rank.number][0] != rank.pid:
            self.processes[rank.number] = (rank.pid, now)
        if self._file is None or self._settings is None or state.job is None or state.start == 0:
            return
        trainer = self._trainers.get(rank.number)
        if state.job.run != self._settings.run or (trainer is not None and trainer.start == state.start):
            return
        number = state.job.ranks[rank.number]
        self._trainers[rank.number] = _Trainer(state.start, number, state.step, now)
        source = None
        if state.source:
            source = self._text(state.source)
        started = events.TrainerStarted(
            t=now,
            rank=number,
            start=_text_of(state.start),
            step=max(0, state.step),
            world_size=state.job.world_size,
            every_n_steps=state.job.capture_every_n_steps,
            began=min(now, _process_began(rank.pid) or now),
            source=source,
        )
        self._add(started)

    def _note_progress(self, rank: Rank, trainer: _Trainer, slots: NodeSlots, now: float) -> None:
        trainer.noted_s = now
        progress = _progress_of(rank, trainer, slots, now)
        if progress is None or progress.step == trainer.step:
            return
        trainer.step = progress.step
        trainer.has_passed = True
        self._add(progress)

    # Levels

    @_guarded
    def task_ended(self, level_url: str, event: TaskEnded, key: StepKey | None) -> None:
        """Record the end of the task of a level.

        Args:
            level_url: the level. Tasks of redundancy are not recorded.
            event: the result. A failure is recorded from the state of the level, because a task may also hang.
            key: the step that the task was to store; None for another task.
        """
        notes = self._levels.get(level_url)
        if notes is not None and isinstance(event, StepStored) and key is not None:
            notes.stored.append(key)
            stored = events.Stored(
                t=time.time(),
                level=self._text(level_url),
                step=key.step,
                bytes=event.written_bytes,
                seconds=event.seconds,
            )
            self._add(stored)

    @_guarded
    def note_state(self, state: KeeperState) -> None:
        """Record changes in the state for trainers, also before there is one."""
        now = time.time()
        for alert in state.alerts:
            if alert not in self._alerts:
                self._add(events.Alert(t=now, about=alert.about, text=self._text(alert.text)))
        topics = {alert.about for alert in state.alerts}
        for topic in sorted({alert.about for alert in self._alerts} - topics):
            self._add(events.Alert(t=now, about=topic, text=""))
        self._alerts = state.alerts
        if state.is_preempted and not self._is_preempted:
            self._add(events.Preempted(t=now))
        self._is_preempted = state.is_preempted
        settings = () if self._settings is None else self._settings.levels
        for level, level_state in zip(settings, state.levels, strict=True):
            notes = self.level(level.url)
            self._note_failure(level.url, notes, level_state, now)
            self._note_complete(level.url, notes, level_state, now)
            notes.state = level_state
        self._note_protected(state.protected, now)

    def _note_failure(self, url: str, notes: LevelHistory, state: LevelState, now: float) -> None:
        has_lost_step = state.num_failures > notes.state.num_failures
        has_begun_to_fail = bool(state.failure) and not notes.state.failure
        if not state.failure or not (has_lost_step or has_begun_to_fail):
            return  # the same failure again, and nothing was stored since
        text = self._text(state.failure)
        notes.note_failure(text, now)
        step = -1 if state.failed_step is None else state.failed_step
        self._add(events.LevelFailed(t=now, level=self._text(url), step=step, text=text))

    def _note_complete(self, url: str, notes: LevelHistory, state: LevelState, now: float) -> None:
        starts = {trainer.start for trainer in self._trainers.values()}
        new_steps = []
        for key in sorted(state.complete):
            # A listing also shows snapshots that were complete before this keeper or this start.
            is_own = key in notes.stored
            if is_own:
                notes.note_complete(key, now)
            if key not in notes.complete and (is_own or key.start in starts):
                notes.complete.add(key)
                new_steps.append(key.step)
        notes.complete.intersection_update(state.complete)
        if new_steps:
            self._add(events.Complete(t=now, level=self._text(url), steps=new_steps))

    def _note_protected(self, protected: StepKey | None, now: float) -> None:
        before = self._protected
        self._protected = protected
        if protected is not None and protected != before:
            self._add(events.Protected(t=now, step=protected.step))
        elif protected is None and before is not None:
            self._add(events.Protected(t=now, step=None))

    # The file

    def _text(self, text: str) -> str:
        return self._redaction.clean(text)[: events.MAX_TEXT]

    def _add(self, event: events.Event) -> None:
        if self._file is not None:
            self._file.add(event)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write the remaining events. Blocks: at most ``timeout_s``."""
        self._end_file(timeout_s)

    @_guarded
    def _end_file(self, timeout_s: float) -> None:
        file = self._file
        self._file = None
        self._trainers.clear()
        if file is not None:
            file.close(timeout_s)


def _file_key(settings: JobSettings) -> tuple[object, ...]:
    """Return the ranks that have a file."""
    first_url = settings.levels[0].url if settings.levels else ""
    return settings.run, settings.node, first_url


def _views_of(rank: Rank, start: int) -> list[SlotView]:
    """Return the slots that have or had a capture of a start."""
    return [view for view in rank.slots if view.start == start]


def _progress_of(rank: Rank, trainer: _Trainer, slots: NodeSlots, now: float) -> events.Progress | None:
    """Return the progress of a trainer; None if it passed no boundary."""
    views = _views_of(rank, trainer.start)
    step = reached_step(views)
    state = rank.state
    if step is None or state is None:
        return None
    captured_step = -1
    taken_ns = 0
    copied_ns = 0
    for view in newest_whole(views, 1):
        slot = slots.get(rank.number, {}).get(view.slot_id)
        began_ns = None if slot is None else captured_ns(slot, view.sequence)
        if view.step is not None and began_ns is not None:
            captured_step = view.step
            taken_ns = began_ns
            copied_ns = view.copied_ns
    return events.Progress(
        t=now,
        rank=trainer.rank,
        start=_text_of(trainer.start),
        step=step,
        waited_s=state.waited_s,
        captured=captured_step,
        taken=taken_ns / 1e9,
        copy_s=copied_ns / 1e9,
    )


def _text_of(start: int) -> str:
    """Return the id of a start in metadata and names of directories."""
    return f"{start:016x}"


def _process_began(pid: int) -> float | None:
    """Return the Unix time at which a process was started; ``None`` if that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")
    return None
