"""The part of the state that this rank captures: its own tensors, its shards, its share of replicated ones.

The ranks of a node cut replicated state (DDP) by rows into shares of equal size, and together hold one copy of it
(topology.share). Those that hold the same local shard of a DTensor cut that (HSDP, tensors that a mesh dimension
replicates). The nodes cut the same state once more: at a level that all nodes see, each stores its share alone. Each
rank computes its part once, from what it knows alone. A later boundary takes the same views of the live tensors.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazysnap.capture.plan import Key, key_of
from lazysnap.shard.checksum import digest
from lazysnap.shard.strides import order_of
from lazysnap.state.sharding import HeldPart, held_part, local_of
from lazysnap.state.walk import Walk
from lazysnap.topology import Rows, share

STORERS = 8
"""Replicated state is spread over at most this many nodes: a restart opens that many files, also of 1,000 nodes."""
Common = tuple[list[int], str, int, str]
"""Facts about tensors that the same ranks hold: the ranks of this node, a digest of all ranks, their number, and a
digest of the tensors' names, shapes and dtypes."""


@dataclass(frozen=True)
class _TensorPart:
    """One captured tensor: number ``index`` of the walk, all of its local rows or some."""

    index: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Shared:
    """A tensor that several ranks of a node hold."""

    index: int
    local: torch.Tensor
    scope: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """The place of ``local`` in the global tensor."""

    @property
    def rows(self) -> tuple[int, int]:
        """The number of rows and the bytes of each; a tensor without dimensions is one row."""
        rows = self.local.shape[0] if self.local.dim() else 1
        return rows, self.local.nbytes // max(1, rows)


