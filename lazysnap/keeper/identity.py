"""The identity of a job's keeper: the same command, started again, finds its memory by itself.

Trainers and keepers of one owner know each other by the secret of their user. The user's number alone is not the owner:
containers of several tenants may share a network, and with it the names of abstract sockets, and all run as root. The
secret is in ``LAZYSNAP_SECRET``, else in a file that only the user can read: ``.local/state/lazysnap/secret`` in the
home directory, or ``secret`` in the user's directory for temporary files. The home is that of the user database:
``HOME`` may be another one at the next start, which must find the same keeper.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import pwd
import secrets
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass

from lazysnap.config import SnapshotConfig, resolve_url
from lazysnap.errors import ConfigError, KeeperError
from lazysnap.keeper.trouble import private_directory
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
        facts = [f"--job={self.job_id}", f"--node={self.node}"]
        return [*facts, f"--address={self.address.encode().hex()}"]

    @functools.cached_property
    def secret(self) -> Secret:
        """The secret of the job's processes on this node. Raises: KeeperError, if the user has none."""
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


ENVIRONMENT = "LAZYSNAP_SECRET"
_NAME = "secret"
_LENGTH = 64


def owner_secret() -> str:
    """Return the secret of this user, drawn if there is none. Raises: KeeperError, if it can be kept nowhere."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        return given
    refusals: dict[str, None] = {}
    places: tuple[Callable[[], pathlib.Path], ...] = (_state_directory, private_directory)
    # One that exists anywhere comes before a new one: a home that can be written later on changes no secret.
    for find in (_read, _read_or_draw):
        for place in places:
            try:
                return find(place() / _NAME)
            except FileNotFoundError as error:
                if find is not _read:
                    refusals[str(error)] = None
            except OSError as error:
                refusals[str(error)] = None
    raise KeeperError(
        f"there is no place for the secret by which this user's processes know a keeper ({'; '.join(refusals)}): set "
        f"{ENVIRONMENT}, the same for all processes of the job, or make one of these places writable for this user"
    )


def _state_directory() -> pathlib.Path:
    """Raises: FileNotFoundError, if the user has no home directory."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = ""
    if not home.startswith("/"):
        raise FileNotFoundError(f"user {os.getuid()} has no home directory in the user database")
    return pathlib.Path(home, ".local", "state", "lazysnap")


def _read_or_draw(path: pathlib.Path) -> str:
    """Raises: OSError, if the file can be neither read nor made, or another user can read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f".{_NAME}.{os.getpid()}.{secrets.token_hex(4)}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(_LENGTH // 2))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another process was faster: all take the same
                os.link(draft, path)
        finally:
            draft.unlink()
    return _read(path)


def _read(path: pathlib.Path) -> str:
    """Raises: FileNotFoundError; OSError, if it cannot be read, or another user can read it."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        is_private = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        text = file.read(_LENGTH + 1).strip().decode("ascii", "replace") if is_private else ""
    if len(text) != _LENGTH:
        raise PermissionError(f"{path} is no secret of {_LENGTH} characters that only this user can read: remove it")
    return text
