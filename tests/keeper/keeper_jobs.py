"""Trainer processes, the keeper they share, and waiting for what they do."""

import json
import os
import pathlib
import signal
import subprocess
import sys

from support.keepers import keeper_of
from support.waiting import until

from lazysnap.config import SnapshotConfig
from lazysnap.keeper.identity import JobIdentity

SCRIPT = pathlib.Path(__file__).with_name("trainer.py")


class Trainer:
    """A trainer process; unknown methods are commands of trainer.py."""

    def __init__(self, job_id, environment=None, **settings):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), job_id, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def __getattr__(self, name):
        def command(**arguments):
            self.process.stdin.write(json.dumps([name, arguments]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
            assert line, f"the trainer died at {name}"
            return json.loads(line)

        return command

    def kill(self, signum=signal.SIGKILL):
        self.process.send_signal(signum)
        self.process.wait(60)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self.process.stdin.close()
        self.process.stdout.close()


class Job:
    """One job: its trainers, its keeper, and what is left of them."""

    def __init__(self, job_id, root):
        self.job_id = job_id
        self.root = root
        self.identity = JobIdentity.from_config(SnapshotConfig(job_id=job_id))
        self.trainers = []

    def trainer(self, *, reserve=3, **settings):
        """A connected trainer, with slots."""
        trainer = self.start(**settings)
        connected = trainer.connect()
        assert isinstance(connected, float), connected
        if reserve:
            assert trainer.reserve(count=reserve) == reserve
        return trainer

    def start(self, **settings):
        self.trainers.append(Trainer(self.job_id, **settings))
        return self.trainers[-1]

    def keeper_pid(self):
        return keeper_of(self.identity)

    def is_gone(self):
        """No keeper answers, and neither socket nor lock is left."""
        files = self.identity.files
        return self.keeper_pid() is None and not files.socket_path.exists() and not files.lock_path.exists()

    def is_dead(self):
        """No keeper answers. One that was killed leaves its socket and lock to the next one."""
        return self.keeper_pid() is None

    def level(self, name="level", **settings):
        return {"url": str(self.root / name), "every_n_steps": 1, **settings}

    def close(self):
        for trainer in self.trainers:
            trainer.close()
        while (pid := self.keeper_pid()) is not None:
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: self.keeper_pid() != pid)
