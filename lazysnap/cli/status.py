"""``lazysnap status``: the jobs of this node, and what would survive now."""

import argparse
import json
import pathlib
import re
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any
from urllib.parse import urlsplit

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from lazysnap.cli.keepers import FoundKeeper, ask, identities, of_this_node
from lazysnap.cli.output import OK, Output, count_of
from lazysnap.console import duration
from lazysnap.errors import ConfigError
from lazysnap.keeper.questions import LevelFacts, NodeState, RankState

_ANSWER_S = 2.0
_LONGEST_S = 86400.0
ALIVE = ("attached", "away")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "virtiofs")
"""File systems that are on no disk of this node."""


@dataclass(frozen=True)
class Outcome:
    """The snapshot that a restart would resume. ``step`` is ``None`` if there is none."""

    step: int | None = None
    source: str | None = None


@dataclass(frozen=True)
class Survival:
    """The outcome of one loss."""

    safe: Outcome = field(default_factory=Outcome)
    if_disks_stay: Outcome = field(default_factory=Outcome)
    """A newer snapshot, on disks of the nodes that are lost."""

    @property
    def is_safe(self) -> bool:
        """True if there is a snapshot whatever becomes of disks."""
        return self.safe.step is not None

    def lost(self, reached: int) -> str:
        """Say how many steps would be lost of those that training passed."""
        steps = (one.step for one in (self.if_disks_stay, self.safe) if one.step is not None)
        counts = [str(max(0, reached - step)) for step in steps]
        return " or ".join(counts if self.is_safe else [*counts, "all"])


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the jobs of this node. Blocks: at most about ``_ANSWER_S``; with ``--watch`` until Ctrl-C.

    Returns 1 if a keeper does not answer, a level fails or a job has another problem.
    """
    if args.prometheus:
        if args.json or args.watch is not None:
            raise ConfigError("--prometheus cannot be used with --json or --watch")
        keepers, _ = look(args.job)
        sys.stdout.write(output.hide(exposition([_fields(keeper) for keeper in keepers])))
        return OK
    if args.watch is None:
        found, others = look(args.job)
        for part in _screen(found, others, args.job, output):
            output.show(part)
        jobs = [_fields(one) for one in found]
        return output.result(ok=not any(job["problems"] for job in jobs), jobs=jobs, not_asked=others)
    if args.json or not 0 < args.watch < _LONGEST_S or not output.is_terminal:
        raise ConfigError(
            "--watch needs a terminal and more than 0 seconds, and cannot be used with --json; "
            "in a script, call `lazysnap status` again and again"
        )
    try:
        with output.screen() as show:
            while True:
                show(_screen(*look(args.job), args.job, output))
                time.sleep(args.watch)
    except KeyboardInterrupt:
        return OK


def look(job: str | None) -> tuple[list[FoundKeeper], list[int]]:
    """Return the answers of all keepers of this owner, and the processes of other keepers of this user."""
    running = [(one, 0, True) for one in identities(job)] if job is not None else list(of_this_node())
    own = [(one, pid) for one, pid, is_own in running if is_own]
    with ThreadPoolExecutor(len(own) or 1) as pool:
        answers = pool.map(lambda known: ask(known[0], known[1], _ANSWER_S), own)
        found = [answer for answer in answers if answer is not None]
    others = sorted(pid for _, pid, is_own in running if not is_own)
    return sorted(found, key=lambda one: (one.identity.job_id, one.pid)), others


# ---------------------------------------------------------------- what would survive


def survival(state: NodeState) -> dict[str, Survival]:
    """Return the outcome of the loss of the training process, of its keeper, of both, and of nodes. Pure."""
    memory, stored = Outcome(memory_step(state), "memory"), _newest(map(_stored_at, state.levels))
    in_memory = stored if memory.step is None else memory
    lives = any(rank.phase in ALIVE for rank in state.ranks)
    lost = {"node": 1, "two_nodes": 2, "all_nodes": state.nodes}
    return {
        "process": Survival(in_memory),
        "keeper": Survival(in_memory if lives else stored),  # the trainers hold the memory, too
        "process_and_keeper": Survival(stored),
        **{name: _without_nodes(state, stored, min(count, state.nodes)) for name, count in lost.items()},
    }


def memory_step(state: NodeState) -> int | None:
    """Return the newest step that memory of this node holds whole, of all its ranks. Pure."""
    if state.common_step is not None or len(state.ranks) != 1:
        return state.common_step
    return state.ranks[0].captures[-1].step if state.ranks[0].captures else None


def _without_nodes(state: NodeState, stored: Outcome, lost: int) -> Survival:
    places = [_stored_at(level) for level in state.levels if _is_elsewhere(level, state.nodes)]
    if lost <= state.may_lose and lost < state.nodes:
        places.append(Outcome(state.protected, "memory of other nodes"))
    safe = _newest(places)
    return Survival(safe, stored if _newest((safe, stored)) is stored else Outcome())


def _stored_at(level: LevelFacts) -> Outcome:
    return Outcome(level.newest, level.url)


def _newest(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the one with the greatest step; of the same step, the first."""
    return max((Outcome(), *outcomes), key=lambda one: -1 if one.step is None else one.step)


