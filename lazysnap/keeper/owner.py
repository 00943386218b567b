"""The secret of a user, by which trainers and keepers of one owner know each other.

The user's number alone is not the owner: containers of several tenants may share a network, and with it the names of
abstract sockets, and all run as root. The secret is in ``LAZYSNAP_SECRET``, else in a file that only the user can read:
in ``~/.local/state/lazysnap`` (``XDG_STATE_HOME``), or where that cannot be written in the user's directory for
temporary files.
"""

import contextlib
import os
import pathlib
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
    refusals = []
    places: tuple[Callable[[], pathlib.Path], ...] = (_state_directory, private_directory)
    for place in places:
        try:
            return _read_or_draw(place() / _NAME)
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
            refusals.append(str(error))
    raise KeeperUnavailable(
        f"there is no place for the secret by which this user's processes know a keeper ({'; '.join(refusals)}): set "
        f"{ENVIRONMENT}, the same for all processes of the job, or make one of these places writable for this user"
    )


def _state_directory() -> pathlib.Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    path = (pathlib.Path(given) if given.startswith("/") else pathlib.Path.home() / ".local" / "state") / "lazysnap"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _read_or_draw(path: pathlib.Path) -> str:
    """Raises: OSError, if the file can be neither read nor made, or others can read it."""
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
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd) as file:
        found = os.fstat(fd)
        text = file.read(_LENGTH + 1).strip()
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or len(text) != _LENGTH:
        raise PermissionError(f"{path} is no secret of {_LENGTH} characters that only this user can read: remove it")
    return text
