"""Which snapshots all ranks have at a level: each counts its own on the board, and hears when the count is full.

Per level there are, on the board, a counter for each step that is not complete yet, and a word: how many are complete,
and the newest of them. The rank that makes a counter full writes the word; nobody needs the counter any more, and it
goes. All of it on a thread that nobody waits for, in a number of round trips per snapshot that does not depend on the
number of ranks. The keeper is told what came of it: it deletes nothing that is not followed by enough complete
snapshots. What this rank counted can be taken back until the counter is full, and never afterwards, so a step whose
files were given up anywhere is complete nowhere.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lazysnap import faults
from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.engine.board import Board, BoardUnavailable
from lazysnap.engine.world import World
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.events import Complete, KeeperEvent, KeeperReady
from lazysnap.keeper.protocol import Sound, Surplus
from lazysnap.levels.belongings import Told

logger = logging.getLogger("lazysnap.engine")

_FIRST_LOOK_S = 0.02
_SLOWEST_LOOK_S = 2.0
_RANKS_PER_LOOK_S = 1000
"""With more ranks than this for each second, looks become rarer: one process answers them all."""
_EAGER_LOOK_S = 0.05
"""While somebody waits for an answer."""
_REMEMBERED = 64
_ABSENT = "?"
"""No word begins so."""


@dataclass
class _Column:
    """One level, in one start of one run."""

    level: PersistentLevel
    name: str
    """What its keys begin with."""
    count: int = 0
    """Of complete snapshots."""
    complete: tuple[int, ...] = ()
    """The newest ``keep_last`` of them, oldest first."""
    waiting: dict[int, bool] = field(default_factory=dict)
    """Steps that this rank has, and that are not complete yet: whether its count of the step stands."""
    counted: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Each only once: a keeper that took a dead one's place writes the same step again."""
    void: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    owed: set[int] = field(default_factory=set)
    """Of those that wait: what it has still to count, as the board could not be reached."""
    full: set[int] = field(default_factory=set)
    """Whose counter this rank found full, and that it did not get into the word yet."""
    doubtful: set[int] = field(default_factory=set)
    """What it took back, or not: the answer was lost. Their files stay, others may call them complete."""

    def counter(self, step: int) -> str:
        """The key of a step's counter."""
        return f"{self.name}/{step}"

    def is_passed(self, step: int) -> bool:
        """Whether enough newer snapshots are complete, so that it is of no account any more."""
        return len(self.complete) == self.level.keep_last and step < self.complete[0]

    def word_with(self, word: str, step: int) -> str:
        """The word as it is when this step is complete, too."""
        count, steps = _parsed(word)
        if step in steps or (len(steps) == self.level.keep_last and step < steps[0]):
            return word
        newest = sorted([*steps, step])[-self.level.keep_last :]
        return f"{count + 1}:{','.join(map(str, newest))}"


def _parsed(word: str) -> tuple[int, tuple[int, ...]]:
    if word in ("", _ABSENT):
        return 0, ()
    count, _, steps = word.partition(":")
    return int(count), tuple(map(int, steps.split(",")))


