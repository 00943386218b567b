"""The target of an export, with a temporary name until it is complete and durable.

Only an earlier export or an empty directory is replaced; ``_foreign`` decides that.
"""

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from urllib.parse import urlsplit

from lazysnap import faults
from lazysnap.errors import ConfigError
from lazysnap.exports.huggingface import WRITTEN
from lazysnap.levels.files import open_regular, sync_directory, temp_name
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
MARK = "lazysnap-export.json"
"""A file in every exported directory: the other names may also be written by ``torch.distributed.checkpoint``."""
_MARK_TEXT = json.dumps({"lazysnap": "export"}) + "\n"
STOCK_FILE = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_[0-9]{1,9})?\.(safetensors|bin)|scaler\.pt"
    r"|random_states_[0-9]{1,9}\.pkl|custom_checkpoint_[0-9]{1,9}\.pkl"
)
"""Files that Accelerate writes."""
_IN_DIRECTORY = re.compile(
    rf"\.metadata|__[0-9]{{1,9}}_[0-9]{{1,9}}\.distcp|{re.escape(MARK)}|{WRITTEN.pattern}|{STOCK_FILE.pattern}"
)
_ZIP = b"PK\x03\x04"
_ZIP_NAME = 30
"""The start of a zip file, and the offset of the name of its first member."""


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
def replaced_when_whole(path: str, notes: list[str], *, force: bool) -> Iterator[str]:
    """Yield a temporary name for a file or directory beside ``path``. On success it is renamed to ``path``, durably.

    On any error before that, Ctrl-C included, it is removed, and ``path`` is unchanged. If a part of a replaced export
    stays, ``notes`` gets a line about it.
    Raises: ConfigError, if ``path`` exists and ``force`` is not given, or if no export wrote it.
    """
    path = _real(path)
    _check(path, force=force)
    parent = os.path.dirname(path)
    temp = os.path.join(parent, temp_name(os.path.basename(path)))
    try:
        yield temp
        if os.path.isdir(temp):
            with open(os.path.join(temp, MARK), "x", encoding="ascii") as mark:
                mark.write(_MARK_TEXT)
        sync(temp)
        faults.point("export.whole")
        _check(path, force=force)
        old = _move(temp, path)
        try:
            sync_directory(parent)
        except BaseException:
            # The new name may not survive a power cut, so the earlier export must not go.
            if old is not None:
                os.rename(path, temp)
                os.rename(old, path)
            raise
        if old is not None:
            _discard(old, path, notes)
    finally:
        _remove(temp)


def _real(path: str) -> str:
    """Return ``path`` without symbolic links, except for its last name, which is checked."""
    head, tail = os.path.split(path.rstrip("/"))
    if tail in ("", ".", ".."):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(head or "."), tail)


def _check(path: str, *, force: bool) -> None:
    parent = os.path.dirname(path)
    check_outside(parent)
    if not os.path.lexists(path):
        return
    if not force:
        raise ConfigError(f"{path} exists: choose another name, or replace it with `lazysnap export --force`")
    reason = _foreign(path)
    if reason:
        raise ConfigError(
            f"{path} is not replaced: {reason}. --force replaces an empty directory or what an export "
            "wrote; choose another name, or remove it yourself"
        )


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


def _foreign(path: str) -> str:
    """Return the reason not to replace ``path``; empty text if it is an export or an empty directory."""
    facts = os.lstat(path)
    if stat.S_ISLNK(facts.st_mode):
        return "it is a symbolic link"
    if stat.S_ISREG(facts.st_mode):
        if _has_format_of_exports(path):
            return ""
        return "it is a file that no export wrote"
    if not stat.S_ISDIR(facts.st_mode):
        return "it is neither a file nor a directory"
    if os.path.commonpath([os.path.realpath(os.getcwd()), path]) == path:
        return "it is the current directory, or holds it"
    names = os.listdir(path)
    if not names:
        return ""
    for name in sorted(names):
        if not _IN_DIRECTORY.fullmatch(name) or not stat.S_ISREG(os.lstat(os.path.join(path, name)).st_mode):
            return f"it holds {name!r}, which no export wrote"
    if MARK not in names or _read_start(os.path.join(path, MARK), len(_MARK_TEXT) + 1) != _MARK_TEXT.encode():
        return f"no export wrote it: there is no {MARK} of ours in it"
    return ""


def _has_format_of_exports(path: str) -> bool:
    """True if it is a safetensors file, a zip file of ``torch.save``, or empty."""
    start = _read_start(path, 4096)
    if start.startswith(_ZIP):
        length = int.from_bytes(start[26:28], "little")
        return start[_ZIP_NAME : _ZIP_NAME + length].endswith(b"/data.pkl")
    header_bytes = int.from_bytes(start[:8], "little")
    return not start or (start[8:9] == b"{" and 8 + header_bytes <= os.path.getsize(path))


def _read_start(path: str, count: int) -> bytes:
    with open(open_regular(path), "rb") as file:
        return file.read(count)


def _move(temp: str, path: str) -> str | None:
    """Give the new export its name. Return the new name of a replaced export, if any."""
    if not os.path.lexists(path) or not (os.path.isdir(path) or os.path.isdir(temp)):
        os.rename(temp, path)
        return None
    # Not every file system can exchange directories atomically: for a moment the name does not exist.
    old = os.path.join(os.path.dirname(path), temp_name(os.path.basename(path)))
    os.rename(path, old)
    try:
        os.rename(temp, path)
    except BaseException:
        os.rename(old, path)
        raise
    return old


def _discard(old: str, path: str, notes: list[str]) -> None:
    """Delete the replaced export, and only its files. Files that cannot be deleted, or were added meanwhile, are
    reported.
    """
    try:
        if not os.path.isdir(old):
            os.unlink(old)
            return
        handle = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in filter(_IN_DIRECTORY.fullmatch, os.listdir(handle)):
                os.unlink(name, dir_fd=handle)
        finally:
            os.close(handle)
        os.rmdir(old)
    except OSError as error:
        reason = error.strerror
        notes.append(f"{path} is replaced; what could not be deleted of the earlier export is in {old}: {reason}")


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
