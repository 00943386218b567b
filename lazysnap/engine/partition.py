"""What of the walked state this rank captures: its own tensors, its shards, and its share of what all ranks hold.

Replicated state (DDP) is cut by rows into shares of equal size over the ranks of a node, so that together they hold one
copy per node (topology.share); a DTensor's local shard is captured by the rank that owns it. Worked out once, from what
this rank knows alone; a later boundary only takes the same views of the live tensors again.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazysnap.capture.plan import Key, key_of
from lazysnap.shard.checksum import digest
from lazysnap.shard.pieces import volume
from lazysnap.state.sharding import held_part, local_of
from lazysnap.state.walk import Walk
from lazysnap.topology import Place, share


@dataclass(frozen=True)
class _Part:
    """One captured tensor: number ``index`` of the walk, all of its local rows or some."""

    index: int
    rows: tuple[int, int] | None = None


class Partition:
    """The parts of one walk; holds as long as the names and kinds of its tensors stay."""

    def __init__(self, walk: Walk, replicated: Collection[Key], place: Place) -> None:
        """``replicated``: memory that holds the same on every rank. Raises: UnsupportedState."""
        self._of = walk.names
        self.facts: dict[str, dict[str, Any]] = {}
        """By name: ``scope``, ``global_shape``, ``offsets``, as in the manifest; nothing for what is rank-scoped."""
        parts: list[_Part] = []
        common: list[int] = []
        self._tied: dict[int, int] = {}
        first: dict[object, int] = {}
        for index, (tensor, name) in enumerate(zip(walk.tensors, walk.names, strict=True)):
            held = held_part(tensor, name)
            is_whole = held is None and key_of(tensor) not in replicated
            primary = index if is_whole else first.setdefault(_identity(tensor, index), index)
            if primary != index:
                self._tied[index] = primary
            elif held is not None:
                if held.captured_here and (volume(held.local.shape) or not volume(held.global_shape)):
                    parts.append(_Part(index))
                    self.facts[name] = _facts("shard", held.global_shape, held.offsets)
            elif is_whole:
                parts.append(_Part(index))
            else:
                common.append(index)
        tensors = [walk.tensors[index] for index in common]
        named = [(walk.names[i], list(t.shape), str(t.dtype)) for i, t in zip(common, tensors, strict=True)]
        self.common = digest(json.dumps(named).encode())
        """Of the replicated tensors' names, shapes and dtypes: must be the same on all ranks that share them."""
        sizes = [(t.shape[0] if t.dim() else 1, t.nbytes // max(1, t.shape[0] if t.dim() else 1)) for t in tensors]
        for rows in share(sizes, place.local_rank, place.local_world_size):
            tensor, index = tensors[rows.index], common[rows.index]
            whole = (rows.start, rows.stop) == (0, sizes[rows.index][0])
            parts.append(_Part(index, None if whole else (rows.start, rows.stop)))
            offsets = (rows.start, *(0 for _ in tensor.shape[1:])) if tensor.dim() else ()
            self.facts[walk.names[index]] = _facts("full", tuple(tensor.shape), offsets)
        self._parts = sorted(parts, key=lambda part: part.index)
        self._names = [walk.names[part.index] for part in self._parts]
        self._paths = [walk.paths[part.index] for part in self._parts]
        here = {part.index for part in self._parts}
        self.aliases = {walk.names[i]: walk.names[primary] for i, primary in self._tied.items() if primary in here}
        """Further names of what is captured here."""

    def holds_for(self, walk: Walk) -> bool:
        """Whether ``walk`` has the structure that this was made for; tensors are compared by the plan."""
        tensors = walk.tensors
        same = (local_of(tensors[a]).data_ptr() == local_of(tensors[b]).data_ptr() for a, b in self._tied.items())
        return (walk.names is self._of or walk.names == self._of) and all(same)

    def apply(self, walk: Walk) -> Walk:
        """The same state with the tensors that this rank captures; its text still names all of them. Hot."""
        tensors = walk.tensors
        mine = [
            local_of(tensors[part.index])
            if part.rows is None
            else tensors[part.index].detach()[part.rows[0] : part.rows[1]]
            for part in self._parts
        ]
        return replace(walk, tensors=mine, names=self._names, paths=self._paths)

    def lazy_keys(self, walk: Walk, lazy: Collection[Key]) -> set[Key]:
        """The memory of the captured parts whose whole tensor is in ``lazy``."""
        whole = [walk.tensors[part.index] for part in self._parts]
        return {
            key_of(part)
            for part, tensor in zip(self.apply(walk).tensors, whole, strict=True)
            if key_of(local_of(tensor)) in lazy
        }


def _identity(tensor: torch.Tensor, index: int) -> object:
    """The same for tied tensors; empty ones are tied to nothing."""
    local = local_of(tensor)
    return (key_of(local), local.shape, local.stride(), local.dtype, tensor.shape) if local.numel() else index


def _facts(scope: str, shape: tuple[int, ...], offsets: tuple[int, ...]) -> dict[str, Any]:
    return {"scope": scope, "global_shape": list(shape), "offsets": list(offsets)}


def replicated_keys(parameters: Collection[torch.nn.Parameter], optimizers: Collection[Any]) -> set[Key]:
    """The memory of parameters that all ranks keep equal, and of their optimizers' tensors."""
    chosen = {id(parameter) for parameter in parameters}
    keys = {key_of(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if id(parameter) in chosen and isinstance(state, dict):
                keys.update(key_of(item) for item in state.values() if isinstance(item, torch.Tensor) and item.dim())
    return {key for key in keys if key[0] and key[1]}
