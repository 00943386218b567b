"""``automatic_checkpoint_naming``: the next ``checkpoints/checkpoint_N``, the one to load, and those to delete.

Stock Accelerate counts all names in the directory. Here an unfinished checkpoint is not loaded, and only complete ones
that lazysnap wrote are deleted.
"""

import logging
import os
import re
from collections.abc import Iterable

from lazysnap.exports.folder import discard, is_unfinished, mark_of

logger = logging.getLogger("lazysnap.accelerate")

_CHECKPOINT = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")


def number_of(name: str) -> int | None:
    """Return the number of a checkpoint's directory; ``None`` for any other name."""
    match = _CHECKPOINT.fullmatch(os.path.basename(name))
    return None if match is None else int(match[1])


def next_iteration(names: Iterable[str], iteration: int) -> int:
    """Return the number of the next checkpoint: greater than those in ``names``, and at least ``iteration``."""
    return max([iteration, *(number + 1 for name in names if (number := number_of(name)) is not None)])


def problem(directory: str) -> str | None:
    """Return why a checkpoint is not complete; ``None`` if it is. Blocks.

    One without ``lazysnap-export.json`` is stock's: it is taken as it is, as stock takes it, unless it is empty.
    """
    if is_unfinished(directory):
        return "it is not finished"
    if not os.listdir(directory):
        return "it is empty"
    listed = (mark_of(directory) or {}).get("files", ())
    missing = [name for name in listed if not os.path.lexists(os.path.join(directory, str(name)))]
    return f"there is no {missing[0]}" if missing else None


def newest_complete(root: str) -> str | None:
    """Return the complete checkpoint of the greatest number in ``root``; ``None`` if there is none.

    Those passed over are named in a warning. Blocks. Raises: OSError.
    """
    for path in reversed(_numbered(root)):
        reason = problem(path)
        if reason is None:
            return path
        logger.warning("%s is passed over, it is not complete: %s", path, reason)
    return None


def delete_superseded(root: str, total_limit: int | None) -> list[str]:
    """Delete the oldest complete checkpoints beyond ``total_limit``, and return their paths. Those of stock stay.

    At least one stays. Newer checkpoints that are being made count. Each is marked as unfinished before its files are
    deleted. Blocks. Raises: OSError.
    """
    if total_limit is None:
        return []
    numbered = _numbered(root)
    whole = [path for path in numbered if mark_of(path) is not None and problem(path) is None]
    # Unfinished ones with smaller numbers are of a training that died.
    newer = numbered[numbered.index(whole[-1]) + 1 :] if whole else []
    count = len(whole) + sum(map(is_unfinished, newer))
    going = whole[:-1][: max(0, count - max(1, total_limit))]
    for path in going:
        discard(path)
    return going


def _numbered(root: str) -> list[str]:
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    found = sorted((number, name) for name in names if (number := number_of(name)) is not None)
    return [path for _, name in found if os.path.isdir(path := os.path.join(root, name))]
