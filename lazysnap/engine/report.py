"""Composes the lines about a run: its start, its memory, and the captured and stored steps at its end."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from lazysnap.config import PersistentLevel, SnapshotConfig, due_every
from lazysnap.console import duration
from lazysnap.engine.statistics import Statistics
from lazysnap.resolver import MEMORY, PARITY, short_id
from lazysnap.restore.snapshot import Absence, Snapshot

_MOST_STEPS = 5
_LONGEST_TEXT = 200
"""Shown characters of an exception's message."""
_INTERRUPTIONS = ("KeyboardInterrupt", "SystemExit", "SIGTERMException")
"""Exceptions that end a training from outside or deliberately."""


class EndKind(enum.Enum):
    """The ways in which an engine ends, which decide about its memory."""

    CLOSED = "closed"
    """The keeper stores the rest, then it frees the memory."""
    LINGERING = "lingering"
    """Not everything is durable: the keeper keeps the memory for a restart."""
    ABANDONED = "abandoned"
    """Abandoned, as after a crash: the same, without waiting for storage."""


@dataclass(frozen=True)
class Resumed:
    """The resumed snapshot at the start of a training."""

    step: int
    in_memory: bool
    """True if this rank's part came completely from memory, of this node or others."""
    only_in_memory: bool
    """True if no level had it then. False without levels, or for a chosen older snapshot."""
    durable_at: str | None = None
    """The URL of a level where it was complete then. A rank may have read only a part of it from there."""
    start: int = 0
    """The id of the start that captured it."""
    newest_step: int = 0
    """The newest existing step: the one after ``step`` if that is repeated, else ``step``."""

    @classmethod
    def of(cls, snapshot: Snapshot, *, has_levels: bool) -> "Resumed":
        """Return the facts about the snapshot of a restart."""
        newest = snapshot.repeats or snapshot
        only_in_memory = has_levels and snapshot.durable_at is None and snapshot.new_run is None
        in_memory = snapshot.level in (MEMORY, PARITY)
        return cls(snapshot.step, in_memory, only_in_memory, snapshot.durable_at, int(snapshot.start, 16), newest.step)


@dataclass(frozen=True)
class EndFacts:
    """The end of a training."""

    ending: EndKind
    config: SnapshotConfig
    ranks: int = 1
    untrained: Resumed | None = None
    """The resumed snapshot, if no step came after it."""
    is_finished: bool = False
    """True if it was reported that nothing was left to train after ``untrained``."""
    failing: Sequence[str] = ()
    """URLs of failing levels, which earlier messages explained."""
    error: BaseException | None = None
    """The exception that ended the training."""
    step: int = 0
    """The step in progress."""
    durable: int | None = None
    """The newest step of this training that a level has."""
    in_memory: int | None = None
    """The newest step of this training that memory has."""

    @property
    def urls(self) -> list[str]:
        """URLs of the levels, fast to slow."""
        return [level.url for level in self.config.levels]


# ---------------------------------------------------------------- the start


def resumed(snapshot: Snapshot, now_ns: int, position: str, seconds: float) -> str:
    """Return the line for a restart. ``position``: the position in the data; ``seconds``: the duration of the
    restore.
    """
    at = ""
    if position:
        at = f" ({position})"
    line = (
        f"resumed step {snapshot.step} of run {_run(snapshot)}{at} from {source_of(snapshot)}: "
        f"{_age(snapshot, now_ns)}restored in {duration(seconds)}"
    )
    if snapshot.repeats is not None:
        line += f"; step {snapshot.repeats.step} is trained again, to prove the restart (verify_restart)"
    return line


def loaded(snapshot: Snapshot, now_ns: int) -> str:
    """Return the line for weights that are only read, for an evaluation."""
    return (
        f"loaded the weights of step {snapshot.step} of run {_run(snapshot)} from {source_of(snapshot)}: "
        f"{_age(snapshot, now_ns)}read in {duration(snapshot.seconds)}"
    )


def fresh(absence: Absence | None, *, how: str = 'engine.restore("latest")', step: int = 0) -> str:
    """Return the line for a start without a snapshot.

    ``absence``: the reason why there was none; ``None`` if no restart was requested, which ``how`` would do. ``step``:
    where training starts.
    """
    if absence is None:
        start = "starting fresh"
        if step:
            start = f"starting a new run at step {step}"
        return f"{start}: no restart was asked for; {how} resumes the newest snapshot, if there is one"
    return f"starting fresh: {_why_absent(absence)}"