class Tally:
    """Of one rank of several, from the making of its engine to its end. Thread-safe."""

    def __init__(
        self, levels: Sequence[PersistentLevel], client: KeeperClient, ranks: int, board: Callable[[], Board]
    ) -> None:
        """``board`` connects anew. Raises what it does: BoardUnavailable."""
        self._levels = {level.url: (index, level) for index, level in enumerate(levels)}
        self._client = client
        self._ranks = ranks
        self._connect = board
        self._board: Board | None = None
        self._start = ""
        self._stored: Mapping[str, Sequence[tuple[str, int]]] = {}
        self._run_id = ""
        self._columns: dict[str, _Column] = {}
        self._heard: deque[Sound | Surplus | KeeperReady] = deque()
        self._unanswered: set[KeeperEvent] = set()
        """What of it is surplus."""
        self._news: deque[Complete] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._is_closed = False
        self._asked_now = False
        self._waiters = 0
        self._delay_s = _FIRST_LOOK_S
        self._next_look = 0.0
        self._is_silent = False
        client.listener = self.hear

    def begin(self, start: str, stored: Mapping[str, Sequence[tuple[str, int]]] | None = None) -> None:
        """Count what is captured from now on, and forget what was before: on all ranks at the same point.

        ``stored``: what the training goes on from, by level, see ``Snapshot.stored``.
        """
        with self._changed:
            self._start = start
            self._stored = stored or {}
            self._columns = {}
            self._heard.clear()  # of what was before
            self._unanswered.clear()

    # ---------------------------------------------------------------- asked by others

    def hear(self, event: KeeperEvent) -> None:
        """What the keeper told. Does not block."""
        if not isinstance(event, (Sound, Surplus, KeeperReady)):
            return
        if not isinstance(event, KeeperReady) and event.start != self._start:
            return  # of a start before this one: who knows which of those ranks are left
        with self._changed:
            if self._is_closed or event in self._unanswered:
                return  # a keeper names them again until it is told
            if isinstance(event, Surplus):
                self._unanswered.add(event)
            self._heard.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lazysnap-tally", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def news(self) -> list[Complete]:
        """What became complete since the last call."""
        with self._changed:
            news, self._news = list(self._news), deque()
            return news

    def wait(self, step: int, timeout_s: float, levels: int | None = None) -> bool:
        """Block until all ranks have that step, or a later one, at the first ``levels`` (``None``: at all of them);
        ``False`` after the deadline.
        """
        urls = list(self._levels)[:levels]
        return self._until(lambda: all(self._is_complete(url, step) for url in urls), timeout_s)

    def has_any(self) -> bool:
        """Whether all ranks have any step at any level. Does not block."""
        return any(column.complete for column in list(self._columns.values()))

    def _is_complete(self, url: str, step: int) -> bool:
        column = self._columns.get(url)
        return column is not None and max(column.complete, default=-1) >= step

    def settle(self, timeout_s: float) -> bool:
        """Block until what was heard is counted, and looked at what the others have; ``False`` after the deadline."""
        with self._changed:
            self._asked_now = self._thread is not None
            self._changed.notify_all()
        return self._until(lambda: not (self._heard or self._asked_now or self._is_busy), timeout_s)

    def _until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._waiters += 1
            self._next_look = 0.0
            self._changed.notify_all()
            try:
                while not is_over():
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or self._is_closed:
                        return False
                    self._changed.wait(min(remaining, 0.5))
                return True
            finally:
                self._waiters -= 1

    def close(self) -> None:
        """Count no more. Does not block."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._is_closed or self._heard or self._asked_now):
                    pause_s = self._next_look - time.monotonic() if self._is_waiting() else None
                    if pause_s is not None and pause_s <= 0:
                        break
                    self._changed.wait(pause_s)
                if self._is_closed:
                    return
                event = self._heard.popleft() if self._heard else None
                if isinstance(event, Surplus):
                    self._unanswered.discard(event)
                self._is_busy, self._asked_now = True, self._asked_now and event is not None
            try:
                self._do(event)
            except BoardUnavailable as error:
                self._lose(error)
            except Exception:  # the rim of the thread: training goes on, and what is not counted stays
                logger.exception("counting what is durable on all ranks")
            finally:
                with self._changed:
                    self._plan_look(is_news=event is not None)
                    self._is_busy = False
                    self._changed.notify_all()

    def _is_waiting(self) -> bool:
        return any(column.waiting for column in self._columns.values())

    def _plan_look(self, *, is_news: bool) -> None:
        slowest = max(_SLOWEST_LOOK_S, self._ranks / _RANKS_PER_LOOK_S)
        self._delay_s = _FIRST_LOOK_S if is_news else min(2 * self._delay_s, slowest)
        delay_s = min(self._delay_s, _EAGER_LOOK_S) if self._waiters else self._delay_s
        self._next_look = time.monotonic() + delay_s

    def _lose(self, error: BoardUnavailable) -> None:
        self._board = None
        # Once; and not at the end, when the rank that hosts the store may be gone first.
        level = logging.DEBUG if self._is_silent or self._is_closed else logging.WARNING
        self._is_silent = True
        logger.log(
            level, "what all ranks have on storage is not known, so nothing is deleted; training goes on: %s", error
        )

    def _do(self, event: Sound | Surplus | KeeperReady | None) -> None:
        if isinstance(event, KeeperReady):
            for column in self._columns.values():
                self._tell(column)
            return
        if isinstance(event, Sound):
            self._owe(event)
        board = self._board = self._board or self._connect()
        if isinstance(event, Sound):
            self._catch_up(board)
        elif isinstance(event, Surplus):
            self._take_back(board, event)
        else:
            self._catch_up(board)
            for column in list(self._columns.values()):
                self._look(board, column)
        self._is_silent = False

    def _column(self, event: Sound | Surplus) -> _Column | None:
        if event.level not in self._levels:
            return None
        with self._changed:
            if event.start != self._start:
                return None  # the training has gone back since it was heard
            if event.run_id != self._run_id:
                self._run_id = event.run_id
                self._columns = {}
            if event.level not in self._columns:
                index, level = self._levels[event.level]
                self._columns[event.level] = _Column(level, f"{event.run_id}/{event.start}/{index}")
            return self._columns[event.level]

    def _owe(self, event: Sound) -> None:
        column = self._column(event)
        if column is None or event.step in column.counted:
            return
        with self._changed:
            column.counted.append(event.step)
            column.owed.add(event.step)
            column.waiting[event.step] = True

    def _catch_up(self, board: Board) -> None:
        """Count and publish what is to be, also what could not be before."""
        for column in list(self._columns.values()):
            for step in list(column.full):
                self._publish(board, column, step)
            while column.owed:
                # Before it is known to have arrived: to count too little loses nothing, to count twice might.
                step = max(column.owed)
                column.owed.discard(step)
                faults.point("engine.tally.count")
                if board.add(column.counter(step), 1) == self._ranks:
                    faults.point("engine.tally.full")
                    self._publish(board, column, step)

    def _publish(self, board: Board, column: _Column, step: int) -> None:
        """The counter of that step is full: add it to the word."""
        column.full.add(step)
        word = board.swap(column.name, _ABSENT, _ABSENT)
        while True:
            wanted = column.word_with(word, step)
            found = word if wanted == word else board.swap(column.name, "" if word == _ABSENT else word, wanted)
            if found == wanted:
                break
            word = found  # another rank completed another step
        faults.point("engine.tally.published")
        board.forget(column.counter(step))
        column.full.discard(step)
        self._take(board, column, wanted)

    def _look(self, board: Board, column: _Column) -> None:
        self._take(board, column, board.swap(column.name, _ABSENT, _ABSENT))

    def _take(self, board: Board, column: _Column, word: str) -> None:
        """What is complete now."""
        count, steps = _parsed(word)
        if count <= column.count:
            return
        with self._changed:
            self._news.append(Complete(column.level.url, steps[-1], count - column.count))
            column.count, column.complete = count, steps
            passed = [step for step in column.waiting if column.is_passed(step)]
            column.waiting = {n: counts for n, counts in column.waiting.items() if n not in steps and n not in passed}
            column.doubtful &= column.waiting.keys()
            column.owed -= set(passed)
        self._tell(column)
        for step in passed:
            board.forget(column.counter(step))  # complete before, or never

    def _take_back(self, board: Board, event: Surplus) -> None:
        """Count this rank's part in a step no more, unless all have it already."""
        column = self._column(event)
        if column is None or event.step in column.complete or column.is_passed(event.step):
            return
        if event.step in column.full or event.step in column.doubtful:
            return
        is_owed, counts = event.step in column.owed, column.waiting.get(event.step, False)
        column.owed.discard(event.step)
        faults.point("engine.tally.take_back")
        if counts and not is_owed:
            # Before it is known to have arrived: a second one would not find the counter full that the first one found.
            column.doubtful.add(event.step)
            before = board.add(column.counter(event.step), -1) + 1
            column.doubtful.discard(event.step)
            column.waiting[event.step] = False
            if before == self._ranks:
                # Who filled it died before it could say so.
                self._publish(board, column, event.step)
                return
        self._look(board, column)
        # Complete by now, or never: without this rank's part the others' come to less than all, also later ones.
        board.forget(column.counter(event.step))
        if event.step in column.complete or column.is_passed(event.step):
            return
        with self._changed:
            column.waiting.pop(event.step, None)
            for known in (column.void, column.counted):
                if event.step not in known:
                    known.append(event.step)
        self._tell(column)

    def _tell(self, column: _Column) -> None:
        run_id, start, _ = column.name.split("/")
        earlier = tuple((started, step) for started, step in self._stored.get(column.level.url, ()))
        told = Told(run_id, start, tuple(column.complete), frozenset(column.void), earlier)
        self._client.complete(column.level.url, told)


def tally_of(config: SnapshotConfig, client: KeeperClient, world: World, start: str) -> Tally | None:
    """Of these ranks; ``None``, if there is one only, or nothing to count."""
    if world.is_alone or not config.levels:
        return None
    tally = Tally(config.levels, client, world.size, world.board)
    tally.begin(start)
    return tally