def _is_elsewhere(level: LevelFacts, nodes: int) -> bool:
    """True if what is stored there survives this node. The place itself is not touched: it might not answer."""
    if urlsplit(level.url).scheme or (nodes > 1 and level.is_shared):
        return True
    mountinfo = pathlib.Path("/proc/self/mountinfo").read_text()
    return nodes == 1 and file_system_of(level.url, mountinfo) in _NETWORK


def file_system_of(path: str, mountinfo: str) -> str:
    """Return the type of the file system that holds a path, by the text of ``/proc/self/mountinfo``. Pure."""
    longest = -1
    file_system = ""
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        # The kernel writes spaces and other separators of a path as octal numbers: proc_pid_mountinfo(5).
        point = re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), mount.split()[4]).rstrip("/")
        if f"{path}/".startswith(f"{point}/") and len(point) >= longest:
            longest = len(point)
            file_system = source.split()[0]
    return file_system


# ---------------------------------------------------------------- figures


def steps_per_s(rank: RankState) -> float | None:
    """Return the rate between the captures in memory; ``None``: unknown. Pure."""
    known = [capture for capture in rank.captures if capture.taken_ns]
    if len(known) < 2 or rank.phase not in ALIVE or known[-1].taken_ns <= known[0].taken_ns:
        return None
    return max(0.0, 1e9 * (known[-1].step - known[0].step) / (known[-1].taken_ns - known[0].taken_ns))


def _age_s(time_ns: int | None) -> float | None:
    return None if not time_ns else max(0.0, (time.time_ns() - time_ns) / 1e9)


def _fields(found: FoundKeeper) -> dict[str, Any]:
    """Return a job in a JSON result: the same keys whether it answers or not (docs/cli.md)."""
    state = found.state
    return {
        "job": found.identity.job_id,
        "keeper": found.pid,
        "answers": not found.problem,
        "run_id": state.run_id if state else None,
        "nodes": state.nodes if state else None,
        "survives": {name: asdict(outcome) for name, outcome in survival(state).items()} if state else {},
        "levels": [_level_fields(level) for level in state.levels] if state else [],
        "ranks": [_rank_fields(rank) for rank in state.ranks] if state else [],
        "parity_bytes": state.parity_bytes if state else 0,
        "problems": problems(found),
    }


def _level_fields(level: LevelFacts) -> dict[str, Any]:
    return {
        "url": level.url,
        "newest_step": level.newest,
        "age_s": _age_s(level.complete_ns),
        "bytes_per_s": level.bytes_per_s,
        "storing_step": level.storing,
        "moved_bytes": level.moved_bytes,
        "total_bytes": level.total_bytes,
        "waiting_steps": level.waiting,
        "is_failing": level.is_failing,
        "failure": level.failure or None,
        "failure_age_s": _age_s(level.failed_ns),
    }


def _rank_fields(rank: RankState) -> dict[str, Any]:
    newest = rank.captures[-1] if rank.captures else None
    return {
        "rank": rank.rank,
        "training": rank.phase in ALIVE,
        "pid": rank.pid,
        "step": rank.reached,
        "captured_step": newest.step if newest else None,
        "captured_age_s": _age_s(newest.taken_ns) if newest else None,
        "steps_per_s": steps_per_s(rank),
        "copy_s": newest.copied_ns / 1e9 if newest and newest.copied_ns else None,
        "waited_s": rank.waited_s or None,
        "slots": rank.slots,
        "memory_bytes": rank.memory_bytes,
        "file_bytes": rank.file_bytes,
        "memory_stays_s": rank.lingers_s,
    }


