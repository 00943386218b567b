"""Settings: frozen objects, checked when they are made."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl, urlsplit

from lazysnap.errors import ConfigError

STORE_EVERY_S = 60.0
"""Default seconds between stored snapshots at a path."""
STORE_EVERY_S_AT_URL = 300.0
"""Default seconds between stored snapshots at a URL, where requests usually cost money."""
SECRET_NAME = re.compile(
    r"secret|token|pass|pwd|key|sas|credential|connection|auth|signature|\bsig\b", flags=re.IGNORECASE
)
"""Names of options, and of parameters of URLs, whose values are secrets."""


CAPTURE_EVERY_N_STEPS = 1
"""Default optimizer steps between captures into memory."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_seconds(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < float("inf")


def _is_duration(value: object) -> bool:
    return _is_seconds(value) and value != 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_proof(value: object) -> bool:
    return isinstance(value, bool) or value == "always"


def _is_mode(value: object) -> bool:
    return value in ("min", "max")


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


@dataclass(frozen=True)
class _Rule:
    """The values that a setting may have."""

    accepts: Callable[[object], bool]
    """Returns True for a valid value."""
    expected: str
    """A text for the valid values."""
    is_optional: bool = False
    """True if ``None`` is valid, too."""

    def optional(self) -> "_Rule":
        """Return the same rule, which also allows ``None``."""
        return replace(self, expected=f"{self.expected} or None", is_optional=True)

    def check(self, setting: str, value: object) -> None:
        """Check a value. Raises: ConfigError, if it is invalid."""
        if value is None and self.is_optional:
            return
        if not self.accepts(value):
            raise ConfigError(f"{setting} must be {self.expected}, got {value!r}")


_COUNT = _Rule(_is_count, "an integer >= 1")
_SECONDS = _Rule(_is_seconds, "a finite number of seconds >= 0")
_DURATION = _Rule(_is_duration, "a finite number of seconds > 0")
_FLAG = _Rule(_is_flag, "True or False")
_TEXT = _Rule(_is_text, "a non-empty string")
_PATH = _Rule(_is_path, "a path")
_PROOF = _Rule(_is_proof, 'True, False or "always"')
_MODE = _Rule(_is_mode, '"min" or "max"')

_RULES = {
    "PersistentLevel": {
        "every_s": _DURATION.optional(),
        "every_n_steps": _COUNT.optional(),
        "keep_last": _COUNT,
        "keep_every_n_steps": _COUNT.optional(),
        "max_bytes_per_s": _COUNT.optional(),
        "timeout_s": _DURATION,
    },
    "MemoryLevel": {
        "linger_s": _SECONDS,
        "max_bytes": _COUNT.optional(),
        "spill_dir": _PATH.optional(),
    },
    "Redundancy": {
        "parity": _COUNT,
        "group_size": _COUNT,
        "every_n_steps": _COUNT,
        "max_bytes_per_s": _COUNT.optional(),
    },
    "KeepBest": {
        "monitor": _TEXT,
        "mode": _MODE,
        "count": _COUNT,
    },
    "SnapshotConfig": {
        "every_n_steps": _COUNT,
        "require_memory": _FLAG,
        "verify_restart": _PROOF,
        "job_id": _TEXT.optional(),
        "io_timeout_s": _SECONDS,
        "collective_timeout_s": _SECONDS,
        "drain_timeout_s": _SECONDS,
        "preemption_timeout_s": _SECONDS,
    },
}
"""The checks of single settings. Combinations are checked by the classes."""


def _check(settings: object) -> None:
    """Check all settings of an object. Raises: ConfigError, for the first invalid one."""
    owner = type(settings).__name__
    for name, rule in _RULES[owner].items():
        rule.check(f"{owner}.{name}", getattr(settings, name))


def checked_url(owner: str, url: object) -> str:
    """Return ``url`` as text. Raises: ConfigError, if it is no path or URL."""
    text: object = ""
    if isinstance(url, (str, os.PathLike)):
        text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{owner} must be a path or URL, got {url!r}")
    return text


