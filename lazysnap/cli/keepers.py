"""The keepers of this node that belong to the owner of this process; ``lazysnap stop``, which ends one."""

import argparse
import os
import pathlib
import select
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lazysnap.cli.output import Output
from lazysnap.config import SnapshotConfig, resolve_url
from lazysnap.errors import KeeperError
from lazysnap.keeper import asking
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.questions import Answer, NodeState, Question
from lazysnap.keeper.wire import OtherVersion

_LEAST_S = 0.5
"""Minimum seconds to wait for the answer of a keeper, also after ``--timeout``: a silent keeper may be killed."""


def identities(job: str) -> list[JobIdentity]:
    """Return the possible jobs for ``job``: a ``job_id``, or the path or URL of a first level."""
    names = dict.fromkeys((job, resolve_url(job)))
    return [JobIdentity.from_config(SnapshotConfig(job_id=name)) for name in names]


@dataclass(frozen=True)
class KeeperProcess:
    """A keeper in the list of processes."""

    identity: JobIdentity
    pid: int
    is_reachable: bool
    """True if its socket is at the path that this process uses."""


def of_this_node() -> Iterator[KeeperProcess]:
    """Yield the keepers of this user.

    The command line of a keeper names its job; the path of its socket follows from the job and the runtime directory.
    """
    sockets = set()
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            words = os.fsdecode(path.read_bytes()).split("\0")
        except OSError:  # it ended meanwhile
            continue
        options = {}
        for word in words:
            option, equals, value = word.partition("=")
            if option.startswith("--") and equals:
                options[option.removeprefix("--")] = value
        if "lazysnap.keeper" not in words or not {"job", "node", "socket"} <= options.keys():
            continue
        identity = JobIdentity(options["job"], os.getuid(), options["node"])
        if options["socket"] not in sockets:
            sockets.add(options["socket"])
            is_reachable = options["socket"] == str(identity.files.socket_path)
            yield KeeperProcess(identity, int(path.parent.name), is_reachable)


# ---------------------------------------------------------------- asking


@dataclass(frozen=True)
class KeeperAnswer:
    """The answer of a keeper, or the reason why there is none."""

    identity: JobIdentity
    pid: int
    state: NodeState | None = None
    """The state; ``None`` if it did not answer, or no training began yet."""
    problem: str = ""


def ask(identity: JobIdentity, pid: int, timeout_s: float) -> KeeperAnswer | None:
    """Ask the keeper of a job for its state; ``None`` if there is no keeper. Blocks: at most ``timeout_s``.

    ``pid``: its known process id, or 0.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        channel = try_connect(identity)
    except KeeperError as error:
        return KeeperAnswer(identity, pid, problem=str(error))
    if channel is None and _is_stopped(pid):  # its queue of connections may be full
        return KeeperAnswer(identity, pid, problem=_why_silent(pid, timeout_s))
    if channel is None:
        return None
    pid = channel.peer_pid
    try:
        answer = asking.ask(channel, Question(about="status"), deadline_s - time.monotonic())
    except TimeoutError:
        return KeeperAnswer(identity, pid, problem=_why_silent(pid, timeout_s))
    except OtherVersion as error:
        return KeeperAnswer(identity, pid, problem=f"keeper {pid} is of another version of lazysnap: {error}")
    except KeeperError as error:
        return KeeperAnswer(identity, pid, problem=str(error))
    except OSError:
        return None  # it ended
    finally:
        channel.close()
    return KeeperAnswer(identity, pid, answer.status)


def _why_silent(pid: int, timeout_s: float) -> str:
    text = f"keeper {pid} does not answer within {timeout_s:g} s"
    if _is_stopped(pid):
        return f"{text}: it is stopped; `kill -CONT {pid}` resumes it"
    return f"{text}: it hangs, or the machine is overloaded; training continues; try again"


def _is_stopped(pid: int) -> bool:
    try:
        return "State:\tT" in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# ---------------------------------------------------------------- stop


def stop(args: argparse.Namespace, output: Output) -> int:
    """Ask the keeper of the job on this node to end, and wait for it.

    Blocks: at most ``--timeout``, and ``_LEAST_S`` for each keeper. A keeper first stores the newest captures; if it
    cannot, it stays, unless ``--force`` is given. Returns 1 if it stays.
    """
    deadline = time.monotonic() + args.timeout
    ended = []
    staying = []
    for identity in identities(args.job):
        asked = _ask_to_end(identity, deadline, is_forced=args.force)
        if asked is None:
            continue
        pid, answer = asked
        refusal = answer.text
        if not refusal and not _wait_for_end(pid, deadline):
            refusal = (
                f"it did not end within {args.timeout:g} s: it will end after its last write; "
                f"`kill {pid}` ends it now, and loses captures that are only in memory"
            )
        if refusal:
            staying.append({"pid": pid, "reason": refusal})
            output.line(f"keeper {pid} stays: {refusal}", "yellow")
        else:
            ended.append({"pid": pid, "durable": dict(answer.durable)})
            output.line(f"keeper {pid} ended; {_text_of_durable(answer.durable)}")
    if not ended and not staying:
        output.line(f"no keeper of job {args.job} on this node; `lazysnap status` lists those that run")
    return output.result(ok=not staying, job=args.job, ended=ended, staying=staying)


def _text_of_durable(durable: Mapping[str, int | None]) -> str:
    texts = []
    for url, step in durable.items():
        if step is not None:
            texts.append(f"step {step} is durable at {url}")
    if not texts:
        return "nothing of its job is stored"
    return "; ".join(texts)


def _ask_to_end(identity: JobIdentity, deadline: float, *, is_forced: bool) -> tuple[int, Answer] | None:
    """Ask the keeper of a job to end. Return its process and its answer; ``None`` without a keeper."""
    channel = try_connect(identity)
    if channel is None:
        return None
    pid = channel.peer_pid
    question = Question(about="stop", is_forced=is_forced)
    try:
        return pid, asking.ask(channel, question, max(_LEAST_S, deadline - time.monotonic()))
    except TimeoutError:
        refusal = (
            "it is still storing its newest capture, or does not answer; wait for it, or end it with "
            f"`kill -9 {pid}`, which loses captures that are only in memory"
        )
        return pid, Answer(text=refusal)
    except OtherVersion as error:
        refusal = f"it is of another version of lazysnap ({error}); `kill {pid}` ends it: it stores what it holds first"
        return pid, Answer(text=refusal)
    except KeeperError as error:
        return pid, Answer(text=str(error))
    except OSError:
        return None
    finally:
        channel.close()


def _wait_for_end(pid: int, deadline: float) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([process], [], [], max(0.0, deadline - time.monotonic()))
        return bool(readable)
    finally:
        os.close(process)