def exposition(jobs: Iterable[dict[str, Any]]) -> str:
    """Return the numbers of jobs, as ``--json`` has them, in the text format of Prometheus. Pure."""
    lines: dict[str, list[str]] = {}

    def add(prefix: str, values: dict[str, Any], **labels: str) -> None:
        text = ",".join(f"{name}={json.dumps(label, ensure_ascii=False)}" for name, label in labels.items())
        for key, value in values.items():
            if isinstance(value, Real) and key not in ("pid", "rank", "keeper"):
                lines.setdefault(f"{prefix}_{key}", []).append(f"{prefix}_{key}{{{text}}} {float(value)}")

    for job in jobs:
        name = job["job"]
        add("lazysnap", {**job, "problems": len(job["problems"])}, job=name)
        for level in job["levels"]:
            add("lazysnap_level", level, job=name, level=level["url"])
        for rank in job["ranks"]:
            add("lazysnap_rank", rank, job=name, rank=str(rank["rank"]))
        for loss, outcome in job["survives"].items():
            add("lazysnap_survives", outcome["safe"], job=name, loss=loss)
    return "".join(f"# TYPE {name} gauge\n" + "\n".join(samples) + "\n" for name, samples in lines.items())


def problems(found: FoundKeeper) -> list[str]:
    """Return what keeps a job from being safe, in words. Pure."""
    if found.state is None:
        return [found.problem] if found.problem else []
    state = found.state
    failing = [f"{level.url} fails: {level.failure or 'no answer'}" for level in state.levels if level.is_failing]
    bare = any(rank.phase in ALIVE and not rank.slots for rank in state.ranks)
    nothing = ["a rank has no slots in memory: nothing of it is captured now"] if bare else []
    return [*nothing, *failing, *state.problems]


# ---------------------------------------------------------------- the screen


def _screen(found: list[FoundKeeper], others: list[int], job: str | None, output: Output) -> list[RenderableType]:
    parts = [part for one in found for part in _job(one, output)]
    if not parts:
        owner = "this user and runtime directory" if others else "this user"
        what = f"job {job} does not run" if job else f"no training with lazysnap of {owner} runs"
        parts += [output.cell(f"{what} on this node, and none left memory here")]
        parts += [output.cell("`lazysnap ls URL` lists the snapshots of a level: a directory or an object store")]
    if others:
        text = f"{count_of(len(others), 'more keeper')} of this user: process {', '.join(map(str, others))}. "
        text += "Another LAZYSNAP_RUNTIME_DIR, or a password in the name of the job: `lazysnap status JOB`"
        parts += [output.cell(text, "yellow")]
    return parts


def _job(found: FoundKeeper, output: Output) -> Iterator[RenderableType]:
    state, wrong = found.state, problems(found)
    yield output.cell(f"job {found.identity.job_id}", "bold")
    if state is not None:
        where = f"node {state.node} of {state.nodes}, " if state.nodes > 1 else ""
        yield output.cell(f"run {state.run_id[:8]}, {where}keeper {found.pid}; {_life(state)}")
    elif not wrong:
        yield output.cell(f"keeper {found.pid} waits for a training to begin")
    yield from (output.cell(problem, "bold red") for problem in wrong)
    if state is not None:
        for table in _tables(state, output):
            yield from ("", table)
        for level in state.levels:
            if level.failure and not level.is_failing:  # else it is one of the problems
                age_s = _age_s(level.failed_ns)
                ago = "" if age_s is None else f", {duration(age_s)} ago"
                yield output.cell(f"last failure of {level.url}{ago}: {level.failure}", "yellow")
        if state.nodes > 1:
            yield output.cell("memory is that of this node: a restart takes the newest step that all nodes hold whole")
        if state.parity_bytes:
            yield output.cell(f"and {decimal(state.parity_bytes)} of memory that protects other nodes")
    yield ""


