"""Settings: frozen objects, checked when they are made."""

import os
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from lazysnap.errors import ConfigError


def _check_positive(owner: str, name: str, value: object, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{owner}.{name} must be an integer >= 1{' or None' * optional}, got {value!r}")


def _check_seconds(owner: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(f"{owner}.{name} must be a finite number of seconds >= 0, got {value!r}")


def resolve_url(url: str) -> str:
    """``url`` as it names one place: local paths made absolute with links resolved, others unchanged."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file", "local"):
        path = url.split("://", 1)[1] if "://" in url else url
        return os.path.realpath(os.path.expanduser(path))
    return url.rstrip("/")


@dataclass(frozen=True)
class PersistentLevel:
    """A place where snapshots are kept as files: a local path or any fsspec URL."""

    url: str
    """Path or URL of the directory that holds ``step-…`` directories. Made absolute when local."""
    every_n_steps: int = field(default=100, kw_only=True)
    """With one rank: persist the newest capture when the level is idle, at most once in so many steps.
    With several ranks: persist the captures whose step is a multiple of it, on all ranks alike."""
    keep_last: int = field(default=2, kw_only=True)
    """Complete snapshots of this run to keep; older ones are deleted. The newest complete one always stays."""
    keep_every_n_steps: int | None = field(default=None, kw_only=True)
    """Keep snapshots whose step is a multiple of this for ever, besides ``keep_last``."""

    def __post_init__(self) -> None:
        if not isinstance(self.url, (str, os.PathLike)) or not os.fspath(self.url):
            raise ConfigError(f"PersistentLevel.url must be a path or URL, got {self.url!r}")
        object.__setattr__(self, "url", resolve_url(os.fspath(self.url)))
        _check_positive("PersistentLevel", "every_n_steps", self.every_n_steps)
        _check_positive("PersistentLevel", "keep_last", self.keep_last)
        _check_positive("PersistentLevel", "keep_every_n_steps", self.keep_every_n_steps, optional=True)


@dataclass(frozen=True, kw_only=True)
class MemoryLevel:
    """The keeper's host memory: slots that hold one shard each and outlive the training process."""

    slots: int | None = None
    """Slots per rank; ``None`` takes as many as the commit argument needs (docs/architecture.md)."""
    linger_s: float = 1800.0
    """Seconds that the keeper stays, to serve a restart, after its trainer died without goodbye."""
    max_bytes: int | None = None
    """Upper bound for all slots of this rank together; ``None`` bounds by the free memory of the machine."""

    def __post_init__(self) -> None:
        _check_positive("MemoryLevel", "slots", self.slots, optional=True)
        if self.slots is not None and self.slots < 2:
            raise ConfigError(
                f"MemoryLevel.slots must be at least 2, got {self.slots}: one slot holds the newest complete "
                "snapshot while the next one is written"
            )
        _check_seconds("MemoryLevel", "linger_s", self.linger_s)
        _check_positive("MemoryLevel", "max_bytes", self.max_bytes, optional=True)


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """Everything that can be set about snapshots; the defaults suit one process with a local disk."""

    every_n_steps: int = 1
    """Optimizer steps between captures into memory."""
    levels: tuple[PersistentLevel, ...] = ()
    """Persistent levels, fast to slow; empty means memory only."""
    memory: MemoryLevel = MemoryLevel()
    """The keeper's host memory."""
    on_busy: Literal["skip", "wait"] = "skip"
    """When no slot is free at a boundary: skip that capture, or wait for one (at most ``gate_timeout_s``)."""
    redundancy: None = None
    """Protection against node loss; ``None`` until a scheme is chosen."""
    job_id: str | None = None
    """What names the job, so that a restart finds its memory. Default: the environment variable
    ``LAZYSNAP_JOB_ID``, else the resolved URL of the first level."""
    gate_timeout_s: float = 60.0
    """How long an optimizer step waits for an unfinished copy before that snapshot is dropped."""
    keeper_timeout_s: float = 20.0
    """How long to wait for the keeper to start or answer where its answer is needed (restart, drain)."""
    flush_budget_s: float = 30.0
    """On SIGTERM or at exit after an error: seconds to make the last capture durable before going on."""
    drain_timeout_s: float = 600.0
    """At a clean end: seconds to wait until the newest capture is durable at the first level."""

    def __post_init__(self) -> None:
        _check_positive("SnapshotConfig", "every_n_steps", self.every_n_steps)
        if isinstance(self.levels, PersistentLevel):
            raise ConfigError("SnapshotConfig.levels must be a tuple: write levels=(PersistentLevel(...),)")
        levels = tuple(self.levels)
        for level in levels:
            if not isinstance(level, PersistentLevel):
                raise ConfigError(f"SnapshotConfig.levels must hold PersistentLevel objects, got {level!r}")
        urls = [level.url for level in levels]
        if len(set(urls)) != len(urls):
            raise ConfigError(f"SnapshotConfig.levels names one place twice: {urls}")
        object.__setattr__(self, "levels", levels)
        if not isinstance(self.memory, MemoryLevel):
            raise ConfigError(f"SnapshotConfig.memory must be a MemoryLevel, got {self.memory!r}")
        if self.on_busy not in ("skip", "wait"):
            raise ConfigError(f'SnapshotConfig.on_busy must be "skip" or "wait", got {self.on_busy!r}')
        if self.redundancy is not None:
            raise ConfigError("SnapshotConfig.redundancy: no scheme is available in this version; leave it None")
        if self.job_id is not None and (not isinstance(self.job_id, str) or not self.job_id.strip()):
            raise ConfigError(f"SnapshotConfig.job_id must be a non-empty string, got {self.job_id!r}")
        for name in ("gate_timeout_s", "keeper_timeout_s", "flush_budget_s", "drain_timeout_s"):
            _check_seconds("SnapshotConfig", name, getattr(self, name))
