"""Weights as one safetensors file, written block by block, without torch and with a few blocks of memory."""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from lazysnap.errors import ShardCorrupt, UnsupportedState
from lazysnap.levels.blocks import Wanted
from lazysnap.levels.files import pwrite_all
from lazysnap.shard.layout import Layout
from lazysnap.snapshots.reader import OpenShard, OpenSnapshot, Stored, read


def located(snapshot: OpenSnapshot, names: Mapping[str, str]) -> dict[str, Stored]:
    """The stored tensors of the only rank; ``names``: by name in the file, the name in the snapshot.

    Raises: ShardCorrupt, if one is missing; UnsupportedState, for a dtype that safetensors does not have.
    """
    found = {}
    for name, stored_name in names.items():
        stored = snapshot.find(0, stored_name)
        if stored is None:
            raise ShardCorrupt(f"{snapshot.ranks[0][0].where}: no tensor {stored_name!r}, which the state refers to")
        if stored.logical is not None:
            raise UnsupportedState(
                f"tensor {name!r} is {stored.logical}, which safetensors cannot hold; export to .ckpt or a DCP "
                "directory, or choose other tensors with --only"
            )
        found[name] = stored
    return found


def bytes_of(tensors: Mapping[str, Stored]) -> int:
    """Bytes of distinct tensors: the total of what ``write_weights`` reports."""
    return sum({stored.key: stored.spec.nbytes for stored in tensors.values()}.values())


def write_weights(tensors: Mapping[str, Stored], path: str, beat: Callable[[int], None]) -> int:
    """Write tensors, by their names in the file, to a new file; returns its size in bytes.

    Tied tensors are stored once, under the alphabetically first name; the header's ``__metadata__`` holds the other
    names, as with ``safetensors.torch.save_model``. ``beat`` receives the bytes of each write, and may raise.
    Blocks. Raises: ShardCorrupt; LevelError; OSError.
    """
    first: dict[tuple[int, str], str] = {}
    for name in sorted(tensors):
        first.setdefault(tensors[name].key, name)
    tied = {name: first[tensors[name].key] for name in sorted(tensors) if first[tensors[name].key] != name}
    layout = Layout.plan([replace(tensors[name].spec, name=name) for name in first.values()], {"format": "pt", **tied})
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(handle, layout.size_bytes)
        pwrite_all(handle, 0, memoryview(layout.header))
        jobs: dict[OpenShard, list[Wanted]] = defaultdict(list)
        for spec, target in zip(layout.specs, layout.offsets, strict=True):
            stored = tensors[spec.name]

            def put(at: int, data: memoryview, target: int = target) -> None:
                pwrite_all(handle, target + at, data)
                beat(len(data))

            jobs[stored.shard].append(Wanted(stored.offset, stored.offset + spec.nbytes, put))
        read(jobs)
    finally:
        os.close(handle)
    return layout.size_bytes