def _life(state: NodeState) -> str:
    """Say whether the training lives; of several ranks, the first that does not counts."""
    if not state.ranks:
        return "training ended well; old snapshots are being named and deleted"
    rank = next((rank for rank in state.ranks if rank.phase not in ALIVE), state.ranks[0])
    if rank.phase in ALIVE:
        return f"training runs, process {rank.pid}, for {duration(max(0.0, time.time() - rank.since_s))}"
    age_s = _age_s(rank.end.ended_ns) if rank.end is not None else None
    ended = f"process {rank.pid} ended{'' if age_s is None else f' {duration(age_s)} ago'}"
    if rank.lingers_s is None:
        return f"process {rank.pid} is done; the keeper stores what is left, then ends"
    return f"{ended}; memory waits {duration(rank.lingers_s)} more for a restart"


_ROWS = {
    "process": "the training process",
    "keeper": "the keeper",
    "process_and_keeper": "both",
    "node": "this node",
    "two_nodes": "two nodes",
    "all_nodes": "all nodes",
}


def _tables(state: NodeState, output: Output) -> Iterator[Table]:
    reached = max((rank.reached for rank in state.ranks if rank.reached is not None), default=0)
    lives = any(rank.phase in ALIVE for rank in state.ranks)
    hidden = {"two_nodes": state.nodes < 3, "all_nodes": state.nodes < 2, "process_and_keeper": not lives}
    rows: list[Iterable[object]] = []
    for name, outcome in survival(state).items():
        if not hidden.get(name, False):
            goes_on = name == "keeper" and lives and outcome.safe.source == "memory"
            text = "training goes on with a new keeper" if goes_on else _outcome(outcome, state.levels)
            label = "the process (it ended)" if name == "process" and not lives else _ROWS[name]
            lost = "0" if goes_on else outcome.lost(reached)
            rows.append((label, output.cell(text, "" if outcome.is_safe else "yellow"), lost))
    yield output.table("", "if this ends", "a restart resumes", "steps lost>", rows=rows, is_plain=True)
    if state.levels:
        columns = ["level", "newest>", "stored>", "rate>", "stores now"]
        yield output.table("", *columns, rows=map(_level_row, state.levels), is_plain=True)
    columns = ["rank>", "step>", "captured>", "steps/s>", "copy>", "waited>", "memory"]
    yield output.table("", *columns, rows=map(_rank_row, state.ranks), is_plain=True)


def _outcome(outcome: Survival, levels: list[LevelFacts]) -> str:
    only_level = levels[0].url if len(levels) == 1 else None

    def text_of(snapshot: Outcome) -> str:
        source = "storage" if snapshot.source == only_level else snapshot.source
        return f"step {snapshot.step} from {source}"

    safe = text_of(outcome.safe)
    disks = text_of(outcome.if_disks_stay)
    if outcome.if_disks_stay.step is None:
        return safe if outcome.is_safe else "nothing: it begins anew"
    return f"{f'{safe}; ' if outcome.is_safe else ''}{disks}, if its disk stays"


def _level_row(level: LevelFacts) -> Iterator[str]:
    yield level.url
    yield "none yet" if level.newest is None else f"step {level.newest}"
    age_s = _age_s(level.complete_ns)
    yield "" if age_s is None else f"{duration(age_s)} ago"
    yield "" if level.bytes_per_s is None else f"{decimal(int(level.bytes_per_s))}/s"
    total = level.total_bytes
    share = f", {100 * level.moved_bytes // total} % of {decimal(total)}" if total else ""
    now = "" if level.storing is None else f"step {level.storing}{share}"
    yield now + (f"{', ' if now else ''}{count_of(level.waiting, 'step')} waiting" if level.waiting else "")


def _rank_row(rank: RankState) -> Iterator[str]:
    facts = _rank_fields(rank)
    rate, waited, age = facts["steps_per_s"], facts["waited_s"], facts["captured_age_s"]
    yield str(rank.rank)
    yield "" if rank.reached is None else str(rank.reached)
    yield "" if age is None else f"{duration(age)} ago"
    yield "" if rate is None else f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"
    yield "" if facts["copy_s"] is None else duration(facts["copy_s"])
    yield "" if waited is None else duration(waited)
    files = f", {decimal(rank.file_bytes)} of them in files" if rank.file_bytes else ""
    yield f"{count_of(rank.slots, 'slot')}, {decimal(rank.memory_bytes + rank.file_bytes)}{files}"