def check_is_unicode(text: str) -> None:
    """Check that a place or a name is valid UTF-8, as messages and manifests require. Raises: ConfigError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{text!r} is not UTF-8: it can be neither the place of snapshots nor the name of a job; give another one "
            "(a link to such a directory does not help)"
        ) from error


def is_path(url: str) -> bool:
    """True if the URL is a path, which may be another place on another node."""
    return urlsplit(url).scheme in ("", "file", "local")


def resolve_url(url: str) -> str:
    """Return one text for one place: local paths are absolute with links resolved, other URLs unchanged."""
    if is_path(url):
        _, _, path = url.rpartition("://")
        resolved = os.path.realpath(os.path.expanduser(path))
        check_is_unicode(resolved)
        return resolved
    check_is_unicode(url)
    return url.rstrip("/")


def check_url(url: str) -> None:
    """Check that a URL holds no credentials. Called before all other checks, whose messages show the URL.

    Raises: ConfigError, for credentials, without showing them, or for a text that is no URL.
    """
    for part in url.split("::"):  # as in simplecache::sftp://host/run
        try:
            secret = _secret_of(part)
        except ValueError:  # its text shows the host and the credentials before it
            raise ConfigError(
                f"the URL {part.partition('://')[0]}://… has a host that is none: brackets or special characters"
            ) from None
        if secret:
            scheme = part.partition("://")[0]
            raise ConfigError(
                f"the URL {scheme}://… holds {secret}, and URLs are shown in messages; put credentials into "
                'storage_options={"key": …, "secret": …}, --storage-option key=… of a command, or the environment'
            )


def _secret_of(url: str) -> str:
    """Return the name of a secret in a URL, without its value; empty if there is none."""
    if "://" not in url:
        return ""
    parts = urlsplit(url)
    host = parts.netloc
    if parts.scheme in ("s3", "s3a"):
        # A secret may contain a slash, which ends the host. An access point (``arn:aws:s3:…``) has colons, too.
        has_key = ":" in host and "@" in url and not host.startswith("arn:")
        if has_key or "@" in host:
            return "credentials: the host is a bucket alone"
    else:
        user, at, _ = host.rpartition("@")
        if at and ":" in user:
            return "a password"
        if at and parts.scheme in ("http", "https"):
            return "a user, which may be a token"
    for name in dict(parse_qsl(parts.query, keep_blank_values=True)):
        if SECRET_NAME.search(name):
            return f"the parameter {name!r}"
    return ""


def _check_scheme(url: str) -> None:
    """Check that fsspec knows the protocol. Raises: ConfigError."""
    schemes = set()
    if "://" in url:
        schemes = {part.split("://")[0] for part in url.split("::")}
    if schemes - {"s3", "s3a"}:
        import fsspec  # only here: it takes 0.1 s to import

        for scheme in sorted(schemes - {*fsspec.available_protocols()}):
            raise ConfigError(
                f"PersistentLevel.url: fsspec knows no {scheme}:// and no installed package brings it; correct the URL"
            )


def _plain_options(options: object) -> dict[str, Any]:
    """Return a copy of ``storage_options``. Messages never contain values: they may be secrets."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ConfigError(f"PersistentLevel.storage_options must map names to values, got {type(options).__name__}")
    for name, value in options.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"PersistentLevel.storage_options[{name!r}] must be a plain value (text, number, list, dict), got "
                f"{type(value).__name__}: it is handed to the keeper's process as JSON"
            ) from None
    return dict(options)


