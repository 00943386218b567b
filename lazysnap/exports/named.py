"""A directory of ``save_state(directory)``: it names a snapshot, and gets a checkpoint made from it.

``lazysnap.json`` in it names the snapshot. When that is durable, the directory gets the files of Accelerate's layout:
those of an earlier checkpoint are deleted, and the new ones are moved in, weights last. Stock ``load_state`` fails
without weights, so it never loads a part of a checkpoint, or files of two. All other files stay.
"""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from lazysnap import faults
from lazysnap.errors import ConfigError, WaitTimeout
from lazysnap.exports.target import check_outside, sync
from lazysnap.levels.files import sync_directory
from lazysnap.levels.local import LocalStorage
from lazysnap.shard.limits import load_json
from lazysnap.warm.directories import locked

logger = logging.getLogger(__name__)

_NAME_FILE = "lazysnap.json"
_EXPORT = ".lazysnap-export"
_MAX_BYTES = 1 << 16
_NESTING = 2
_FIRST_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files without which stock ``load_state`` fails."""
_STOCK_FILE = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_[0-9]{1,9})?\.(safetensors|bin)|scaler\.pt"
    r"|random_states_[0-9]{1,9}\.pkl|custom_checkpoint_[0-9]{1,9}\.pkl"
)
"""Files that Accelerate writes."""
_EXPORT_S = 3600.0
"""Seconds that an export waits for another one into the same directory."""
_MOVES_S = 30.0
"""Seconds that a training waits for an export that may be moving its files into a directory."""


@dataclass(frozen=True)
class Named:
    """The snapshot that a directory names."""

    place: str
    """Path or URL of the first level that stores it."""
    run: str
    step: int

    @property
    def which(self) -> str:
        """The snapshot as ``restore`` and ``export`` take it."""
        return f"run:{self.run}@{self.step}"


def name_snapshot(directory: str, named: Named) -> None:
    """Let a directory name a snapshot, durably. Makes the directory if necessary.

    Blocks. Raises: ConfigError, for a directory in a snapshot of a level; LevelError, and then an earlier name stays.
    """
    directory = os.path.realpath(directory)
    check_outside(directory)
    LocalStorage(directory).put(_NAME_FILE, json.dumps(asdict(named)).encode())


def named_in(directory: str) -> Named | None:
    """Return the snapshot that a directory names; ``None`` if it names none. Blocks."""
    try:
        with open(os.path.join(directory, _NAME_FILE), "rb") as file:
            named = Named(**load_json(file.read(_MAX_BYTES), _NESTING))
    except (OSError, ValueError, TypeError):
        return None
    is_valid = isinstance(named.place, str) and isinstance(named.run, str) and type(named.step) is int
    if not is_valid:
        return None
    return named


def forget_name(directory: str) -> None:
    """Remove the name of a snapshot from a directory, so that no export moves files into it.

    Blocks: until an export into it in progress has ended, at most ``_MOVES_S``.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, _NAME_FILE))
    # An export reads the name before it moves files. Wait for one that has read it already.
    try:
        with contextlib.suppress(FileNotFoundError), _locked(directory, _MOVES_S):
            return
    except WaitTimeout as error:
        logger.warning("%s; files of it may be moved into the directory, next to those that are saved there now", error)


def delete_checkpoint(directory: str) -> None:
    """Delete a directory of ``save_state``, as Accelerate does. Files that cannot be deleted stay.

    Blocks: as ``forget_name``: an export that moves files meanwhile would leave a part of a checkpoint.
    """
    with contextlib.suppress(OSError):
        forget_name(directory)
    shutil.rmtree(directory, ignore_errors=True)


def has_checkpoint(directory: str) -> bool:
    """True if there are files of a checkpoint in a directory. Blocks."""
    return any(_STOCK_FILE.fullmatch(name) for name in os.listdir(directory))


@contextlib.contextmanager
def filled(directory: str, named: Named) -> Iterator[str]:
    """Yield a path for a new directory; on success its files become the checkpoint in ``directory``, durably.

    Blocks: while another process does this, too, at most ``_EXPORT_S``. Raises: ConfigError, if the directory names
    another snapshot now, whose files are not touched; WaitTimeout; OSError; FileNotFoundError, if the directory was
    deleted.
    """
    with _locked(directory, _EXPORT_S):
        _check_named(directory, named)
        temp = os.path.join(directory, _EXPORT)
        shutil.rmtree(temp, ignore_errors=True)  # of a process that was killed
        try:
            yield temp
            sync(temp)
            faults.point("export.whole")
            _check_named(directory, named)
            _move_into(directory, temp)
        finally:
            shutil.rmtree(temp, ignore_errors=True)


def _check_named(directory: str, named: Named) -> None:
    if named_in(directory) != named:
        raise ConfigError(f"{directory} does not name step {named.step} any more: export to another directory")


def _move_into(directory: str, temp: str) -> None:
    earlier = filter(_STOCK_FILE.fullmatch, os.listdir(directory))
    for name in sorted(earlier, key=_place_in_order, reverse=True):
        os.unlink(os.path.join(directory, name))
        sync_directory(directory)
    for name in sorted(os.listdir(temp), key=_place_in_order):
        faults.point("export.named.move")
        sync_directory(directory)
        os.rename(os.path.join(temp, name), os.path.join(directory, name))
    sync_directory(directory)


def _place_in_order(name: str) -> tuple[bool, bool]:
    """Return the place of a file in the order of moves: weights after others, those of the first model last."""
    return name.startswith(("model", "pytorch_model")), name in _FIRST_WEIGHTS


@contextlib.contextmanager
def _locked(directory: str, timeout_s: float) -> Iterator[None]:
    """Let one process at a time change a directory. Blocks: while another one does.

    Raises: WaitTimeout; FileNotFoundError, if the directory is missing.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(directory, timeout_s))
        except TimeoutError as error:
            raise WaitTimeout(
                f"{directory}: another process exports into it for more than {timeout_s:g} s; wait until it has "
                "ended, or end it, and export again"
            ) from error
        yield
