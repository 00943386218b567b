"""What is being exported: under a temporary name until it is whole and durable."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

from lazysnap.errors import ConfigError
from lazysnap.levels.files import sync_directory, temp_name

FORMATS = {".safetensors": "safetensors", ".ckpt": "ckpt", ".pt": "ckpt", ".pth": "ckpt", "": "dcp"}


def format_of(path: str, wanted: str | None) -> str:
    """``safetensors``, ``ckpt`` or ``dcp``: what is ``wanted``, else what the name tells. Raises: ConfigError."""
    if len(urlsplit(path).scheme) > 1:
        raise ConfigError(f"--to {path!r}: exports are written to a local path; copy the result where it shall be")
    if wanted is not None:
        return wanted
    suffix = "" if path.endswith("/") else os.path.splitext(path)[1]
    if suffix not in FORMATS:
        raise ConfigError(f"--to {path!r}: {suffix!r} names no format; add --format safetensors, ckpt or dcp")
    return FORMATS[suffix]


@contextlib.contextmanager
def replaced_when_whole(path: str, *, force: bool) -> Iterator[str]:
    """A name to write a file or directory under, beside ``path``; on success it gets that name, durably.

    On any error, Ctrl-C included, it is removed, and what was at ``path`` is as it was.
    Raises: ConfigError, if something is there and ``force`` is not given.
    """
    path = os.path.abspath(path)
    _check(path, force=force)
    parent = os.path.dirname(path)
    temp = os.path.join(parent, temp_name(os.path.basename(path)))
    try:
        yield temp
        _sync(temp)
        _check(path, force=force)
        _move(temp, path)
        sync_directory(parent)
    finally:
        _remove(temp)


def _check(path: str, *, force: bool) -> None:
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path} is there already: add --force to replace it, or choose another name")
    if not os.path.isdir(os.path.dirname(path)):
        raise ConfigError(f"{os.path.dirname(path)}: no such directory")


def _move(temp: str, path: str) -> None:
    old = None
    if os.path.isdir(path) and not os.path.islink(path):
        # Directories cannot be exchanged in one step everywhere: for a moment nothing is there.
        old = os.path.join(os.path.dirname(path), temp_name(os.path.basename(path)))
        os.rename(path, old)
    elif os.path.isdir(temp) and os.path.lexists(path):
        os.unlink(path)
    os.rename(temp, path)
    if old is not None:
        shutil.rmtree(old)


def _sync(path: str) -> None:
    if os.path.isdir(path):
        for name in os.listdir(path):
            _sync(os.path.join(path, name))
        sync_directory(path)
        return
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
