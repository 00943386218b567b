"""A snapshot's whole state in memory, once: tensors are views of the bytes that were read."""

from collections.abc import Callable
from typing import Any

import torch

from lazysnap.capture.dtypes import DTYPES, logical_form
from lazysnap.capture.plan import view_of
from lazysnap.errors import ShardCorrupt
from lazysnap.export.images import Image, RankImages
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.workers import Workers
from lazysnap.shard.checksum import block_ranges
from lazysnap.state.codec import TAG, decode

_THREADS = 2


def load_state(rank: RankImages, beat: Callable[[int], None]) -> dict[str, Any]:
    """Read everything, verified, and decode it; tied tensors are one tensor. ``beat`` is told the bytes, may raise.

    Values of registered types become what their encoder made of them: nobody is here who knows the types.
    Blocks. Raises: ShardCorrupt, LevelError.
    """
    memory = {image.kind: _read(image, beat) for image in rank.images}
    known: dict[tuple[str, str], torch.Tensor] = {}

    def tensor(name: str) -> torch.Tensor:
        found = rank.find(name)
        if found.key not in known:
            if found.spec.dtype not in DTYPES:
                raise ShardCorrupt(f"tensor {name}: torch has no dtype for {found.spec.dtype}")
            view = view_of(memory[found.image.kind], found.offset, DTYPES[found.spec.dtype], found.spec.shape)
            try:
                known[found.key] = logical_form(view, found.logical)
            except ValueError as error:
                raise ShardCorrupt(f"tensor {name}: {error}") from error
        return known[found.key]

    state = decode(_unregistered(rank.state), tensor=tensor)
    if not isinstance(state, dict):
        raise ShardCorrupt(f"the small state is {type(state).__name__}, expected a dict")
    return state


def registered_names(encoded: Any) -> set[str]:
    """The names of registered types in an encoded state."""
    if isinstance(encoded, list):
        return {name for item in encoded for name in registered_names(item)}
    if not isinstance(encoded, dict):
        return set()
    own = {str(encoded.get("n"))} if encoded.get(TAG) == "registered" else set()
    return own | {name for item in encoded.values() for name in registered_names(item)}


def _unregistered(encoded: Any) -> Any:
    if isinstance(encoded, list):
        return [_unregistered(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if encoded.get(TAG) == "registered":
        return _unregistered(encoded.get("v"))
    return {key: _unregistered(item) for key, item in encoded.items()}


def _read(image: Image, beat: Callable[[int], None]) -> memoryview:
    memory = map_anonymous(image.manifest.size_bytes)

    def one(offset: int, length: int) -> None:
        beat(0)
        memory[offset : offset + length] = image.reader.read(offset, length)
        beat(length)

    spans = block_ranges(image.manifest.size_bytes, image.manifest.checksums.block_bytes)
    Workers[None](_THREADS, "lazysnap-export").run(
        (lambda offset=offset, length=length: one(offset, length))  # type: ignore[misc]
        for offset, length in spans
    )
    return memory