class Partition:
    """The parts of one walk; holds as long as the names and kinds of its tensors stay."""

    def __init__(self, walk: Walk, replicated: Collection[Key], rank: int, nodes: Sequence[str]) -> None:
        """``replicated``: memory that holds the same on every rank; ``nodes``: of every rank. Raises: StateError."""
        self._of = walk.names
        self.facts: dict[str, dict[str, Any]] = {}
        """``scope``, ``global_shape``, ``offsets`` and ``order`` by name, like in the manifest; absent for rank-scoped
        tensors."""
        self.shared_rows: dict[str, tuple[int, int]] = {}
        """The captured rows that this node stores at levels that all nodes see, by name; absent: all."""
        self.nodes: dict[str, int] = {}
        """The number of nodes that hold the captured rows, by name, where it is more than one."""
        self.common: list[Common] = []
        """Facts that must be equal on all ranks that hold the same tensors."""
        self._storers: set[int] = set()
        self._tied: dict[int, int] = {}
        parts, shared = self._sorted_out(walk, replicated, rank, len(nodes))
        for holders, ones in shared.items():
            parts += self._cut(walk, ones, [nodes[other] for other in holders], holders, rank)
        self._parts = sorted(parts, key=lambda part: part.index)
        self._names = [walk.names[part.index] for part in self._parts]
        self._paths = [walk.paths[part.index] for part in self._parts]
        here = {part.index for part in self._parts}
        self.aliases = {walk.names[i]: walk.names[primary] for i, primary in self._tied.items() if primary in here}
        """Further names of what is captured here."""

    def _sorted_out(
        self, walk: Walk, replicated: Collection[Key], rank: int, num_ranks: int
    ) -> tuple[list[_TensorPart], dict[tuple[int, ...], list[_Shared]]]:
        """Return this rank's own tensors, and shared ones by the ranks that hold them."""
        everyone = tuple(range(num_ranks))
        own: list[_TensorPart] = []
        shared: dict[tuple[int, ...], list[_Shared]] = {}
        first: dict[object, int] = {}
        for index, (tensor, name) in enumerate(zip(walk.tensors, walk.names, strict=True)):
            held = held_part(tensor, name)
            is_own = held is None and key_of(tensor) not in replicated
            primary = index if is_own else first.setdefault(_identity(tensor, index), index)
            if primary != index:
                self._tied[index] = primary
            elif is_own:
                own.append(_TensorPart(index))
            else:
                one, holders = _shared(index, tensor, held, everyone)
                # Of a shard without bytes there is nothing to keep but where the whole tensor has none.
                if rank in holders and (0 not in one.local.shape or 0 in one.global_shape):
                    shared.setdefault(holders, []).append(one)
        return own, shared

    def _cut(
        self, walk: Walk, ones: Sequence[_Shared], at: Sequence[str], holders: Sequence[int], rank: int
    ) -> list[_TensorPart]:
        """This rank's rows of what ``holders`` hold; ``at``: their nodes."""
        sizes, here = [one.rows for one in ones], at[holders.index(rank)]
        node_ranks = [other for other, node in zip(holders, at, strict=True) if node == here]
        self.common.append((node_ranks, digest(str(tuple(holders)).encode()), len(holders), _digest(walk, ones)))
        num_nodes = len(set(at))
        storers = list(dict.fromkeys(at))[:STORERS]
        stored = {}
        if here in storers:
            stored = {rows.index: rows for rows in share(sizes, storers.index(here), len(storers))}
        self._storers.update(other for other, node in zip(holders, at, strict=True) if node in storers)
        parts = []
        for rows in share(sizes, node_ranks.index(rank), len(node_ranks)):
            one, name = ones[rows.index], walk.names[ones[rows.index].index]
            whole = (rows.start, rows.stop) == (0, sizes[rows.index][0])
            parts.append(_TensorPart(one.index, None if whole else (rows.start, rows.stop)))
            start = (one.offsets[0] + rows.start, *one.offsets[1:]) if one.offsets else ()
            self.facts[name] = {"scope": one.scope, "global_shape": list(one.global_shape), "offsets": list(start)}
            # Of the whole tensor: its rows alone do not show it.
            if (dims := order_of(one.local.shape, one.local.stride())) is not None:
                self.facts[name]["order"] = list(dims)
            if num_nodes > 1:
                self.nodes[name] = num_nodes
            both = _both(rows, stored.get(rows.index))
            if both != (0, rows.stop - rows.start):
                self.shared_rows[name] = both
        return parts

    @property
    def replicas(self) -> list[int]:
        """The ranks of the nodes that store what this node leaves out."""
        return sorted(self._storers) if self.shared_rows else []

    def keep_all(self) -> None:
        """Nodes do not hold the same after all: each stores, and protects, its own whole."""
        self.shared_rows.clear()
        self.nodes.clear()

    def holds_for(self, walk: Walk) -> bool:
        """True if ``walk`` has the structure that this was made for; tensors are compared by the plan."""
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

    def keys_of_parts(self, walk: Walk, keys: Collection[Key]) -> set[Key]:
        """Return the memory of the captured parts of tensors whose memory is in ``keys``."""
        whole = [walk.tensors[part.index] for part in self._parts]
        return {
            key_of(part)
            for part, tensor in zip(self.apply(walk).tensors, whole, strict=True)
            if key_of(local_of(tensor)) in keys
        }


def _identity(tensor: torch.Tensor, index: int) -> object:
    """The same for tied tensors; empty ones are tied to nothing."""
    local = local_of(tensor)
    return (key_of(local), local.shape, local.stride(), local.dtype, tensor.shape) if local.numel() else index


def _shared(
    index: int, tensor: torch.Tensor, held: HeldPart | None, everyone: tuple[int, ...]
) -> tuple[_Shared, tuple[int, ...]]:
    """A tensor, or a part of one, that others may hold as well, and the ranks that do."""
    if held is None:
        shape = tuple(tensor.shape)
        return _Shared(index, tensor, "full", shape, (0,) * len(shape)), everyone
    return _Shared(index, held.local, "shard", held.global_shape, held.offsets), held.replicas


def _both(mine: Rows, stored: Rows | None) -> tuple[int, int]:
    """Return the rows of ``mine`` that are also in ``stored``, counted from the first of ``mine``."""
    start = max(mine.start, stored.start if stored else 0)
    stop = min(mine.stop, stored.stop if stored else 0)
    return (start - mine.start, stop - mine.start) if start < stop else (0, 0)


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