@dataclass(frozen=True)
class PersistentLevel:
    """A place where snapshots are stored as files: a local path or any fsspec URL."""

    url: str
    """Path or URL of the directory that holds ``step-…`` directories. Made absolute when local."""
    every_s: float | None = field(default=None, kw_only=True)
    """Seconds between stored snapshots; the first whole capture is stored at once. ``None``: 60 at a path, 300 at a
    URL, unless ``every_n_steps`` is given. Captures that come while the level is busy are skipped.
    """
    every_n_steps: int | None = field(default=None, kw_only=True)
    """Store by steps, not by time: captures whose step is a multiple of it, on all ranks. Captures that come while the
    level is busy are skipped. A level that copies from a faster one takes its newest complete snapshot, once a multiple
    was passed.
    """
    keep_last: int = field(default=2, kw_only=True)
    """Complete snapshots of this run to keep; older ones are deleted."""
    keep_every_n_steps: int | None = field(default=None, kw_only=True)
    """Complete snapshots whose step is a multiple of this are never deleted. It decides which snapshots stay, not which
    are stored.
    """
    storage_options: Mapping[str, Any] | None = field(default=None, kw_only=True, repr=False, hash=False)
    """Options of the fsspec file system (credentials, endpoint, …), as plain JSON values. The keeper receives them over
    a socket of this user, and they are never written to a file. fsspec's own configuration works as well."""
    max_bytes_per_s: int | None = field(default=None, kw_only=True)
    """Limit for writes, averaged over seconds; ``None``: no limit. Restores are not limited."""
    timeout_s: float = field(default=120.0, kw_only=True)
    """Seconds without progress after which an operation is abandoned, and the level counts as failed. Training and the
    other levels continue, and the level is retried with the next snapshot.
    """

    if TYPE_CHECKING:  # the field is text, also where a path was given

        def __init__(  # noqa: PLR0913  the fields
            self,
            url: str | os.PathLike[str],
            *,
            every_s: float | None = ...,
            every_n_steps: int | None = ...,
            keep_last: int = ...,
            keep_every_n_steps: int | None = ...,
            storage_options: Mapping[str, Any] | None = ...,
            max_bytes_per_s: int | None = ...,
            timeout_s: float = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        url = checked_url("PersistentLevel.url", self.url)
        check_url(url)
        object.__setattr__(self, "url", resolve_url(url))
        _check_scheme(self.url)
        _check(self)
        if self.every_s is not None and self.every_n_steps is not None:
            raise ConfigError(
                f"PersistentLevel: every_s={self.every_s!r} and every_n_steps={self.every_n_steps!r} contradict each "
                "other: a level stores by time or by steps; give one of them"
            )
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", _plain_options(self.storage_options))

    @property
    def period_s(self) -> float | None:
        """Return the seconds between stored snapshots; ``None``: the level stores by steps."""
        if self.every_n_steps is not None:
            return None
        if self.every_s is not None:
            return self.every_s
        return STORE_EVERY_S if is_path(self.url) else STORE_EVERY_S_AT_URL


@dataclass(frozen=True, kw_only=True)
class MemoryLevel:
    """The keeper's host memory: slots that hold one shard each and outlive the training process."""

    linger_s: float = 1800.0
    """Seconds that the keeper waits for a restart after its trainer died."""
    max_bytes: int | None = None
    """Limit for the memory of all slots of this rank together; ``None``: the free memory of the machine."""
    spill_dir: str | None = None
    """Directory on a local disk for slots as files, if memory does not suffice. ``None``: that of the first local
    level. An empty text: no files; training then continues without snapshots.
    """

    if TYPE_CHECKING:  # the field is text, also where a path was given

        def __init__(
            self,
            *,
            linger_s: float = ...,
            max_bytes: int | None = ...,
            spill_dir: str | os.PathLike[str] | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        _check(self)
        if self.spill_dir:
            object.__setattr__(self, "spill_dir", os.path.realpath(os.path.expanduser(self.spill_dir)))


@dataclass(frozen=True, kw_only=True)
class Redundancy:
    """Protection of captures by the memory of other nodes.

    Nodes form groups. The nodes of a group hold parity for each other. Two nodes with ``parity=1`` are a mirror::

        SnapshotConfig(levels=(PersistentLevel("/shared/runs/a"),), redundancy=Redundancy(parity=2))
    """

    parity: int = 1
    """Nodes of each group that may be lost. A node holds ``parity / (nodes of the group - parity)`` of the size of its
    captures as parity of other nodes.
    """
    group_size: int = 8
    """Maximum number of nodes in a group. Sizes of groups differ by at most one."""
    every_n_steps: int = 10
    """Protect captures whose step is a multiple of it. Steps that come while the links are busy are skipped."""
    max_bytes_per_s: int | None = None
    """Limit for the bytes that a node receives for protection, averaged over seconds; ``None``: no limit. Restores are
    not limited.
    """

    def __post_init__(self) -> None:
        _check(self)
        if not self.parity < self.group_size <= 128:
            raise ConfigError(
                f"Redundancy.group_size must be more than parity ({self.parity}) and at most 128, got {self.group_size}"
            )


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """All settings of snapshots; the defaults suit one process with a local disk."""

    every_n_steps: int = CAPTURE_EVERY_N_STEPS
    """Optimizer steps between captures into memory. ``lazysnap advise`` recommends a number (docs/tuning.md)."""
    levels: tuple[PersistentLevel, ...] = ()
    """Persistent levels, fast to slow; empty means memory only."""
    memory: MemoryLevel = MemoryLevel()
    """The keeper's host memory."""
    redundancy: Redundancy | Literal["auto"] | None = "auto"
    """Protection by other nodes. ``"auto"``: ``Redundancy(parity=1)`` for two and three nodes, ``Redundancy(parity=2)``
    for more, none for one node. It takes memory for the parity, and one more slot without levels
    (docs/several-ranks.md). ``None``: no protection.
    """
    require_memory: bool = False
    """Raise before the first step if there is no memory that outlives the training. Otherwise training warns and
    continues without snapshots.
    """
    verify_restart: bool | Literal["always"] = True
    """Let the first restart of a run from memory resume one step before the newest capture, and compare the repeated
    step with the capture (docs/operations.md). ``"always"``: every restart from memory. ``False``: none. Only if every
    step is captured (``every_n_steps=1``).
    """
    job_id: str | None = None
    """The name of the job, with which a restart finds its memory. By default the environment variable
    ``LAZYSNAP_JOB_ID``, else the resolved URL of the first level.
    """
    io_timeout_s: float = 60.0
    """Seconds to wait for an unfinished copy before that snapshot is dropped, for memory of the first capture, and for
    the keeper to start or answer. A keeper that is silent for longer during training is reported.
    """
    collective_timeout_s: float = 300.0
    """Seconds to wait for a silent rank when engines are made, resume, plan their first snapshot, and close. Time for
    reading does not count. Only with several ranks.
    """
    drain_timeout_s: float = 600.0
    """Seconds to wait at a clean end until the newest capture is durable at every level."""
    preemption_timeout_s: float = 25.0
    """Seconds from SIGTERM or SIGUSR1 until the process ends, even if the newest capture is not durable by then. Choose
    less than the grace period of the scheduler.
    """

    def __post_init__(self) -> None:
        _check(self)
        given: object = self.levels
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigError(
                "SnapshotConfig.levels must be a tuple: write levels=(PersistentLevel(...),), got "
                f"{type(given).__name__}"
            )
        levels = tuple(self.levels)
        for level in levels:
            if not isinstance(level, PersistentLevel):
                raise ConfigError(  # not the value: a URL may hold credentials
                    f"SnapshotConfig.levels must hold PersistentLevel objects, got {type(level).__name__}"
                )
            if urlsplit(level.url).scheme == "memory":
                raise ConfigError(
                    f"SnapshotConfig.levels: {level.url} would die with the process that writes it, and no other sees "
                    "it; captures into memory are made in any case (SnapshotConfig.memory): name a directory or a URL"
                )
        urls = [level.url for level in levels]
        if len(set(urls)) != len(urls):
            raise ConfigError(f"SnapshotConfig.levels names one place twice: {urls}")
        object.__setattr__(self, "levels", levels)
        if not isinstance(self.memory, MemoryLevel):
            raise ConfigError(f"SnapshotConfig.memory must be a MemoryLevel, got {self.memory!r}")
        if self.redundancy not in ("auto", None) and not isinstance(self.redundancy, Redundancy):
            raise ConfigError(
                f'SnapshotConfig.redundancy must be Redundancy(...), "auto" or None, got {self.redundancy!r}'
            )


@dataclass(frozen=True)
class KeepBest:
    """A metric whose best snapshots are kept.

    Retention does not delete them::

        LazySnapshotCallback("runs/a", keep_best=KeepBest("val_loss", mode="min", count=3))
    """

    monitor: str
    """The name of the metric."""
    mode: Literal["min", "max"] = field(default="min", kw_only=True)
    """``"min"``: smaller values are better; ``"max"``: greater ones."""
    count: int = field(default=1, kw_only=True)
    """Snapshots to keep."""

    def __post_init__(self) -> None:
        _check(self)


def due_every(every_n_steps: int, captured_every: int) -> int:
    """Return the interval of due steps at a level, or for protection, which must be captured steps.

    ``every_n_steps``: interval of the level; ``captured_every``: interval of captures into memory.
    """
    return math.lcm(every_n_steps, captured_every)


def redundancy_for(config: SnapshotConfig, nodes: int) -> Redundancy | None:
    """Return the protection for a number of nodes, or ``None``.

    With too few nodes for the requested parity, it is the largest one that leaves one piece of data (``too_few_nodes``
    warns).
    """
    redundancy = config.redundancy
    if redundancy is None or nodes < 2:
        return None
    if redundancy == "auto":
        return Redundancy(parity=1 if nodes < 4 else 2)
    if redundancy.parity >= nodes:
        return replace(redundancy, parity=nodes - 1)
    return redundancy


def too_few_nodes(config: SnapshotConfig, nodes: int) -> str | None:
    """Return the text of a warning, if the number of nodes gives less protection than requested."""
    requested = config.redundancy
    possible = redundancy_for(config, nodes)
    if not isinstance(requested, Redundancy) or possible is None or possible == requested:
        return None
    return (
        f"SnapshotConfig.redundancy is Redundancy(parity={requested.parity}), and there are {nodes} nodes: "
        f"{possible.parity} of them may be lost; start at least {requested.parity + 1} nodes, or set "
        f"parity={possible.parity}"
    )


def config_at(place: "SnapshotConfig | str | os.PathLike[str]") -> SnapshotConfig:
    """Return ``place`` itself if it is a config; for a path or URL, the config with that one level.

    Raises: ConfigError, for anything else.
    """
    if isinstance(place, SnapshotConfig):
        return place
    if isinstance(place, (str, os.PathLike)):
        return SnapshotConfig(levels=(PersistentLevel(place),))
    raise ConfigError(f"a SnapshotConfig, or a path or URL for snapshots, is needed, got {place!r}")
