"""The part of the state that this rank captures: its own tensors, its shards, its share of replicated ones.

The ranks of a node cut replicated state (DDP) by rows into shares of equal size, and together hold exactly one copy of
it (REFT, section 4: sharded snapshots). Ranks that hold the same local shard of a DTensor cut that shard (HSDP, tensors
that a mesh dimension replicates). The nodes cut the same state once more: at a shared level each stores only its share.
Each rank computes its part once, without communication. A later boundary takes the same views of the live tensors.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazysnap.capture.plan import Key, key_of, moments_of
from lazysnap.shard.checksum import digest
from lazysnap.shard.strides import order_of
from lazysnap.state.sharding import HeldPart, held_part, local_of
from lazysnap.state.walk import Walk

STORERS = 8
"""Maximum nodes over which replicated state is spread: a restart opens that many files, also of 1,000 nodes."""
Common = tuple[list[int], str, int, str]
"""Facts about tensors that the same ranks hold: the ranks of this node, a digest of all ranks, their number, and a
digest of the tensors' names, shapes and dtypes."""


@dataclass(frozen=True)
class Rows:
    """Rows ``[start, stop)`` of one tensor along its first dimension; a tensor without dimensions is one row."""

    index: int
    start: int
    stop: int


def share(sizes: Sequence[tuple[int, int]], part: int, parts: int) -> list[Rows]:
    """Return the rows in share ``part`` of ``parts``, of tensors with ``(rows, bytes per row)``.

    The shares of all parts cover every row exactly once; their bytes differ by less than one row of the tensors at
    their ends. Tensors without bytes belong to part 0, so that their shape is kept.
    """
    total = sum(rows * row_bytes for rows, row_bytes in sizes)
    low = total * part // parts
    high = total * (part + 1) // parts
    all_rows = []
    tensor_start = 0
    for index, (rows, row_bytes) in enumerate(sizes):
        if rows * row_bytes == 0:
            if part == 0:
                all_rows.append(Rows(index, 0, rows))
            continue
        # The first byte of a row decides its share.
        start = min(rows, max(0, -(-(low - tensor_start) // row_bytes)))
        stop = min(rows, max(0, -(-(high - tensor_start) // row_bytes)))
        if start < stop:
            all_rows.append(Rows(index, start, stop))
        tensor_start += rows * row_bytes
    return all_rows


@dataclass(frozen=True)
class _TensorPart:
    """One captured tensor: tensor ``index`` of the walk, with all or some of its local rows."""

    index: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class _SharedTensor:
    """A tensor, or a part of one, that several ranks hold."""

    index: int
    local: torch.Tensor
    scope: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """The place of ``local`` in the global tensor."""

    @property
    def num_rows(self) -> int:
        """Rows of ``local``; a tensor without dimensions is one row."""
        if self.local.dim() == 0:
            return 1
        return self.local.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of each row."""
        return self.local.nbytes // max(1, self.num_rows)

    def facts(self, first_row: int) -> dict[str, Any]:
        """Return the manifest's facts about the rows from ``first_row`` on."""
        offsets = list(self.offsets)
        if offsets:
            offsets[0] += first_row
        facts = {"scope": self.scope, "global_shape": list(self.global_shape), "offsets": offsets}
        # The order of the whole tensor, which its rows do not show.
        order = order_of(self.local.shape, self.local.stride())
        if order is not None:
            facts["order"] = list(order)
        return facts


class Partition:
    """The partition of one walk; valid as long as the names and kinds of its tensors stay the same."""

    def __init__(self, walk: Walk, replicated: Collection[Key], rank: int, nodes: Sequence[str]) -> None:
        """``replicated``: memory that is equal on every rank; ``nodes``: the node of every rank. Raises: StateError."""
        self._structure = walk.names
        self.facts: dict[str, dict[str, Any]] = {}
        """``scope``, ``global_shape``, ``offsets`` and ``order`` by name, like in the manifest; absent for rank-scoped
        tensors."""
        self.shared_rows: dict[str, tuple[int, int]] = {}
        """The captured rows that this node stores at shared levels, by name; absent: all."""
        self.nodes: dict[str, int] = {}
        """The number of nodes that hold the captured rows, by name, if more than one."""
        self.common: list[Common] = []
        """Facts that must be equal on all ranks that hold the same tensors."""
        self.aliases: dict[str, str] = {}
        """Further names of captured tensors, each with the name that is captured."""
        self._storers: set[int] = set()
        self._tied: dict[int, int] = {}
        """Tensors of the walk that are tied to an earlier one, by index, each with the index of that one."""
        parts, shared = self._divide(walk, replicated, rank, len(nodes))
        for holders, tensors in shared.items():
            parts += self._cut(walk, tensors, holders, rank, nodes)
        self._parts = sorted(parts, key=lambda part: part.index)
        self._names = []
        self._paths = []
        captured = set()
        for part in self._parts:
            self._names.append(walk.names[part.index])
            self._paths.append(walk.paths[part.index])
            captured.add(part.index)
        for index, primary in self._tied.items():
            if primary in captured:
                self.aliases[walk.names[index]] = walk.names[primary]

    def _divide(
        self, walk: Walk, replicated: Collection[Key], rank: int, num_ranks: int
    ) -> tuple[list[_TensorPart], dict[tuple[int, ...], list[_SharedTensor]]]:
        """Return the tensors that only this rank holds, and shared tensors by the ranks that hold them."""
        all_ranks = tuple(range(num_ranks))
        rank_tensors: list[_TensorPart] = []
        shared: dict[tuple[int, ...], list[_SharedTensor]] = {}
        primaries: dict[object, int] = {}
        for index, (tensor, name) in enumerate(zip(walk.tensors, walk.names, strict=True)):
            shard = held_part(tensor, name)
            if shard is None and key_of(tensor) not in replicated:
                rank_tensors.append(_TensorPart(index))
                continue
            primary = primaries.setdefault(_identity(tensor, index), index)
            if primary != index:
                self._tied[index] = primary
                continue
            holders = all_ranks
            if shard is not None:
                holders = shard.replicas
            shared_tensor = _shared_tensor(index, tensor, shard)
            # A shard without bytes is skipped, unless the whole tensor has none: then its shape is kept.
            is_empty_shard = 0 in shared_tensor.local.shape and 0 not in shared_tensor.global_shape
            if rank in holders and not is_empty_shard:
                shared.setdefault(holders, []).append(shared_tensor)
        return rank_tensors, shared

    def _cut(
        self, walk: Walk, tensors: Sequence[_SharedTensor], holders: Sequence[int], rank: int, nodes: Sequence[str]
    ) -> list[_TensorPart]:
        """Return this rank's rows of ``tensors``, which the ranks ``holders`` hold. ``nodes``: the node of every
        rank.
        """
        holders_by_node: dict[str, list[int]] = {}
        for holder in holders:
            holders_by_node.setdefault(nodes[holder], []).append(holder)
        node_ranks = holders_by_node[nodes[rank]]
        num_nodes = len(holders_by_node)
        self.common.append((node_ranks, digest(str(tuple(holders)).encode()), len(holders), _digest(walk, tensors)))
        sizes = [(tensor.num_rows, tensor.row_bytes) for tensor in tensors]
        stored = self._rows_to_store(sizes, nodes[rank], holders_by_node)
        parts = []
        for rows in share(sizes, node_ranks.index(rank), len(node_ranks)):
            tensor = tensors[rows.index]
            part = _TensorPart(tensor.index)
            if (rows.start, rows.stop) != (0, tensor.num_rows):
                part = _TensorPart(tensor.index, (rows.start, rows.stop))
            parts.append(part)
            name = walk.names[tensor.index]
            self.facts[name] = tensor.facts(rows.start)
            if num_nodes > 1:
                self.nodes[name] = num_nodes
            stored_rows = _overlap(rows, stored.get(rows.index))
            if stored_rows != (0, rows.stop - rows.start):
                self.shared_rows[name] = stored_rows
        return parts

    def _rows_to_store(
        self, sizes: Sequence[tuple[int, int]], node: str, holders_by_node: Mapping[str, Sequence[int]]
    ) -> dict[int, Rows]:
        """Return the rows that ``node`` stores at shared levels, by index of the tensor in ``sizes``."""
        storing_nodes = list(holders_by_node)[:STORERS]
        for storing_node in storing_nodes:
            self._storers.update(holders_by_node[storing_node])
        if node not in storing_nodes:
            return {}
        return {rows.index: rows for rows in share(sizes, storing_nodes.index(node), len(storing_nodes))}

    @property
    def replicas(self) -> list[int]:
        """The ranks of the nodes that store the other rows."""
        if not self.shared_rows:
            return []
        return sorted(self._storers)

    def keep_all(self) -> None:
        """Let each node store and protect all rows that it holds, because nodes differ in them."""
        self.shared_rows.clear()
        self.nodes.clear()

    def holds_for(self, walk: Walk) -> bool:
        """True if ``walk`` has the structure of this partition; the plan compares tensors."""
        if walk.names is not self._structure and walk.names != self._structure:
            return False
        for index, primary in self._tied.items():
            tensor = local_of(walk.tensors[index])
            if tensor.data_ptr() != local_of(walk.tensors[primary]).data_ptr():
                return False
        return True

    def apply(self, walk: Walk) -> Walk:
        """Return the same state with only the tensors that this rank captures; its text still names all of them.
        Hot.
        """
        tensors = []
        for part in self._parts:
            tensor = local_of(walk.tensors[part.index])
            if part.rows is not None:
                start, stop = part.rows
                tensor = tensor.detach()[start:stop]
            tensors.append(tensor)
        return replace(walk, tensors=tensors, names=self._names, paths=self._paths)

    def keys_of_parts(self, walk: Walk, keys: Collection[Key]) -> set[Key]:
        """Return the memory of the captured parts of tensors whose memory is in ``keys``."""
        keys_of_parts = set()
        for part, captured in zip(self._parts, self.apply(walk).tensors, strict=True):
            if key_of(local_of(walk.tensors[part.index])) in keys:
                keys_of_parts.add(key_of(captured))
        return keys_of_parts


def _identity(tensor: torch.Tensor, index: int) -> object:
    """Return an object that is equal for tied tensors; empty tensors are tied to nothing."""
    local = local_of(tensor)
    if local.numel() == 0:
        return index
    return key_of(local), local.shape, local.stride(), local.dtype, tensor.shape


def _shared_tensor(index: int, tensor: torch.Tensor, shard: HeldPart | None) -> _SharedTensor:
    """Return a tensor that other ranks hold too. ``shard``: the part of it that this rank holds; ``None``: all."""
    if shard is not None:
        return _SharedTensor(index, shard.local, "shard", shard.global_shape, shard.offsets)
    shape = tuple(tensor.shape)
    return _SharedTensor(index, tensor, "full", shape, (0,) * len(shape))


def _overlap(captured: Rows, stored: Rows | None) -> tuple[int, int]:
    """Return the rows of ``captured`` that are also in ``stored``, counted from the first of ``captured``."""
    if stored is None:
        return (0, 0)
    start = max(captured.start, stored.start)
    stop = min(captured.stop, stored.stop)
    if start >= stop:
        return (0, 0)
    return (start - captured.start, stop - captured.start)


def _digest(walk: Walk, tensors: Sequence[_SharedTensor]) -> str:
    facts = []
    for tensor in tensors:
        local = tensor.local
        facts.append((walk.names[tensor.index], list(local.shape), list(tensor.offsets), str(local.dtype)))
    return digest(json.dumps(facts).encode())


def replicated_keys(parameters: Collection[torch.nn.Parameter], optimizers: Collection[Any]) -> set[Key]:
    """Return the memory of parameters that all ranks keep equal, and of their optimizers' tensors."""
    ids = set(map(id, parameters))
    tensors: list[torch.Tensor] = [*parameters]
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if id(parameter) in ids:
                tensors += moments_of(state)
    keys = set()
    for tensor in tensors:
        key = key_of(tensor)
        if key[0] and key[1]:
            keys.add(key)
    return keys
