"""The lines about a run: its start, the memory it takes, and the captured and stored steps at its end."""

import enum
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from rich.filesize import decimal

from lazysnap.config import PersistentLevel, SnapshotConfig, due_every
from lazysnap.console import duration
from lazysnap.engine.statistics import Statistics
from lazysnap.restore.lost_parts import PARITY
from lazysnap.restore.snapshot import MEMORY, Absence, Snapshot

RUN_DIGITS = 8
"""Digits of a run's id that are shown; commands take the first digits of an id."""
_MOST_STEPS = 5
_LONGEST_TEXT = 200
"""Characters of an exception's message that are shown."""
_INTERRUPTIONS = ("KeyboardInterrupt", "SystemExit", "SIGTERMException")
"""Exceptions that end a training from outside, or by its own decision."""


class Ending(enum.Enum):
    """The kinds of an engine's end, which decide about its memory."""

    CLOSED = "closed"
    """The keeper stores what it has not stored yet, then it frees the memory."""
    LINGERING = "lingering"
    """Not everything was made durable: the keeper keeps the memory for a restart."""
    ABANDONED = "abandoned"
    """Left as after a crash: the same, and nobody waited for storage."""


@dataclass(frozen=True)
class End:
    """The end of an engine."""

    ending: Ending
    urls: Sequence[str]
    """URLs of the levels, fast to slow."""
    linger_s: float
    drain_timeout_s: float = 0.0
    ranks: int = 1
    untrained: "Resumed | None" = None
    """The snapshot that was resumed, if no step came after it."""
    failure: "Failure | None" = None
    failing: Sequence[str] = ()
    """URLs of the levels that failed when the engine ended: a message has said why."""


@dataclass(frozen=True)
class Failure:
    """The exception that ended a training."""

    error: BaseException
    step: int
    """The step that was in progress."""
    durable: int | None
    """The newest step of this training that a level has."""
    held: int | None = None
    """The newest step of this training that memory has."""


@dataclass(frozen=True)
class Resumed:
    """The snapshot that was resumed."""

    step: int
    in_memory: bool
    """True if this rank's part came from memory, of this node or others."""
    only_in_memory: bool
    """True if no level had it then, though there are levels. False for an older snapshot that was chosen."""
    durable_at: str | None = None
    """The URL of a level that had it then."""
    start: int = 0
    """Id of the start that captured it."""
    newest_step: int = 0
    """The newest step that was there: the one after ``step`` if that is trained again, else ``step``."""

    @classmethod
    def of(cls, snapshot: Snapshot, *, has_levels: bool) -> "Resumed":
        """Return the facts about the snapshot of a restart."""
        newest = snapshot.repeats or snapshot
        key = (newest.start, newest.step)
        durable_at = next((url for url, stored in snapshot.stored.items() if key in stored), None)
        only_in_memory = has_levels and durable_at is None and snapshot.new_run is None
        in_memory = snapshot.level in (MEMORY, PARITY)
        if not in_memory:
            durable_at = durable_at or snapshot.level
        return cls(snapshot.step, in_memory, only_in_memory, durable_at, int(snapshot.start, 16), newest.step)


# ---------------------------------------------------------------- the start


def resumed(snapshot: Snapshot, now_ns: int, *, position: str = "", seconds: float | None = None) -> str:
    """The line for a restart. ``position``: where in the data it goes on; ``seconds``: what the restore took in all."""
    took = snapshot.seconds if seconds is None else seconds
    line = f"resumed {_which(snapshot, position)}: {_age(snapshot, now_ns)}restored in {duration(took)}"
    if snapshot.repeats is not None:
        line += f"; step {snapshot.repeats.step} is trained again, to prove the restart (verify_restart)"
    return line


def loaded(snapshot: Snapshot, now_ns: int) -> str:
    """The line for weights that are only read, for an evaluation."""
    return f"loaded the weights of {_which(snapshot, '')}: {_age(snapshot, now_ns)}read in {duration(snapshot.seconds)}"


