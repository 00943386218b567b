"""What of the walked state this rank captures: its own tensors, its shards, and its share of what all ranks hold.

Replicated state (DDP) is cut by rows into shares of equal size over the ranks of a node, so that together they hold one
copy per node (topology.share); so is a DTensor's local shard over those of them that hold the same one (HSDP, tensors
that a mesh dimension replicates). Worked out once, from what this rank knows alone; a later boundary only takes the
same views of the live tensors again.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazysnap.capture.plan import Key, key_of
from lazysnap.shard.checksum import digest
from lazysnap.shard.pieces import volume
from lazysnap.state.sharding import Held, held_part, local_of
from lazysnap.state.walk import Walk
from lazysnap.topology import share


@dataclass(frozen=True)
class _Part:
    """One captured tensor: number ``index`` of the walk, all of its local rows or some."""

    index: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Shared:
    """What several ranks of a node hold."""

    index: int
    local: torch.Tensor
    scope: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Of ``local`` in the whole."""


class Partition:
    """The parts of one walk; holds as long as the names and kinds of its tensors stay."""

    def __init__(
        self,
        walk: Walk,
        replicated: Collection[Key],
        rank: int,
        crew: Collection[int],
        untrained: Collection[str] = (),
    ) -> None:
        """``replicated``: memory that holds the same on every rank; ``crew``: those that ``rank`` shares with, itself
        among them; ``untrained``: names of DTensors of which each rank captures its whole local shard, because frozen
        tensors are stored by their content. Raises: UnsupportedState.
        """
        self._of = walk.names
        self.facts: dict[str, dict[str, Any]] = {}
        """By name: ``scope``, ``global_shape``, ``offsets``, as in the manifest; nothing for what is rank-scoped."""
        parts: list[_Part] = []
        shared: dict[tuple[int, ...], list[_Shared]] = {}
        self._tied: dict[int, int] = {}
        first: dict[object, int] = {}
        for index, (tensor, name) in enumerate(zip(walk.tensors, walk.names, strict=True)):
            held = held_part(tensor, name)
            is_own = held is None and key_of(tensor) not in replicated
            primary = index if is_own else first.setdefault(_identity(tensor, index), index)
            if primary != index:
                self._tied[index] = primary
            elif is_own:
                parts.append(_Part(index))
            else:
                one, ranks = _shared(index, tensor, held, crew)
                if held is not None and name in untrained and rank in ranks:
                    ranks = (rank,)
                # Of a shard without bytes there is nothing to keep but where the whole tensor has none.
                if rank in ranks and (volume(one.local.shape) or not volume(one.global_shape)):
                    shared.setdefault(ranks, []).append(one)
        self.common = {",".join(map(str, ranks)): _digest(walk, ones) for ranks, ones in shared.items()}
        """By the ranks that share them, what of the tensors must be the same on all of these: names, shapes, dtypes."""
        for ranks, ones in shared.items():
            sizes = [_rows(one.local) for one in ones]
            for rows in share(sizes, ranks.index(rank), len(ranks)):
                one = ones[rows.index]
                whole = (rows.start, rows.stop) == (0, sizes[rows.index][0])
                parts.append(_Part(one.index, None if whole else (rows.start, rows.stop)))
                start = (one.offsets[0] + rows.start, *one.offsets[1:]) if one.offsets else ()
                self.facts[walk.names[one.index]] = {
                    "scope": one.scope,
                    "global_shape": list(one.global_shape),
                    "offsets": list(start),
                }
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
            else local_of(tensors[part.index]).detach()[part.rows[0] : part.rows[1]]
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


def _shared(
    index: int, tensor: torch.Tensor, held: Held | None, crew: Collection[int]
) -> tuple[_Shared, tuple[int, ...]]:
    """A tensor, or a part of one, that others may hold as well, and those of ``crew`` that do."""
    if held is None:
        shape = tuple(tensor.shape)
        return _Shared(index, tensor, "full", shape, (0,) * len(shape)), tuple(sorted(crew))
    near = tuple(rank for rank in held.replicas if rank in crew)
    return _Shared(index, held.local, "shard", held.global_shape, held.offsets), near


def _rows(tensor: torch.Tensor) -> tuple[int, int]:
    """How many, and the bytes of each; a tensor without dimensions is one."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return rows, tensor.nbytes // max(1, rows)


def _digest(walk: Walk, ones: Collection[_Shared]) -> str:
    named = [(walk.names[one.index], list(one.local.shape), list(one.offsets), str(one.local.dtype)) for one in ones]
    return digest(json.dumps(named).encode())


def replicated_keys(parameters: Collection[torch.nn.Parameter], optimizers: Collection[Any]) -> set[Key]:
    """The memory of parameters that all ranks keep equal, and of their optimizers' tensors."""
    chosen = {id(parameter) for parameter in parameters}
    keys = {key_of(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if id(parameter) in chosen and isinstance(state, dict):
                keys.update(key_of(item) for item in state.values() if isinstance(item, torch.Tensor) and item.dim())
    return {key for key in keys if key[0] and key[1]}
