"""The identity of a job's keeper: the same command, started again, finds its memory."""

import functools
import hashlib
import os
import socket
from dataclasses import dataclass

from lazysnap.config import SnapshotConfig, check_is_unicode, resolve_url
from lazysnap.errors import ConfigError
from lazysnap.keeper.runtime import KeeperFiles, runtime_directory


def given_job_id(config: SnapshotConfig) -> str | None:
    """The given name of the job, if any: ``config.job_id``, else ``LAZYSNAP_JOB_ID``."""
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
        check_is_unicode(job_id)
        return cls(job_id, os.getuid(), socket.gethostname())

    @property
    def arguments(self) -> list[str]:
        """The keeper's command line. It contains job and node for process lists."""
        # As one word each: a job's name may begin with a dash.
        return [f"--job={self.job_id}", f"--node={self.node}", f"--socket={self.files.socket_path}"]

    @functools.cached_property
    def files(self) -> KeeperFiles:
        """The files with which its processes connect. Raises: KeeperError, if the user has no directory for them."""
        text = f"{self.job_id}\0{self.uid}\0{self.node}"
        key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return KeeperFiles(runtime_directory(), key)
