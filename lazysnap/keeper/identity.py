"""Which keeper is mine: the same command started again must find its memory without being told."""

import hashlib
import os
import socket
from dataclasses import dataclass

from lazysnap.config import SnapshotConfig, resolve_url
from lazysnap.errors import ConfigError


@dataclass(frozen=True)
class JobIdentity:
    """One process of a job, on one node, of one user."""

    job_id: str
    uid: int
    node: str
    local_rank: int = 0
    """Position among the processes of the job on this node: each has a keeper of its own."""

    @classmethod
    def from_config(cls, config: SnapshotConfig, default_url: str | None = None) -> "JobIdentity":
        """``config.job_id``, else ``LAZYSNAP_JOB_ID``, else the first level's URL, else ``default_url``.

        Raises: ConfigError, if none of them is given.
        """
        job_id = config.job_id or os.environ.get("LAZYSNAP_JOB_ID")
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
    def address(self) -> str:
        """The keeper's Unix socket, in the abstract namespace: it vanishes with its process, nothing stays on disk."""
        parts = [self.job_id, str(self.uid), self.node]
        # The first one's address says nothing of it: a job that becomes one process finds its memory.
        text = "\0".join([*parts, str(self.local_rank)] if self.local_rank else parts)
        return f"\0lazysnap/{self.uid}/{hashlib.sha256(text.encode()).hexdigest()[:32]}"
