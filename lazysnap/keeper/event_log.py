"""The notes of a keeper for the reports of its run (``lazysnap.events``). It decides nothing, and may fail.

The main thread looks at the ranks about once a second, messages to trainers pass by on any thread. A thread of its own
writes the file: a level that hangs holds up nothing else.
"""

import contextlib
import functools
import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec

from msgspec.structs import replace

from lazysnap import events
from lazysnap.config import PersistentLevel
from lazysnap.errors import LazySnapError
from lazysnap.keeper import protocol
from lazysnap.keeper.local_rank import LocalRank
from lazysnap.levels.files import temp_name
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.redaction import Redaction
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import open_store
from lazysnap.memory.arena import SlotPhase, Word
from lazysnap.shard.names import events_file_name

logger = logging.getLogger(__name__)
P = ParamSpec("P")

MAX_BYTES = 1 << 20
"""The file is thinned out when it is larger, to less than three quarters of that."""
_FREQUENT = (events.Progress, events.Stored, events.Complete, events.Protected)
"""Events of which older ones may be left out."""
_SAMPLE_S = 1.0
"""Seconds between two looks at a rank, times the ranks of the node."""
_LEAST_S, _MOST_S = 2.0, 30.0
"""Seconds between two writes: the larger the file, the more of them."""
_URL_S = 300.0
"""Seconds between two writes at a URL, where each write is a request that is paid for."""
_CLOSE_S = 2.0
_MOST_EVENTS = 8000
"""More are thinned out also where nothing can be written: a level may fail, or hang, for days."""
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
    """The events of one keeper. Off if ``LAZYSNAP_EVENTS`` is 0."""

    def __init__(self) -> None:
        self._is_on = os.environ.get("LAZYSNAP_EVENTS") != "0"
        self._file: EventFileWriter | None = None
        self._seen: dict[int, _Seen] = {}
        self._redaction = Redaction({})

    @_guarded
    def begin(self, rank: LocalRank, run: protocol.Run) -> None:
        """A trainer reported its run, or that something of it changed. Does not block."""
        if not self._is_on or not rank.levels:
            return
        team, level = rank.team, rank.levels[0]
        if self._file is None or self._file.run_id != run.run_id:
            self.close(0.0)
            self._file = EventFileWriter(level, run.run_id, team.node)
            self._redaction = Redaction(level.storage_options or {})
            host = socket.gethostname()
            keeper = events.KeeperStarted(
                t=time.time(), pid=os.getpid(), host=host, node=team.node, nodes=team.nodes, version=_VERSION
            )
            self._add(keeper)
        seen = self._seen.get(team.local_rank)
        if seen is None or seen.start != run.start:
            pid = rank.trainer_pid
            seen = _Seen(run.start, run.floor, pid, run.step, run.every_n_steps, time.time_ns())
            self._seen[team.local_rank] = seen
            facts = {"step": run.step, "world_size": team.world_size, "every_n_steps": run.every_n_steps}
            source = None if run.source is None else self._redaction.clean(run.source)
            now = time.time()
            began = min(now, _process_began(pid) or now)
            start = events.TrainerStarted(
                t=now, rank=team.rank, pid=pid, start=run.start, began=began, source=source, **facts
            )
            self._add(start)
        for phase in () if seen.has_phases else filter(run.phases.__contains__, events.PHASES):
            t, waited_s = run.phases[phase], run.waited_s if phase == "first_step" else 0.0
            self._add(events.PhaseEnded(t=t, rank=team.rank, start=run.start, phase=phase, waited_s=waited_s))
        seen.has_phases = bool(run.phases)

    @_guarded
    def note(self, event: events.Event) -> None:
        """Take an event of the storage or the protection. Thread-safe."""
        changes: dict[str, str] = {}
        if isinstance(event, (events.Stored, events.Complete, events.LevelFailed, events.NameFailed)):
            changes["level"] = event.level
        if isinstance(event, (events.LevelFailed, events.NameFailed, events.Alert)):
            changes["text"] = self._redaction.clean(event.text)
        self._add(replace(event, **changes))

    @_guarded
    def look(self, ranks: Mapping[int, LocalRank]) -> None:
        """Note how far each rank is. Does not block; called about ten times a second."""
        if self._file is None:
            return
        now = time.time()
        for number, seen in list(self._seen.items()):
            rank = ranks.get(number)
            if rank is not None and not seen.has_ended:
                self._look_at(rank, seen, now, _SAMPLE_S * len(self._seen))

    def _look_at(self, rank: LocalRank, seen: "_Seen", now: float, interval_s: float) -> None:
        ended = rank.ended
        if ended is None and abs(now - seen.looked_at) < interval_s:
            return
        seen.looked_at = now
        last = self._progress(rank, seen, now)
        if last is not None and last.step != seen.step:
            seen.step = last.step
            self._add(last)
        if ended is not None:
            seen.has_ended = True
            known = rank.inventory.end  # of a trainer that died within a capture
            is_its_own = known is not None and known.ended_ns > seen.began_ns
            step = max(seen.step, known.step) if known is not None and is_its_own else seen.step
            how, t = ended
            number, pid, start = rank.team.rank, seen.pid, seen.start
            self._add(events.TrainerEnded(t=t, rank=number, pid=pid, start=start, step=step, how=how))

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
    every: int
    began_ns: int
    looked_at: float = 0.0
    has_phases: bool = False
    has_ended: bool = False


