"""The result of a training under ``lazysnap chaos``: a digest of each tensor in the files that it ends with."""

import pathlib
from collections.abc import Iterator
from typing import Any

from lazysnap.errors import ShardCorrupt
from lazysnap.shard.checksum import digest
from lazysnap.shard.layout import Layout
from lazysnap.shard.limits import MAX_HEADER_BYTES

_PREFERRED = ((".safetensors",), (".pt", ".pth", ".ckpt"), (".npz", ".npy", ".bin"), (".json",))
_TORCH_FILE = b"PK\x03\x04"


def files_of(directory: pathlib.Path, pattern: str | None) -> list[pathlib.Path]:
    """Return the files of the result: those that match ``pattern``, else the newest file of the best kind."""
    files = [path for path in sorted(directory.glob(pattern or "**/*")) if path.is_file()]
    if pattern is None and files:
        kinds = [[path for path in files if path.suffix in suffixes] for suffixes in _PREFERRED]
        kind = next(filter(None, kinds), files)
        files = [max(kind, key=lambda path: path.stat().st_mtime_ns)]
    return files


def digests(paths: list[pathlib.Path]) -> dict[str, str]:
    """Return the digest of each tensor by its name; of a file in which no tensors are found, of its bytes."""
    found: dict[str, str] = {}
    for number, path in enumerate(paths, start=1):
        name = path.name if len(paths) == 1 else f"{path.name} ({number} of {len(paths)})"
        tensors = dict(_tensors(path)) or {"": digest(path.read_bytes())}
        found |= {f"{tensor} in {name}" if tensor else name: value for tensor, value in tensors.items()}
    return found


def difference(wanted: dict[str, str], got: dict[str, str]) -> str:
    """Say what differs; empty if both are equal in every bit."""
    if not got:
        return "no file of the result is there"
    missing = [name for name in wanted if name not in got] + [name for name in got if name not in wanted]
    if missing:
        return f"{missing[0]} is only in one of both results"
    others = [name for name in wanted if wanted[name] != got[name]]
    return f"{len(others)} of {len(wanted)} differ, the first is {others[0]}" if others else ""


def _tensors(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        start = file.read(8)
    if path.suffix == ".safetensors" and len(start) == 8:
        yield from _of_safetensors(path, int.from_bytes(start, "little"))
    elif start.startswith(_TORCH_FILE) and path.suffix != ".npz":
        yield from _of_torch(path)


def _of_safetensors(path: pathlib.Path, length: int) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        try:
            layout = Layout.parse(file.read(8 + min(length, MAX_HEADER_BYTES)), path.stat().st_size, str(path))
        except ShardCorrupt:
            return
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            file.seek(offset)
            yield spec.name, f"{spec.dtype} {spec.shape} {digest(file.read(spec.nbytes))}"


def _of_torch(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    import pickle

    import torch

    def leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, torch.Tensor):
            data = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
            yield name, f"{value.dtype} {tuple(value.shape)} {digest(data.data)}"
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from leaves(item, f"{name}.{key}" if name else str(key))

    try:
        yield from leaves(torch.load(path, map_location="cpu", weights_only=True), "")
    except (RuntimeError, pickle.UnpicklingError):  # of types that weights_only refuses
        return