def fresh(absence: Absence | None, *, how: str = 'engine.restore("latest")', step: int = 0) -> str:
    """The line for a start without a snapshot. ``absence``: why there was none; ``None``, if none was asked for, which
    is done by ``how``. ``step``: where training starts.
    """
    if absence is None:
        what = f"starting a new run at step {step}" if step else "starting fresh"
        return f"{what}: no restart was asked for; {how} resumes the newest snapshot, if there is one"
    where = places(absence.urls)
    if absence.unreadable:
        reason = f"no snapshot {where} could be read ({_steps(absence.unreadable)}); the messages above say why"
    elif absence.incomplete:
        look = f"; `lazysnap ls {absence.urls[0]}` lists what is there" if absence.urls else ""
        reason = f"there are only incomplete snapshots {where} ({_steps(absence.incomplete)}){look}"
    elif absence.uncommitted:
        [(url, count), *_] = absence.uncommitted.items()
        what = "1 directory" if count == 1 else f"{count} directories"
        reason = (
            f"there is no snapshot {where}, but {what} without a valid manifest, which is written last; "
            f"`lazysnap ls {url}` lists what is there"
        )
    elif absence.is_partial:
        reason = f"no snapshot was found {where}, but not all of that could be read; the messages above say what"
    else:
        reason = f"there is no snapshot {where}"
    return f"starting fresh: {reason}"


def places(urls: Iterable[str]) -> str:
    """Return the text of all places that are searched for snapshots."""
    return " or ".join(["in memory", *(f"at {url}" for url in urls)])


def from_checkpoint(path: str) -> str:
    """The line for a start from a checkpoint of the framework."""
    return f"starting a new run from the checkpoint {path}, which is not a snapshot of lazysnap"


def _which(snapshot: Snapshot, position: str) -> str:
    at = f" ({position})" if position else ""
    return f"step {snapshot.step} of run {snapshot.run or snapshot.run_id[:RUN_DIGITS]}{at} from {source_of(snapshot)}"


def source_of(snapshot: Snapshot) -> str:
    """Return the text of the place from which a snapshot was read."""
    return "parity in the memory of other nodes" if snapshot.level == PARITY else snapshot.level


def _age(snapshot: Snapshot, now_ns: int) -> str:
    """Return the text about the time since the capture; empty if clocks contradict each other."""
    if snapshot.captured_ns is None:
        return ""
    end = snapshot.end
    if end is not None and end.run_id == snapshot.run_id and end.ended_ns >= snapshot.captured_ns:
        newest_step = (snapshot.repeats or snapshot).step
        before_the_end = duration((end.ended_ns - snapshot.captured_ns) / 1e9)
        return f"captured {before_the_end} before the end{_lost(end.step - newest_step)}; "
    if now_ns >= snapshot.captured_ns:
        return f"captured {duration((now_ns - snapshot.captured_ns) / 1e9)} ago; "
    return ""


def _lost(boundaries: int) -> str:
    """Say what a restart trains again. ``boundaries``: those that training passed after the capture.

    The step that was running when training ended may have been trained nearly to its end: it is lost as well. "At
    most", since a training that was over had none.
    """
    if boundaries < 0:
        return ""
    if boundaries == 0:
        return ", lost at most the step that was running"
    counted = "1 step" if boundaries == 1 else f"{boundaries} steps"
    return f", lost {counted} and at most the one that was running"


def _steps(steps: Sequence[int]) -> str:
    some = ", ".join(map(str, steps[-_MOST_STEPS:]))
    return f"step{'s' * (len(steps) > 1)} {'…, ' * (len(steps) > _MOST_STEPS)}{some}"


# ---------------------------------------------------------------- what it takes


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's state and memory, in bytes."""

    state_bytes: int
    """One snapshot."""
    slots: int
    slot_bytes: int
    available_bytes: int
    """Memory that slots may take, with what they take already: of this machine, or ``max_bytes`` if that is less."""
    group: tuple[int, int] = (1, 0)
    """Nodes that protect each other, and how many of them may be lost."""
    spill_dir: str | None = None
    """Directory of slots that are files; ``None``: they are memory."""


