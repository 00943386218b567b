"""The target of an export, with a temporary name until it is complete and durable."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

from lazysnap import faults
from lazysnap.errors import ConfigError
from lazysnap.levels.files import sync_directory, temp_name
from lazysnap.shard.names import is_directory_of_ours

ACCELERATE = "accelerate"
FORMATS = {
    "safetensors": "safetensors:write_safetensors",
    "huggingface": "huggingface:write_folder",
    "ckpt": "checkpoint:write_checkpoint",
    "dcp": "dcp:write_distributed",
    ACCELERATE: "accelerate:write_stock",
}
"""The module and the function that write each format. Most import torch, which takes seconds."""
_BY_SUFFIX = {".safetensors": "safetensors", ".ckpt": "ckpt", ".pt": "ckpt", ".pth": "ckpt", "": "dcp"}


def format_of(path: str, chosen_format: str | None) -> str:
    """Return the format: ``chosen_format``, else the one of the suffix. Raises: ConfigError."""
    if len(urlsplit(path).scheme) > 1:
        raise ConfigError(f"{path!r}: exports are written to a local path; copy the result from there")
    if chosen_format is not None:
        if chosen_format not in FORMATS:
            raise ConfigError(f"format {chosen_format!r} is none of {', '.join(FORMATS)}")
        return chosen_format
    suffix = ""
    if not path.endswith("/"):
        suffix = os.path.splitext(path)[1]
    if suffix not in _BY_SUFFIX:
        raise ConfigError(f"{path!r}: {suffix!r} names no format; choose the option `format`: {', '.join(FORMATS)}")
    return _BY_SUFFIX[suffix]


@contextlib.contextmanager
def named_when_whole(path: str) -> Iterator[str]:
    """Yield a temporary name for a file or directory beside ``path``. On success it is renamed to ``path``, durably.

    On any error, Ctrl-C included, it is removed. Raises: ConfigError, if ``path`` exists.
    """
    path = _real(path)
    _check(path)
    parent = os.path.dirname(path)
    temp = os.path.join(parent, temp_name(os.path.basename(path)))
    try:
        yield temp
        sync(temp)
        faults.point("export.whole")
        _check(path)
        os.rename(temp, path)
        try:
            sync_directory(parent)
        except BaseException:
            os.rename(path, temp)  # the new name may not survive a power cut
            raise
    finally:
        _remove(temp)


def _real(path: str) -> str:
    """Return ``path`` without symbolic links, except for its last name, which is checked."""
    head, tail = os.path.split(path.rstrip("/"))
    if tail in ("", ".", ".."):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(head or "."), tail)


def _check(path: str) -> None:
    """Raises: ConfigError, if ``path`` exists, or is in a snapshot of a level."""
    check_outside(os.path.dirname(path))
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists, and an export replaces nothing: choose another name, or remove it first")


@contextlib.contextmanager
def parents_made(path: str) -> Iterator[None]:
    """Make the missing directories above ``path``. On an error those that were made here and are empty are removed.

    Raises: ConfigError, if a parent is a file, or is in a snapshot of a level; OSError.
    """
    parent = os.path.dirname(_real(path))
    check_outside(parent)
    missing = []
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        raise ConfigError(f"{parent} is not a directory, so nothing can be written below it: choose another path")
    try:
        for directory in reversed(missing):
            os.mkdir(directory)
            sync_directory(os.path.dirname(directory))
        yield
    except BaseException:
        for directory in missing:
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        raise


def check_outside(path: str) -> None:
    """Raises: ConfigError, if a path is in a snapshot of a level."""
    names = path.split(os.sep)
    if any(map(is_directory_of_ours, names)):
        raise ConfigError(f"{path} lies in a snapshot of a level, which is not changed: choose another path")


def sync(path: str) -> None:
    """Make a file, or a directory and its content, durable, without following links. Blocks."""
    if os.path.islink(path):
        return
    if os.path.isdir(path):
        for name in os.listdir(path):
            sync(os.path.join(path, name))
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
