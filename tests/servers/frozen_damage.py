"""What can happen to the files of frozen tensors at a local level."""

import contextlib
import pathlib
import shutil

from support.catalogue import inventory_of

from lazysnap.errors import FormatError
from lazysnap.levels import open_store
from lazysnap.resolver import candidates

SHARD, MANIFEST = "node-00000-of-00001.safetensors", "node-00000-of-00001.json"


def flip(path: pathlib.Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def truncate(path: pathlib.Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


DAMAGES = {
    "the shard is deleted": lambda directory: (directory / SHARD).unlink(),
    "the shard is truncated": lambda directory: truncate(directory / SHARD),
    "a bit of the shard is flipped": lambda directory: flip(directory / SHARD),
    "a bit of the manifest is flipped": lambda directory: flip(directory / MANIFEST),
    "the manifest is deleted": lambda directory: (directory / MANIFEST).unlink(),
    "the directory is deleted": shutil.rmtree,
}


FLIPPED = "a bit of the shard is flipped"
NOTICED = [how for how in DAMAGES if how != FLIPPED]
"""By writers, which look at the manifest and the size. A flipped bit is found by readers."""


def frozen_at(root: str | pathlib.Path) -> pathlib.Path:
    """The directory of the only frozen tensors at a level."""
    (found,) = pathlib.Path(root).glob("frozen-*")
    return found


def damage(root: str | pathlib.Path, how: str) -> None:
    DAMAGES[how](frozen_at(root))


def restorable(url: str) -> list[int]:
    """Steps whose shard and frozen tensors are whole there, by a store that knows nothing yet."""
    store = open_store(url)
    steps = []
    for plan in candidates([inventory_of(store)]):
        with contextlib.suppress(FormatError, FileNotFoundError):  # damaged, or deleted just now
            for offers in [*plan.sources, *plan.frozen.values()]:
                store.verify(store.place(offers[0]))
            steps.append(plan.step)
    return sorted(steps)