def opening(config: SnapshotConfig, sizes: Sizes, ranks: int, *, is_protected: bool = True) -> str:
    """Return the line about state, memory (which it has, if ``is_protected``), and the places and steps of storage."""
    per_rank = " per rank" if ranks > 1 else ""
    state = f"state {decimal(sizes.state_bytes)}"
    memory = decimal(sizes.slots * sizes.slot_bytes)
    takes = "takes" if is_protected else "no memory: it would take"
    kind = "of memory" if sizes.spill_dir is None else f"in files in {sizes.spill_dir}"
    available = decimal(sizes.available_bytes)
    free = f"of {available} available" if sizes.spill_dir is None else f"memory has {available}"
    room = decimal(sizes.slot_bytes - sizes.state_bytes)
    slots = f"{sizes.slots} slots of {decimal(sizes.slot_bytes)}, each the state and {room} for metadata and growth"
    return f"{state}{per_rank}; {takes} {memory} {kind}{per_rank} ({free}): {slots}; {_stored(config, sizes)}"


def _stored(config: SnapshotConfig, sizes: Sizes) -> str:
    size, parity = sizes.group
    stored = [f"snapshots at {level.url} every {_interval(level, config.every_n_steps)}" for level in config.levels]
    if parity:
        stored.append(f"any {parity if parity > 1 else 'one'} of {size} nodes may be lost")
    if not config.levels:
        stored.append(f"no storage level: nothing outlives {'these machines' if parity else 'this machine'}")
    return ", ".join(stored)


def _interval(level: PersistentLevel, captured_every: int) -> str:
    if level.every_n_steps is None:
        return f"{level.period_s:g} s"
    steps = due_every(level.every_n_steps, captured_every)
    return "step" if steps == 1 else f"{steps} steps"


def shortages(config: SnapshotConfig, snapshot_bytes: int, ranks_here: int) -> list[dict[str, str]]:
    """Local levels where not even one snapshot of the ranks of this machine fits, with its bytes and those that are
    free. Blocks: asks each disk.
    """
    found, needed = [], snapshot_bytes * ranks_here
    for level in config.levels:
        free = _free_bytes(level.url)
        if free is not None and free < needed:
            sizes = {"needed": f"{needed} bytes ({decimal(needed)})", "free": f"{free} ({decimal(free)})"}
            found.append({"url": level.url, **sizes})
    return found


def _free_bytes(url: str) -> int | None:
    """Return the bytes that a local level may still take; ``None`` if that is not known."""
    if urlsplit(url).scheme:
        return None
    path = url
    while path and not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


# ---------------------------------------------------------------- the end


def summary(statistics: Statistics, end: End) -> list[str]:
    """Return the lines about captured and stored steps, if a step was due. See also ``not_durable``."""
    lines = [] if end.failure is None else [failed(end.failure, has_levels=bool(end.urls))]
    left_out = statistics.skipped.total()
    if not statistics.began and not left_out:
        resumed = end.untrained
        if resumed is None:
            return lines
        if end.failure is not None:
            return [*lines, *([f"step {resumed.step}: {_fate(end)}"] if resumed.in_memory else [])]
        keeps = resumed.in_memory and not resumed.only_in_memory and end.ending is Ending.LINGERING
        fate = _fate(end) if keeps else "if training was over there, that is as it should be"
        return [f"no step was trained after step {resumed.step}, which was resumed; {fate}"]
    parts = [f"captured {_captured(statistics)}"]
    parts += [f"stored {statistics.persisted[url]} at {url}{_newest(statistics, url)}" for url in end.urls]
    if statistics.last_protected_step is not None:
        parts.append(f"protected {statistics.protected} on other nodes (newest: step {statistics.last_protected_step})")
    if not end.urls:
        parts.append("stored nowhere: no storage level is set")
    of_devices = f", its devices {duration(statistics.device_wait_s)}" if statistics.device_wait_s else ""
    parts.append(f"training waited {duration(statistics.waited_s)} in all{of_devices}")
    lines.append("; ".join(parts))
    newest = statistics.last_whole_step
    if newest is None and not any(url in statistics.last_durable_step for url in end.urls):
        lines.append("NOTHING OF THIS TRAINING IS CAPTURED: a restart would not find any of its steps")
    elif newest is not None and end.ending is not Ending.CLOSED and not not_durable(statistics, end):
        lines.append(f"step {newest}: {_fate(end)}")
    return lines


