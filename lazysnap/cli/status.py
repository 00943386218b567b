"""``lazysnap status``: the jobs of this node, and the snapshots that would survive a failure now.

The keys of ``--json`` (docs/cli.md) are the complete set of figures: the screen and the text for Prometheus use it.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from numbers import Real
from operator import itemgetter
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal

from lazysnap.cli.keepers import KeeperAnswer, KeeperProcess, ask, identities, of_this_node
from lazysnap.cli.output import OK, Output, count_of, seconds_text
from lazysnap.cli.survival import source_text, survival
from lazysnap.console import duration
from lazysnap.errors import ConfigError
from lazysnap.keeper.questions import LevelFacts, NodeState, RankState
from lazysnap.resolver import MEMORY, short_id

_ANSWER_S = 2.0


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the jobs of this node. Blocks: at most about ``_ANSWER_S``.

    Returns: 1 if a keeper does not answer, a level fails or a job has another problem. For Prometheus always 0, because
    the text has the number of problems. Raises: ConfigError.
    """
    if args.prometheus and args.json:
        raise ConfigError("--prometheus and --json are two forms of the same numbers: choose one")
    jobs, not_asked = ask_keepers(args.job)
    if args.prometheus:
        sys.stdout.write(output.hide(exposition(jobs)))
        return OK
    for part in _screen(jobs, not_asked, args.job, output):
        output.show(part)
    return output.result(ok=not any(job["problems"] for job in jobs), jobs=jobs, not_asked=not_asked)


