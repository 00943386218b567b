"""``lazysnap keeper``: a keeper ahead of its job, as a service or sidecar."""

import argparse
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from lazysnap.cli.output import OK, Output
from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError
from lazysnap.keeper.identity import JobIdentity


def run(args: argparse.Namespace, output: Output) -> int:
    """Run a keeper for this job, and start the next one when it ends, until SIGTERM or Ctrl-C.

    Blocks. A keeper ends with its job, or when no trainer comes for a while. It serves all ranks of the node: where a
    launcher runs this command for each rank, only local rank 0 starts one.
    """
    levels = (PersistentLevel(args.url),) if args.url else ()
    if args.local_rank < 0:
        raise ConfigError(f"--local-rank must be 0 or more, got {args.local_rank}")
    identity = JobIdentity.from_config(SnapshotConfig(levels=levels, job_id=args.job_id))
    stop = threading.Event()
    keeper: list[subprocess.Popen[bytes]] = []

    def end(*_: Any) -> None:
        stop.set()
        for process in keeper:
            process.terminate()  # it persists its newest snapshot, then leaves

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, end)
    output.say(f"keeping snapshots of job {identity.job_id}")
    command = [sys.executable, "-m", "lazysnap.keeper", "--foreground", *identity.arguments]
    started = 0
    if args.local_rank:
        stop.wait()
    while not stop.is_set():
        keeper[:] = [subprocess.Popen(command, env={**os.environ, **identity.environment})]
        started += 1
        if stop.is_set():  # said while it was being started
            keeper[0].terminate()
        if keeper[0].wait() != OK:
            stop.wait(1.0)  # a trainer was faster and has started one of its own
    return output.result(job_id=identity.job_id, keepers=started)