def _why_absent(absence: Absence) -> str:
    where = places(absence.urls)
    if absence.unreadable:
        return f"no snapshot {where} could be read ({_steps(absence.unreadable)}); the messages above say why"
    if absence.incomplete:
        reason = f"there are only incomplete snapshots {where} ({_steps(absence.incomplete)})"
        if absence.urls:
            reason += f"; `lazysnap ls {absence.urls[0]}` lists the contents"
        return reason
    for url, count in absence.uncommitted.items():
        directories = "directories"
        if count == 1:
            directories = "directory"
        return (
            f"there is no snapshot {where}, but {count} {directories} without a valid manifest, which is written last; "
            f"`lazysnap ls {url}` lists the contents"
        )
    if absence.is_partial:
        return f"no snapshot was found {where}, but not all of that could be read; the messages above say what"
    return f"there is no snapshot {where}"


def places(urls: Iterable[str]) -> str:
    """Return the text for all searched places."""
    text = "in memory"
    for url in urls:
        text += f" or at {url}"
    return text


def from_checkpoint(path: str) -> str:
    """Return the line for a start from a checkpoint of the framework."""
    return f"starting a new run from the checkpoint {path}, which is not a snapshot of lazysnap"


def _run(snapshot: Snapshot) -> str:
    return snapshot.run or short_id(snapshot.run_id)


def source_of(snapshot: Snapshot) -> str:
    """Return the text for the place from which a snapshot was read."""
    if snapshot.level == PARITY:
        return "parity in the memory of other nodes"
    return snapshot.level


def _age(snapshot: Snapshot, now_ns: int) -> str:
    """Return the text for the time since the capture; empty if clocks contradict each other."""
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
    """Return the text for the lost steps. ``boundaries``: number of boundaries after the capture.

    The step in progress is lost, too. "At most", because a training that was over had none.
    """
    if boundaries < 0:
        return ""
    if boundaries == 0:
        return ", lost at most the step that was running"
    return f", lost {boundaries} step{_s(boundaries)} and at most the one that was running"


def _steps(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps[-_MOST_STEPS:]]
    if len(steps) > _MOST_STEPS:
        shown.insert(0, "…")
    return f"step{_s(len(steps))} {', '.join(shown)}"


def intervals(config: SnapshotConfig, group: tuple[int, int]) -> str:
    """Return where and how often snapshots are stored.

    Args:
        config: settings of the training.
        group: nodes that protect each other, and how many of them may be lost.
    """
    size, parity = group
    parts = [f"stored at {level.url} every {_interval(level, config.every_n_steps)}" for level in config.levels]
    machines = "this machine"
    if parity:
        parts.append(f"any {parity} of {size} nodes may be lost")
        machines = "these machines"
    if not config.levels:
        parts.append(f"no storage level: nothing outlives {machines}")
    return ", ".join(parts)


def _interval(level: PersistentLevel, captured_every: int) -> str:
    if level.every_n_steps is None:
        return f"{level.period_s:g} s"
    steps = due_every(level.every_n_steps, captured_every)
    if steps == 1:
        return "step"
    return f"{steps} steps"


# ---------------------------------------------------------------- the end


def summary(statistics: Statistics, end: EndFacts) -> list[str]:
    """Return the lines about captured and stored steps, if a step was due. See also ``not_durable``."""
    lines = []
    if end.error is not None:
        lines.append(_failed(end.error, end))
    if statistics.began or statistics.skipped:
        lines.append(_sums(statistics, end))
        newest = statistics.last_whole_step
        is_stored = any(url in statistics.last_durable_step for url in end.urls)
        if newest is None and not is_stored:
            lines.append("NOTHING OF THIS TRAINING IS CAPTURED: a restart would not find any of its steps")
        elif newest is not None and end.ending is not EndKind.CLOSED and not not_durable(statistics, end):
            lines.append(f"step {newest}: {_fate(end)}")
    elif end.untrained is not None:
        lines += _untrained(end.untrained, end)
    return lines


def _sums(statistics: Statistics, end: EndFacts) -> str:
    due = statistics.began + statistics.skipped.total()
    captured = f"captured {statistics.whole} of {due} due step{_s(due)}"
    if statistics.shard_bytes:
        captured += f" ({decimal(statistics.shard_bytes)} each)"
    parts = [captured]
    for reason, count in _uncaptured(statistics).items():
        parts.append(f"{count} step{_s(count)} not captured: {reason}")
    for url in end.urls:
        parts.append(f"stored {statistics.persisted[url]} at {url}{_newest(statistics, url)}")
    if statistics.last_protected_step is not None:
        parts.append(f"protected {statistics.protected} on other nodes (newest: step {statistics.last_protected_step})")
    if not end.urls:
        parts.append("stored nowhere: no storage level is set")
    waited = f"training waited {duration(statistics.waited_s)} in all"
    if statistics.device_wait_s:
        waited += f", its devices {duration(statistics.device_wait_s)}"
    parts.append(waited)
    return "; ".join(parts)


