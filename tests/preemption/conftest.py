"""Trainings that are preempted: real processes, real signals."""

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import uuid

import pytest
from support.keepers import keeper_of
from support.stored import newest_directory, steps_at

from lazysnap import SnapshotConfig
from lazysnap.keeper.identity import JobIdentity

HERE = pathlib.Path(__file__).parent
UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
INIT = [sys.executable, str(HERE / "small_init.py")]
PARENTS = {
    "none": [],
    "a shell": ["sh", "-c", '"$@"; exit $?', "sh"],
    "process 1": UNSHARE,
    "an init": [*UNSHARE, *INIT],
}
LINE = re.compile(r"lazysnap: (.*) ended this training in step (\d+)(.*)")
DURABLE = re.compile(r"; step (\d+) is durable at (\S+)")


class Run:
    """One start of a training, and the lines it wrote."""

    def __init__(self, command, env, depth):
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.depth = depth
        self.lines = []

    def await_line(self, *wanted):
        """Read until one of these lines; what else was written stays in ``lines``."""
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if self.lines[-1] in wanted:
                return
        raise AssertionError("\n".join([f"none of {wanted} in:", *self.lines]))

    def await_text(self, text):
        """Read until a line that has this text, and return it."""
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError("\n".join([f"no {text!r} in:", *self.lines]))

    def pid(self):
        """The process that gets the signal: the training, or the init above it."""
        pid = self.process.pid
        for _ in range(self.depth):
            [pid] = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(pid)

    def worker(self, rank):
        [pid] = [int(line.split()[2]) for line in self.lines if re.fullmatch(rf"{rank} \d+", line)]
        return pid

    def end(self):
        """Read to the end; the exit code, as a shell would show it."""
        self.lines += [line.rstrip("\n") for line in self.process.stdout]
        code = self.process.wait()
        return 128 - code if code < 0 else code

    def steps(self, word):
        return [int(line.split()[1]) for line in self.lines if re.fullmatch(rf"{word} \d+", line)]

    def cut(self):
        """The step that was cut and the one that is durable, of the last line of lazysnap."""
        found = [match for line in self.lines if (match := LINE.search(line))]
        assert found, "\n".join(self.lines)
        durable = [int(match[1]) if (match := DURABLE.search(one[3])) else None for one in found]
        assert len(set(durable)) == 1, "\n".join(self.lines)  # all ranks name the same step
        return max(int(one[2]) for one in found), durable[0]


class Trainings:
    def __init__(self, root, python):
        """``python``: forks what it is to run. A training that is process 1 is started by Python itself."""
        self.root, self.runs, self._python = root, [], python
        self.job_id = uuid.uuid4().hex
        self.url = str(root / "snapshots")

    def start(self, integration, phase, at, *, parent="none", **env):
        """``at``: the step; with a ``+`` the training goes on behind it."""
        env = {**os.environ, "LAZYSNAP_JOB_ID": self.job_id, **env}
        python = sys.executable if parent == "process 1" else self._python
        command = [*PARENTS[parent], python, str(HERE / "preempted.py"), integration, str(self.root), phase, at]
        depth = {"none": 0}.get(parent, 1)
        self.runs.append(Run(command, env, depth))
        return self.runs[-1]

    def start_ranks(self, phase, at, **env):
        launcher = pathlib.Path(sys.executable).with_name("torchrun")
        command = [self._python, str(launcher), "--standalone", "--nproc-per-node", "2", "--no-python", self._python,
                   str(HERE / "preempted.py"), "plain", str(self.root), phase, at]  # fmt: skip
        env = {**os.environ, "LAZYSNAP_JOB_ID": self.job_id, **env}
        self.runs.append(Run(command, env, 0))
        return self.runs[-1]

    def durable(self):
        """The newest complete step on storage."""
        path = newest_directory(self.url)
        return path and int(re.search(r"step-(\d+)-", path)[1])

    def all_durable(self):
        """The complete steps on storage."""
        return set(steps_at(self.url))

    def keeper(self, node=None):
        """The keeper of this machine, or of one that a rank takes itself to be on."""
        identity = JobIdentity.from_config(SnapshotConfig(job_id=self.job_id))
        return keeper_of(dataclasses.replace(identity, node=node or identity.node))

    def close(self):
        for run in self.runs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.process.pid, signal.SIGKILL)
            # Workers of torchrun are in sessions of their own.
            for pid in [int(line.split()[2]) for line in run.lines if re.fullmatch(r"rank \d \d+", line)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.process.stdout.close()
            run.process.wait()


@pytest.fixture
def trainings(tmp_path, forking_python):
    trainings = Trainings(tmp_path, forking_python)
    yield trainings
    trainings.close()


def can_unshare():
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def namespaces():
    """Skip where a user may make no namespace of processes."""
    if not can_unshare():
        pytest.skip("unshare --user --pid is not allowed here")