def failed(failure: Failure, *, has_levels: bool = True) -> str:
    """Return the line that names the exception which ended a training, and what of the training is left."""
    kind, text = type(failure.error).__name__, " ".join(str(failure.error).split())
    what = "was interrupted" if kind in _INTERRUPTIONS else "failed"
    why = f"{kind}: {text[:_LONGEST_TEXT]}{'…' * (len(text) > _LONGEST_TEXT)}" if text else kind
    return f"training {what} in step {failure.step} ({why}); {_left(failure, has_levels=has_levels)}"


def _left(failure: Failure, *, has_levels: bool) -> str:
    """Return what a restart finds, in words."""
    durable, held = failure.durable, failure.held
    if durable is not None:
        stored = f"step {durable} is durable"
    elif held is None:
        return "nothing of it is captured yet: a restart begins fresh, as this one did"
    else:
        stored = "no step of it is on storage yet" if has_levels else "there is no storage level"
    if held is None or held <= (-1 if durable is None else durable):
        return stored
    return f"{stored}; memory has step {held}" + (", and the keeper stores it now" if has_levels else "")


def not_durable(statistics: Statistics, end: End) -> str:
    """The warning about a newest capture that is not stored at every level; empty, if it is or if there is none, and
    after a crash, for which memory is there.
    """
    newest, resumed = statistics.last_whole_step, end.untrained
    if newest is None and resumed is not None and resumed.only_in_memory and end.ending is not Ending.ABANDONED:
        places = ", ".join(end.urls)
        return f"NOT DURABLE: step {resumed.newest_step}, which was found in memory, is not at {places}; {_fate(end)}"
    missing = [url for url in end.urls if statistics.last_durable_step.get(url) != newest]
    if newest is None or not missing or end.ending is Ending.ABANDONED:
        return ""
    return (
        f"NOT DURABLE: step {newest}, the newest capture, is not at {', '.join(missing)}"
        f"{_failures(statistics, missing) or _waited(end, missing)}; {_fate(end)}"
    )


def _captured(statistics: Statistics) -> str:
    due = statistics.began + statistics.skipped.total()
    text = f"{statistics.whole} of {due} due step{'s' * (due != 1)}"
    if statistics.shard_bytes:
        text += f" ({decimal(statistics.shard_bytes)} each)"
    return ", ".join([text, *missing(statistics)])


def missing(statistics: Statistics) -> list[str]:
    """Return how many captures that were due came to nothing, by reason, in words."""
    left_out = statistics.skipped.total()
    reasons = [f"{reason} {count}" for reason, count in sorted(statistics.skipped.items())]
    notes = [f"{left_out} left out ({', '.join(reasons)})"] if left_out else []
    return notes + [
        f"{count} {word}" for word, count in (("torn", statistics.torn), ("failed", statistics.failed)) if count
    ]


def _newest(statistics: Statistics, url: str) -> str:
    step = statistics.last_durable_step.get(url)
    left_out = statistics.dropped[url]
    dropped = f", {left_out} left out for newer ones" if left_out else ""
    return ("" if step is None else f" (newest: step {step})") + dropped


def _failures(statistics: Statistics, urls: Sequence[str]) -> str:
    count = sum(statistics.level_failures[url] for url in urls)
    return f" ({count} write{'s' * (count != 1)} failed)" if count else ""


def _waited(end: End, missing: Sequence[str]) -> str:
    if end.ending is Ending.CLOSED:
        return ""
    if all(url in end.failing for url in missing):
        return " (nothing can be stored there now; a message above says why)"  # the wait ended before its deadline
    return f" after {end.drain_timeout_s:g} s (drain_timeout_s)"


def _fate(end: End) -> str:
    if end.ending is Ending.CLOSED:
        return "its keeper goes on storing it"
    finds = "it" if end.ranks == 1 else "the newest step that all ranks have"
    return f'it stays in memory for {end.linger_s:g} s (linger_s), where a restart with "latest" finds {finds}'
