"""The identity of a job's keeper: the same command, started again, finds its memory by itself."""

import functools
import hashlib
import os
import socket
from dataclasses import dataclass

from lazysnap.config import SnapshotConfig, resolve_url
from lazysnap.errors import ConfigError
from lazysnap.keeper.owner import owner_secret
from lazysnap.levels.redaction import shown
from lazysnap.links.secret import Secret

KEY = "LAZYSNAP_KEEPER_KEY"
"""Environment variable in which a keeper is given the secret of its job."""


def given_job_id(config: SnapshotConfig) -> str | None:
    """The job's name, if somebody gave it one: ``config.job_id``, else ``LAZYSNAP_JOB_ID``."""
    return config.job_id or os.environ.get("LAZYSNAP_JOB_ID") or None


@dataclass(frozen=True)
class JobIdentity:
    """A job on one node, of one user. Its keeper serves all ranks there."""

    job_id: str
    uid: int
    node: str

    @classmethod
    def from_config(cls, config: SnapshotConfig, default_url: str | None = None) -> "JobIdentity":
        """``config.job_id``, else ``LAZYSNAP_JOB_ID``, else the first level's URL, else ``default_url``.

        Raises: ConfigError, if none of them is given.
        """
        job_id = given_job_id(config)
        if not job_id and config.levels:
            job_id = config.levels[0].url
        if not job_id and default_url:
            job_id = resolve_url(default_url)
        if not job_id:
            raise ConfigError(
                "nothing names this job: give SnapshotConfig(levels=...), SnapshotConfig(job_id=...) or the "
                "environment variable LAZYSNAP_JOB_ID, so that a restart finds its memory"
            )
        return cls(job_id, os.getuid(), socket.gethostname())

    @property
    def arguments(self) -> list[str]:
        """The keeper's command line. Its job and node stand there for people who list processes."""
        # One word each: a job's name may begin with a dash.
        facts = [f"--job={shown(self.job_id)}", f"--node={self.node}"]
        return [*facts, f"--address={self.address.encode().hex()}"]

    @functools.cached_property
    def secret(self) -> Secret:
        """The secret of the job's processes on this node. Raises: KeeperUnavailable, if the user has none."""
        text = "\0".join([owner_secret(), self.job_id, str(self.uid), self.node])
        return Secret(hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest())

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the job's keeper, beside those of this process."""
        return {KEY: self.secret.hex}

    def was_given_to(self, pid: int) -> bool:
        """True if that process can be seen to have been started with the job's secret: a keeper that said nothing yet.

        Nobody without the secret can have it there.
        """
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return f"{KEY}={self.secret.hex}".encode() in file.read().split(b"\0")
        except OSError:
            return False

    @property
    def address(self) -> str:
        """The keeper's Unix socket, in the abstract namespace: it vanishes with its process, nothing stays on disk.

        Without the secret nobody knows it before it is there.
        """
        return f"\0lazysnap/{self.uid}/{hashlib.sha256(b'name' + self.secret.hex.encode()).hexdigest()[:32]}"