def _uncaptured(statistics: Statistics) -> dict[str, int]:
    """Return the number of due steps that were not captured, by reason."""
    counts = dict(sorted(statistics.skipped.items()))
    counts["the state changed while it was copied"] = statistics.torn
    counts["the copy failed"] = statistics.failed
    return {reason: count for reason, count in counts.items() if count}


def _newest(statistics: Statistics, url: str) -> str:
    if url not in statistics.last_durable_step:
        return ""
    return f" (newest: step {statistics.last_durable_step[url]})"


def _untrained(resumed: Resumed, end: EndFacts) -> list[str]:
    if end.error is not None:
        if not resumed.in_memory:
            return []
        return [f"step {resumed.newest_step}: {_fate(end)}"]
    if end.is_finished:
        line = f"step {resumed.step}, which was resumed, is the last step of this training"
    else:
        line = f"no step was trained after step {resumed.step}, which was resumed"
    if resumed.in_memory and not resumed.only_in_memory and end.ending is EndKind.LINGERING:
        line += f"; {_fate(end)}"
    return [line]


def _failed(error: BaseException, end: EndFacts) -> str:
    """Return the line that names the exception which ended a training, and what a restart finds."""
    kind = type(error).__name__
    text = " ".join(str(error).split())
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}…"
    why = kind
    if text:
        why = f"{kind}: {text}"
    verb = "failed"
    if kind in _INTERRUPTIONS:
        verb = "was interrupted"
    return f"training {verb} in step {end.step} ({why}); {_left(end)}"


def _left(end: EndFacts) -> str:
    """Return the text for what a restart finds."""
    if end.durable is not None:
        stored = f"step {end.durable} is durable"
        if end.in_memory is None or end.in_memory <= end.durable:
            return stored
    elif end.in_memory is None:
        return "nothing of it is captured yet: a restart begins fresh, as this one did"
    elif end.urls:
        stored = "no step of it is on storage yet"
    else:
        stored = "there is no storage level"
    text = f"{stored}; memory has step {end.in_memory}"
    if end.urls:
        text += ", and the keeper stores it now"
    return text


def not_durable(statistics: Statistics, end: EndFacts) -> dict[str, str]:
    """Return the values of the warning that the newest capture is not stored at every level.

    Empty without a capture, if it is stored, and after a crash, when memory has it.
    """
    if end.ending is EndKind.ABANDONED:
        return {}
    newest = statistics.last_whole_step
    resumed = end.untrained
    if newest is None and resumed is not None and resumed.only_in_memory:
        loss = f"step {resumed.newest_step}, which was resumed from memory, is not at {', '.join(end.urls)}"
        return {"what": loss, "fate": _fate(end)}
    missing = [url for url in end.urls if statistics.last_durable_step.get(url) != newest]
    if newest is None or not missing:
        return {}
    why = _failures(statistics, missing) or _waited(end, missing)
    loss = f"step {newest}, the newest capture, is not at {', '.join(missing)}{why}"
    return {"what": loss, "fate": _fate(end)}


def _failures(statistics: Statistics, urls: Sequence[str]) -> str:
    count = sum(statistics.level_failures[url] for url in urls)
    if not count:
        return ""
    return f" ({count} write{_s(count)} failed)"


def _waited(end: EndFacts, missing: Sequence[str]) -> str:
    if end.ending is EndKind.CLOSED:
        return ""
    if all(url in end.failing for url in missing):
        return " (nothing can be stored there now; a message above says why)"  # the wait ended before its deadline
    return f" after {end.config.drain_timeout_s:g} s (drain_timeout_s)"


def _fate(end: EndFacts) -> str:
    if end.ending is EndKind.CLOSED:
        return "its keeper keeps storing it"
    resumable = "it"
    if end.ranks > 1:
        resumable = "the newest step that all ranks have"
    linger_s = end.config.memory.linger_s
    return f'it stays in memory for {linger_s:g} s (linger_s), where a restart with "latest" finds {resumable}'


def _s(count: int) -> str:
    """Return the plural ending of a noun."""
    if count == 1:
        return ""
    return "s"
