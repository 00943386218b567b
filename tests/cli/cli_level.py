"""Levels with real snapshots of real states, and what can be done to their files."""

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import torch
from support.image import write_shard
from support.names import START, directory_of

from lazysnap.capture.dtypes import DTYPE_NAMES, logical_name, stored_form
from lazysnap.cli import main
from lazysnap.levels.node_file import entries_of
from lazysnap.levels.source import MemorySource, map_anonymous
from lazysnap.levels.store import keep, open_storage
from lazysnap.resolver import Entry
from lazysnap.shard.layout import PAGE, Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.state.walk import walk

RUN, OTHER = "0123456789abcdef", "fedcba9876543210"


def at(step: int, run_id: str = RUN, start: str = START) -> str:
    """The directory of a snapshot."""
    return directory_of(step, run_id, start)


SHARD, MANIFEST = "node-00000-of-00001.safetensors", "node-00000-of-00001.json"


def run(*arguments: str) -> int:
    return main([str(argument) for argument in arguments])


def run_json(capsys, *arguments: str) -> tuple[int, dict]:
    """Exit code and the one JSON object on stdout."""
    capsys.readouterr()
    code = run(*arguments, "--json")
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return code, json.loads(out)


class Image:
    """Some tensors as a shard in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor], aliases: dict[str, str]) -> None:
        self.aliases = aliases
        self.logical = {n: {"dtype": d} for n, t in tensors.items() if (d := logical_name(t.dtype)) is not None}
        stored = {name: stored_form(tensor).contiguous() for name, tensor in tensors.items()}
        specs = [TensorSpec(name, DTYPE_NAMES[item.dtype], tuple(item.shape)) for name, item in stored.items()]
        layout = Layout.plan(specs, aliases)
        self.size_bytes = layout.size_bytes
        self.room = map_anonymous(-(-layout.size_bytes // PAGE) * PAGE)
        self.room[: len(layout.header)] = layout.header
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            if spec.nbytes:
                data = stored[spec.name].reshape(-1).view(torch.uint8).numpy()
                self.room[offset : offset + spec.nbytes] = data.data

    @property
    def source(self) -> MemorySource:
        return MemorySource(self.room, self.size_bytes)


def put(
    url: str,
    step: int,
    state: dict | None = None,
    *,
    run_id: str = RUN,
    names: tuple[str, ...] = (),
    rank: tuple[int, int] = (0, 1),
    captured_ns: int | None = None,
    start: str = START,
    parameters: dict[str, list[str]] | None = None,
) -> Entry:
    """Commit a snapshot of ``state``."""
    storage = open_storage(url)
    walked = walk({"model": {"w": torch.full((1000,), float(step))}, "step": step} if state is None else state)
    first: dict[object, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for tensor, name in zip(walked.tensors, walked.names, strict=True):
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()) if tensor.numel() else name
        owner = first.setdefault(key, name)
        if owner == name:
            tensors[name] = tensor
        else:
            aliases[name] = owner
    shard = Image(tensors, aliases)
    meta = CaptureMeta(
        run_id=run_id,
        start=start,
        step=step,
        rank=rank[0],
        world_size=rank[1],
        captured_ns=captured_ns or 10**18 + step,
        tensors=shard.logical,
        aliases=shard.aliases,
        state=walked.skeleton,
        packages={"lazysnap": "0.1.0", "torch": torch.__version__},
        parameters=parameters,
    )
    (entry,) = entries_of(write_shard(storage, meta, shard.source), storage.url)
    for name in names:
        keep(storage, entry.snapshot, name)
    return entry


def files(url: str) -> list[str]:
    """All objects below a level, as relative paths."""
    if "://" not in url:
        root = Path(url)
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    filesystem, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(root).strip("/") for path in filesystem.find(root))


def change(url: str, path: str, how: Callable[[bytearray], object]) -> None:
    """Damage one object behind the program's back; ``how`` works on its bytes in place."""
    filesystem, root = fsspec.core.url_to_fs(url)
    data = bytearray(filesystem.cat_file(f"{root}/{path}"))
    how(data)
    filesystem.pipe_file(f"{root}/{path}", bytes(data))


def flip(where: float) -> Callable[[bytearray], object]:
    def how(data: bytearray) -> None:
        data[int(where * len(data))] ^= 1

    return how


def remove(url: str, path: str) -> None:
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.rm_file(f"{root}/{path}")