def ask_keepers(job: str | None) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the figures of all jobs of this owner, and the processes of other keepers of this user."""
    if job is None:
        running = list(of_this_node())
    else:
        running = [KeeperProcess(identity, 0, True) for identity in identities(job)]
    reachable = []
    not_asked = []
    for keeper in running:
        if keeper.is_reachable:
            reachable.append(keeper)
        else:
            not_asked.append(keeper.pid)
    with ThreadPoolExecutor(len(reachable) or 1) as pool:
        answers = list(pool.map(_ask, reachable))
    jobs = [job_figures(answer) for answer in answers if answer is not None]
    jobs.sort(key=itemgetter("job", "keeper"))
    return jobs, sorted(not_asked)


def _ask(keeper: KeeperProcess) -> KeeperAnswer | None:
    return ask(keeper.identity, keeper.pid, _ANSWER_S)


# ---------------------------------------------------------------- figures


def job_figures(keeper: KeeperAnswer) -> dict[str, Any]:
    """Return the figures of a job: the same keys with or without an answer of its keeper."""
    figures: dict[str, Any] = {
        "job": keeper.identity.job_id,
        "keeper": keeper.pid,
        "answers": not keeper.problem,
        "run_id": None,
        "node": None,
        "nodes": None,
        "survives": {},
        "levels": [],
        "ranks": [],
        "parity_bytes": 0,
        "problems": [],
    }
    state = keeper.state
    if state is None:
        if keeper.problem:
            figures["problems"] = [keeper.problem]
        return figures
    figures["run_id"] = state.run_id
    figures["node"] = state.node
    figures["nodes"] = state.nodes
    for loss, outcome in survival(state).items():
        figures["survives"][loss] = asdict(outcome)
    figures["levels"] = [_level_figures(level) for level in state.levels]
    figures["ranks"] = [_rank_figures(rank) for rank in state.ranks]
    figures["parity_bytes"] = state.parity_bytes
    figures["problems"] = _problems(state)
    return figures


def _level_figures(level: LevelFacts) -> dict[str, Any]:
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


def _rank_figures(rank: RankState) -> dict[str, Any]:
    ended_age_s = None
    if rank.end is not None:
        ended_age_s = _age_s(rank.end.ended_ns)
    figures: dict[str, Any] = {
        "rank": rank.rank,
        "training": rank.is_training,
        "pid": rank.pid,
        "process_age_s": max(0.0, time.time() - rank.since_s),
        "ended_age_s": ended_age_s,
        "step": rank.reached,
        "captured_step": None,
        "captured_age_s": None,
        "steps_per_s": steps_per_s(rank),
        "copy_s": None,
        "waited_s": rank.waited_s or None,
        "slots": rank.slots,
        "memory_bytes": rank.memory_bytes,
        "file_bytes": rank.file_bytes,
        "memory_stays_s": rank.lingers_s,
    }
    if rank.captures:
        newest = rank.captures[-1]
        figures["captured_step"] = newest.step
        figures["captured_age_s"] = _age_s(newest.taken_ns)
        if newest.copied_ns:
            figures["copy_s"] = newest.copied_ns / 1e9
    return figures


def steps_per_s(rank: RankState) -> float | None:
    """Return the rate between the captures in memory; ``None``: unknown. Pure."""
    captures = [capture for capture in rank.captures if capture.taken_ns]
    if len(captures) < 2 or not rank.is_training:
        return None
    first = captures[0]
    last = captures[-1]
    if last.taken_ns <= first.taken_ns:
        return None
    return max(0.0, 1e9 * (last.step - first.step) / (last.taken_ns - first.taken_ns))


def _age_s(time_ns: int | None) -> float | None:
    if not time_ns:
        return None
    return max(0.0, (time.time_ns() - time_ns) / 1e9)


def _problems(state: NodeState) -> list[str]:
    """Return texts for the problems of a job. Pure."""
    problems = []
    for rank in state.ranks:
        if rank.is_training and not rank.slots:
            problems.append("a rank has no slots in memory: nothing of it is captured now")
            break
    for level in state.levels:
        if level.is_failing:
            failure = level.failure.removeprefix(f"{level.url}: ") if level.failure else "no answer"
            problems.append(f"{level.url} fails: {failure}")
    return [*problems, *state.problems]


# ---------------------------------------------------------------- Prometheus


def exposition(jobs: Iterable[dict[str, Any]]) -> str:
    """Return the numbers among the figures of jobs in the text format of Prometheus. Pure."""
    samples: dict[str, list[str]] = {}
    for job in jobs:
        name = job["job"]
        _add_samples(samples, "lazysnap", {**job, "problems": len(job["problems"])}, job=name)
        for level in job["levels"]:
            _add_samples(samples, "lazysnap_level", level, job=name, level=level["url"])
        for rank in job["ranks"]:
            _add_samples(samples, "lazysnap_rank", rank, job=name, rank=str(rank["rank"]))
        for loss, outcome in job["survives"].items():
            _add_samples(samples, "lazysnap_survives", outcome["safe"], job=name, loss=loss)
    text = ""
    for metric, lines in samples.items():
        text += f"# TYPE {metric} gauge\n" + "".join(lines)
    return text


def _add_samples(samples: dict[str, list[str]], prefix: str, figures: dict[str, Any], **labels: str) -> None:
    texts = []
    for name, label in labels.items():
        texts.append(f"{name}={json.dumps(label, ensure_ascii=False)}")
    for key, value in figures.items():
        if isinstance(value, Real) and key not in ("pid", "rank", "keeper", "node"):
            lines = samples.setdefault(f"{prefix}_{key}", [])
            lines.append(f"{prefix}_{key}{{{','.join(texts)}}} {float(value)}\n")


# ---------------------------------------------------------------- the screen


_LOSSES = {
    "process": "the training process",
    "keeper": "the keeper",
    "process_and_keeper": "both",
    "node": "this node",
    "two_nodes": "two nodes",
    "all_nodes": "all nodes",
}


def _screen(
    jobs: list[dict[str, Any]], not_asked: list[int], job_name: str | None, output: Output
) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for job in jobs:
        parts += _job(job, output)
    if not jobs:
        owner = "this user"
        if not_asked:
            owner = "this user and runtime directory"
        text = f"no training with lazysnap of {owner} runs"
        if job_name:
            text = f"job {job_name} does not run"
        parts.append(output.cell(f"{text} on this node, and none left memory here"))
        parts.append(output.cell("`lazysnap ls URL` lists the snapshots of a level: a directory or an object store"))
    if not_asked:
        processes = ", ".join(map(str, not_asked))
        text = f"{count_of(len(not_asked), 'more keeper')} of this user not shown (process {processes}): it was "
        text += "started with another LAZYSNAP_RUNTIME_DIR; set the same one to see it"
        parts.append(output.cell(text, "yellow"))
    return parts


def _job(job: dict[str, Any], output: Output) -> Iterator[RenderableType]:
    yield output.cell(f"job {job['job']}", "bold")
    if job["run_id"] is not None:
        where = ""
        if job["nodes"] > 1:
            where = f"node {job['node']} of {job['nodes']}, "
        yield output.cell(f"run {short_id(job['run_id'])}, {where}keeper {job['keeper']}")
        yield output.cell(_life(job["ranks"]))
    elif job["answers"]:
        yield output.cell(f"keeper {job['keeper']} waits for a training to begin")
    for problem in job["problems"]:
        yield output.cell(problem, "bold red")
    if job["run_id"] is not None:
        yield from _tables(job, output)
        yield from _notes(job, output)
    yield ""


def _life(ranks: list[dict[str, Any]]) -> str:
    """Return a text for the state of the training; with several ranks for the first that has ended."""
    if not ranks:
        return "training ended well; old snapshots are being named and deleted"
    rank = ranks[0]
    for other in ranks:
        if not other["training"]:
            rank = other
            break
    process = f"process {rank['pid']}"
    if rank["training"]:
        return f"training runs, {process}, for {duration(rank['process_age_s'])}"
    if rank["memory_stays_s"] is None:
        return f"{process} is done; the keeper stores the rest, then ends"
    ended = f"{process} ended"
    if rank["ended_age_s"] is not None:
        ended += f" {duration(rank['ended_age_s'])} ago"
    return f"{ended}; memory waits {duration(rank['memory_stays_s'])} more for a restart"


def _tables(job: dict[str, Any], output: Output) -> Iterator[RenderableType]:
    yield ""
    columns = ["if this ends", "a restart resumes", "steps lost>"]
    yield output.table("", *columns, rows=_loss_rows(job, output))
    if job["levels"]:
        yield ""
        columns = ["level<", "newest>", "stored>", "rate>"]
        progress = [_progress(level) for level in job["levels"]]
        if any(progress):
            columns.append("in progress")
        rows = []
        for level, text in zip(job["levels"], progress, strict=True):
            rows.append([*_level_row(level), text][: len(columns)])
        yield output.table("", *columns, rows=rows)
    yield ""
    columns = ["rank>", "step>", "captured>", "steps/s>", "copy>", "waited>", "slots>", "memory>"]
    if any(rank["file_bytes"] for rank in job["ranks"]):
        columns.append("in files>")
    rows = []
    for rank in job["ranks"]:
        rows.append([*_rank_row(rank), decimal(rank["file_bytes"])][: len(columns)])
    yield output.table("", *columns, rows=rows)


def _loss_rows(job: dict[str, Any], output: Output) -> Iterator[list[object]]:
    lives = False
    reached = 0
    for rank in job["ranks"]:
        lives = lives or rank["training"]
        reached = max(reached, rank["step"] or 0)
    urls = [level["url"] for level in job["levels"]]
    hidden = set()
    if job["nodes"] < 3:
        hidden.add("two_nodes")
    if job["nodes"] < 2:
        hidden.add("all_nodes")
    if not lives:
        hidden.add("process_and_keeper")
    for loss, outcome in job["survives"].items():
        if loss in hidden:
            continue
        label = _LOSSES[loss]
        if loss == "process" and not lives:
            label = "the process (it ended)"
        if loss == "keeper" and lives and outcome["safe"]["source"] == MEMORY:
            yield [label, "training continues with a new keeper", "0"]
        else:
            style = ""
            if outcome["safe"]["step"] is None:
                style = "yellow"
            yield [label, output.cell(_resumed(outcome, urls), style), _steps_lost(outcome, reached)]


def _steps_lost(outcome: dict[str, Any], reached: int) -> str:
    """Return a text for the number of completed steps that would be lost."""
    counts = []
    for resumed in (outcome["if_disks_stay"], outcome["safe"]):
        if resumed["step"] is not None:
            counts.append(str(max(0, reached - resumed["step"])))
    if outcome["safe"]["step"] is None:
        counts.append("all")
    return " or ".join(counts)


def _resumed(outcome: dict[str, Any], urls: list[str]) -> str:
    safe_step = outcome["safe"]["step"]
    disk_step = outcome["if_disks_stay"]["step"]
    if safe_step is None and disk_step is None:
        return "nothing: it starts over"
    if disk_step is None:
        return f"step {safe_step} from {source_text(outcome['safe']['source'], urls)}"
    if safe_step is None:
        return f"step {disk_step} from {source_text(outcome['if_disks_stay']['source'], urls)}, if its disk stays"
    return f"step {safe_step} from {source_text(outcome['safe']['source'], urls)}, {disk_step} if its disk stays"


def _level_row(level: dict[str, Any]) -> list[object]:
    newest = "none yet"
    if level["newest_step"] is not None:
        newest = f"step {level['newest_step']}"
    rate = ""
    if level["bytes_per_s"] is not None:
        rate = f"{decimal(int(level['bytes_per_s']))}/s"
    return [level["url"], newest, _ago(level["age_s"]), rate]


def _progress(level: dict[str, Any]) -> str:
    texts = []
    if level["storing_step"] is not None:
        text = f"step {level['storing_step']}"
        if level["total_bytes"]:
            text += f" {100 * level['moved_bytes'] // level['total_bytes']} %"
        texts.append(text)
    if level["waiting_steps"]:
        texts.append(f"{level['waiting_steps']} waiting")
    return ", ".join(texts)


def _rank_row(rank: dict[str, Any]) -> list[object]:
    step = ""
    if rank["step"] is not None:
        step = str(rank["step"])
    rate = rank["steps_per_s"]
    rate_text = ""
    if rate is not None:
        rate_text = f"{rate:.3g}"
        if rate >= 1000:
            rate_text = f"{rate:.0f}"
    memory = decimal(rank["memory_bytes"] + rank["file_bytes"])
    times = [seconds_text(rank["copy_s"]), seconds_text(rank["waited_s"])]
    return [rank["rank"], step, _ago(rank["captured_age_s"]), rate_text, *times, rank["slots"], memory]


def _ago(age_s: float | None) -> str:
    if age_s is None:
        return ""
    return f"{duration(age_s)} ago"


def _notes(job: dict[str, Any], output: Output) -> Iterator[RenderableType]:
    for level in job["levels"]:
        if level["failure"] and not level["is_failing"]:  # otherwise it is one of the problems
            ago = ""
            if level["failure_age_s"] is not None:
                ago = f", {_ago(level['failure_age_s'])}"
            failure = level["failure"].removeprefix(f"{level['url']}: ")
            yield output.cell(f"last failure of {level['url']}{ago}: {failure}", "yellow")
    if job["nodes"] > 1:
        yield output.cell("memory is that of this node: a restart takes the newest step that all nodes hold whole")
    if job["parity_bytes"]:
        yield output.cell(f"and {decimal(job['parity_bytes'])} of memory that protects other nodes")
