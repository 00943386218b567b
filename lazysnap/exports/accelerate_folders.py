"""``automatic_checkpoint_naming``: the next ``checkpoints/checkpoint_N``, the one to load, and those to delete.

Stock Accelerate counts all names in the directory. Here only complete checkpoints count, and nothing else is deleted.
"""

import logging
import os
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lazysnap.exports.folder import STOCK_FILE, discard, is_unfinished, mark_of
from lazysnap.exports.target import MARK
from lazysnap.shard.limits import MAX_HEADER_BYTES, load_json

logger = logging.getLogger("lazysnap.accelerate")

_CHECKPOINT = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")
_HEADER_NESTING = 4


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Number of parts in a checkpoint of this accelerator, for checkpoints that stock wrote without a list of files."""

    models: int = 1
    optimizers: int = 1
    schedulers: int = 0
    customs: int = 0
    ranks: int = 1
    has_scaler: bool = False

    def files(self) -> Iterable[tuple[str, ...]]:
        """Yield the possible file names of each part; one of them must exist."""
        for index in range(self.models):
            end = f"_{index}" if index else ""
            yield f"model{end}.safetensors", f"pytorch_model{end}.bin"
        for kind, count in (("optimizer", self.optimizers), ("scheduler", self.schedulers)):
            for index in range(count):
                yield (f"{kind}_{index}.bin" if index else f"{kind}.bin",)
        for index in range(self.customs):
            yield (f"custom_checkpoint_{index}.pkl",)
        for index in range(self.ranks):
            yield (f"random_states_{index}.pkl",)
        if self.has_scaler:
            yield ("scaler.pt",)


def number_of(name: str) -> int | None:
    """Return the number of a checkpoint's directory; ``None`` for any other name."""
    match = _CHECKPOINT.fullmatch(os.path.basename(name))
    return None if match is None else int(match[1])


def next_iteration(names: Iterable[str], iteration: int) -> int:
    """Return the number of the next checkpoint: greater than those in ``names``, and at least ``iteration``."""
    return max([iteration, *(number + 1 for name in names if (number := number_of(name)) is not None)])


def problem(directory: str, parts: Parts) -> str | None:
    """Return why a checkpoint is not complete; ``None`` if it is. Checks names, sizes and headers. Blocks."""
    if is_unfinished(directory):
        return "it is not finished"
    mark = mark_of(directory)
    listed = mark.get("files") if mark is not None else None
    if isinstance(listed, list):
        wanted: list[tuple[str, ...]] = [(name,) for name in listed if isinstance(name, str)]
    else:
        wanted = list(parts.files())
    for names in wanted:
        path = next((at for name in names if os.path.lexists(at := os.path.join(directory, name))), None)
        if path is None:
            return f"there is no {' or '.join(names)}"
        if not _is_whole(path):
            return f"{os.path.basename(path)} is cut off"
    return None


def newest_complete(root: str, parts: Parts) -> str | None:
    """Return the complete checkpoint of the greatest number in ``root``; ``None`` if there is none.

    Those passed over are named in a warning. Blocks. Raises: OSError.
    """
    for path in reversed(_numbered(root)):
        reason = problem(path, parts)
        if reason is None:
            return path
        logger.warning("%s is passed over, it is not complete: %s", path, reason)
    return None


def delete_superseded(root: str, total_limit: int | None, parts: Parts) -> list[str]:
    """Delete the oldest complete checkpoints beyond ``total_limit``, and return their paths.

    At least one stays. Newer checkpoints that are being made count. Each is marked as unfinished before its files are
    deleted. Blocks. Raises: OSError.
    """
    if total_limit is None:
        return []
    numbered = _numbered(root)
    whole = [path for path in numbered if problem(path, parts) is None]
    # Unfinished ones with smaller numbers are of a training that died.
    newer = numbered[numbered.index(whole[-1]) + 1 :] if whole else []
    count = len(whole) + sum(map(is_unfinished, newer))
    going = whole[:-1][: max(0, count - max(1, total_limit))]
    for path in going:
        discard(path)
    return going


def stock_prefix(model: torch.nn.Module) -> str:
    """Return the prefix that DDP and ``torch.compile`` add to the weight names of one of ``accelerator._models``.

    In Accelerate 1.15 these models are not in DDP yet.
    """
    prefix = ""
    while True:
        inner = getattr(model, "_orig_mod", None)
        name = "_orig_mod"
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            inner, name = model.module, "module"
        if not isinstance(inner, torch.nn.Module):
            return prefix
        prefix, model = f"{prefix}{name}.", inner


def _numbered(root: str) -> list[str]:
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    found = sorted((number, name) for name in names if (number := number_of(name)) is not None)
    return [path for _, name in found if os.path.isdir(path := os.path.join(root, name))]


def _is_whole(path: str) -> bool:
    """True if a file that Accelerate writes is not cut off at its end; also for any other file."""
    name = os.path.basename(path)
    if not STOCK_FILE.fullmatch(name):
        return True
    try:
        if name.endswith(".safetensors"):
            return _is_whole_safetensors(path)
        if name != MARK:
            with zipfile.ZipFile(path) as archive:
                return bool(archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return False
    return True


def _is_whole_safetensors(path: str) -> bool:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            return False
        header = load_json(file.read(length), _HEADER_NESTING)
    ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
    return os.path.getsize(path) == 8 + length + max(ends, default=0)
