"""The keepers of this node that belong to the owner of this process, and their state."""

import os
import pathlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lazysnap.config import SnapshotConfig, resolve_url
from lazysnap.errors import KeeperError
from lazysnap.keeper import asking
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.questions import NodeState, Question
from lazysnap.keeper.wire import OtherVersion


def identities(job: str) -> list[JobIdentity]:
    """Return the jobs that ``job`` may mean: a ``job_id``, or the path or URL of a first level."""
    names = dict.fromkeys((job, resolve_url(job)))
    return [JobIdentity.from_config(SnapshotConfig(job_id=name)) for name in names]


@dataclass(frozen=True)
class FoundKeeper:
    """The answer of a keeper, or the reason why there is none."""

    identity: JobIdentity
    pid: int
    state: NodeState | None = None
    """``None``: it did not answer, or no training began yet."""
    problem: str = ""


def of_this_node() -> Iterator[tuple[JobIdentity, int, bool]]:
    """Yield job and process of each keeper of this user, and True if it can be found by its job.

    Its command line names the job; the path of the socket there follows from the job and the runtime directory.
    """
    seen = set()
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            words = os.fsdecode(path.read_bytes()).split("\0")
        except OSError:  # it ended meanwhile
            continue
        facts = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
        if "lazysnap.keeper" not in words or not {"job", "node", "socket"} <= facts.keys():
            continue
        identity = JobIdentity(facts["job"], os.getuid(), facts["node"])
        if facts["socket"] not in seen:
            seen.add(facts["socket"])
            yield identity, int(path.parent.name), facts["socket"] == str(identity.files.socket_path)


def ask(identity: JobIdentity, pid: int, timeout_s: float) -> FoundKeeper | None:
    """Ask the keeper of a job for its state; ``None`` if there is no keeper. Blocks: at most ``timeout_s``.

    ``pid``: the process that is known to be it; 0, if none is.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        channel = try_connect(identity)
    except KeeperError as error:
        return FoundKeeper(identity, 0, problem=str(error))
    if channel is None and _is_stopped(pid):  # many may have asked it already
        return FoundKeeper(identity, pid, problem=_why_silent(pid, timeout_s))
    if channel is None:
        return None
    pid = channel.peer_pid
    try:
        answer = asking.ask(channel, Question(about="status"), deadline_s - time.monotonic())
    except TimeoutError:
        return FoundKeeper(identity, pid, problem=_why_silent(pid, timeout_s))
    except OtherVersion as error:
        return FoundKeeper(identity, pid, problem=f"keeper {pid} is of another version of lazysnap: {error}")
    except KeeperError as error:
        return FoundKeeper(identity, pid, problem=str(error))
    except OSError:
        return None  # it ended
    finally:
        channel.close()
    return FoundKeeper(identity, pid, answer.status)


def _why_silent(pid: int, timeout_s: float) -> str:
    text = f"keeper {pid} does not answer within {timeout_s:g} s"
    if _is_stopped(pid):
        return f"{text}: it is stopped; `kill -CONT {pid}` lets it go on"
    return f"{text}: it hangs, or the machine is overloaded; training goes on, ask again"


def _is_stopped(pid: int) -> bool:
    try:
        return "State:\tT" in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