class EventFileWriter:
    """Writes the events of one run and node to a file at a level, with what is there already. ``add`` is thread-safe.

    Nothing is written before the level has a snapshot: a run that stores nothing leaves nothing. It has many attributes
    because one lock guards what two threads share.
    """

    def __init__(self, level: PersistentLevel, run_id: str, node: int) -> None:
        self.run_id = run_id
        self._level = level
        self._name = events_file_name(run_id, node)
        self._changed = threading.Condition()
        self._events: list[events.Event] = []
        self._new: list[events.Event] = []
        self._starts: set[tuple[int, str, str]] = set()
        """Facts about starts that earlier keepers wrote down, by ``_of_start``."""
        self._size = 0
        self._is_written = True
        self._is_urgent = self._is_closed = self._has_stored = False
        self._thread = threading.Thread(target=self._run, name="lazysnap-events", daemon=True)
        self._thread.start()

    def add(self, event: events.Event) -> None:
        """Does not block."""
        with self._changed:
            self._new.append(event)
            if len(self._new) > _MOST_EVENTS:
                self._new = thinned(self._new)
            self._has_stored = self._has_stored or isinstance(event, events.Stored)
            if not isinstance(event, _FREQUENT):
                self._is_urgent = True
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Write what is left. Blocks: at most ``timeout_s``."""
        with self._changed:
            self._is_closed = self._is_urgent = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        storage: Storage | None = None
        next_write = 0.0
        while True:
            with self._changed:
                pause_s = max(_LEAST_S, _MOST_S * self._size / MAX_BYTES)
                self._changed.wait_for(lambda: self._is_urgent, pause_s)
                self._is_urgent, is_last = False, self._is_closed
                self._is_written = self._is_written and not self._new
                self._events += filter(self._is_news, self._new)
                self._new = []
            if len(self._events) > _MOST_EVENTS:
                self._events = thinned(self._events)
            try:
                if storage is None:
                    storage = self._open()
                is_due = is_last or time.monotonic() >= next_write
                if self._has_stored and not self._is_written and is_due:
                    self._write(storage)
                    if not isinstance(storage, LocalStorage):
                        next_write = time.monotonic() + _URL_S
            except (LazySnapError, OSError) as error:
                logger.info("events are not written now: %s", error)
            except Exception:  # the last handler of the thread
                logger.exception("events")
            if is_last:
                return
            time.sleep(_LEAST_S / 4)  # events that come together make one write

    def _open(self) -> Storage:
        storage = open_store(self._level.url, options=self._level.storage_options).storage
        with contextlib.suppress(FileNotFoundError):
            earlier = events.decode(storage.get(self._name))
            self._starts = {key for event in earlier if (key := _of_start(event)) is not None}
            self._events, self._has_stored = [*earlier, *filter(self._is_news, self._events)], True
        return storage

    def _is_news(self, event: events.Event) -> bool:
        """A trainer that outlives its keeper reports the same start to the next one."""
        return _of_start(event) not in self._starts

    def _write(self, storage: Storage) -> None:
        data = b"".join(map(events.encode, self._events))
        while len(data) > MAX_BYTES and len(self._events) > 1:
            self._events = thinned(self._events)
            data = b"".join(map(events.encode, self._events))
        self._size = len(data)
        if isinstance(storage, LocalStorage):
            _replace(storage.url, self._name, data)
        else:
            storage.put(self._name, data)
        self._is_written = True


def _of_start(event: events.Event) -> tuple[int, str, str] | None:
    """Return rank, start and phase of an event that a start has once; ``None`` for other events."""
    if isinstance(event, events.TrainerStarted):
        return event.rank, event.start, ""
    return (event.rank, event.start, event.phase) if isinstance(event, events.PhaseEnded) else None


def thinned(found: Sequence[events.Event]) -> list[events.Event]:
    """Leave out every second of the frequent events in the older three quarters, of each rank and level; of few such
    ones, the oldest eighth of all. What comes right before an event of another kind stays.
    """
    border, seen = len(found) * 3 // 4, Counter[tuple[type, object]]()
    kept = []
    for event, following in itertools.pairwise(found[: border + 1]):
        key = type(event), getattr(event, "level", getattr(event, "rank", None))
        seen[key] += 1
        if not isinstance(event, _FREQUENT) or seen[key] % 2 or not isinstance(following, _FREQUENT):
            kept.append(event)
    if len(kept) > border * 7 // 8:
        kept = kept[len(kept) // 8 + 1 :]
    return [*kept, *found[border:]]


def _replace(directory: str, name: str, data: bytes) -> None:
    """Write a file as one act, where the level's directory is. Not durable at once: a power cut may take the last
    seconds, and no snapshot waits for this.
    """
    temp = os.path.join(directory, temp_name(name))
    try:
        with open(temp, "xb") as file:
            file.write(data)
        os.replace(temp, os.path.join(directory, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


def _process_began(pid: int) -> float | None:
    """Return the Unix time at which a process was started; ``None``, if that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")
    return None
