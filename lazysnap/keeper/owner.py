"""The secret of a user, by which trainers and keepers of one owner know each other.

The user's number alone is not the owner: containers of several tenants may share a network, and with it the names of
abstract sockets, and all run as root. The secret is in ``LAZYSNAP_SECRET``, else in a file that only the user can read:
``.local/state/lazysnap/secret`` in the home directory, or ``secret`` in the user's directory for temporary files. The
home is that of the user database: ``HOME`` may be another one at the next start, which must find the same keeper.
"""

import contextlib
import os
import pathlib
import pwd
import secrets
import stat
from collections.abc import Callable

from lazysnap.errors import KeeperUnavailable
from lazysnap.keeper.trouble import private_directory

ENVIRONMENT = "LAZYSNAP_SECRET"
_NAME = "secret"
_LENGTH = 64


def owner_secret() -> str:
    """Return the secret of this user, drawn if there is none. Raises: KeeperUnavailable, if it can be kept nowhere."""
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
    raise KeeperUnavailable(
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
