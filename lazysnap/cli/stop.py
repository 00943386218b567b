"""``lazysnap stop``: end the keepers of a job that are still there after its training."""

import argparse
import os
import select
import time

from lazysnap.cli.keepers import identities
from lazysnap.cli.output import Output
from lazysnap.errors import KeeperError
from lazysnap.keeper import asking
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.questions import Question

_ANSWER_S = 5.0


def run(args: argparse.Namespace, output: Output) -> int:
    """Ask the keeper of the job on this node to end, and wait for it.

    Blocks: at most ``--timeout``. The keeper first stores the newest captures; if it cannot, it stays, unless
    ``--force`` is given. Returns 1 if it stays.
    """
    deadline = time.monotonic() + args.timeout
    ended, staying = [], []
    for identity in identities(args.job):
        pid, refusal = _ask_to_leave(identity, deadline, is_forced=args.force)
        if pid is None:
            continue
        if not refusal and not _wait_for_end(pid, deadline):
            refusal = (
                f"it did not end within {args.timeout:g} s: it was told to, and ends when its last write is over; "
                f"`kill {pid}` ends it now, and loses what is only in memory"
            )
        if refusal:
            staying.append({"pid": pid, "reason": refusal})
            output.line(f"keeper {pid} stays: {refusal}", "yellow")
        else:
            ended.append({"pid": pid})
            output.line(f"keeper {pid} ended")
    if not ended and not staying:
        output.line(f"no keeper of job {args.job} on this node; `lazysnap status` lists those that run")
    return output.result(ok=not staying, job=args.job, ended=ended, staying=staying)


def _ask_to_leave(identity: JobIdentity, deadline: float, *, is_forced: bool) -> tuple[int | None, str]:
    """Return the keeper's process, and why it stays; ``None`` if there is no keeper."""
    channel = try_connect(identity)
    if channel is None:
        return None, ""
    pid = channel.peer_pid
    question = Question(about="stop", is_forced=is_forced)
    try:
        answer = asking.ask(channel, question, max(deadline - time.monotonic(), _ANSWER_S))
    except (OSError, KeeperError):
        return pid, (
            "it is still storing its newest capture, or does not answer; wait for it, or end it with "
            f"`kill -9 {pid}`, which loses what is only in memory"
        )
    finally:
        channel.close()
    return pid, answer.text


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
