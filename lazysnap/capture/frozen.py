"""Frozen tensors: parameters that need no gradient and that no optimizer holds. They are captured and stored once.

They stand in a file of their own, which is named by the digest of its bytes. At every boundary their pointers and
versions are compared. A write through ``.data`` moves neither, so nobody notices it.
"""

import ctypes
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from lazysnap.capture.devices import has_copier
from lazysnap.capture.dtypes import DTYPE_NAMES, is_converted, is_storable, logical_name, stored_form
from lazysnap.capture.reader import SLICE_BYTES, pieces_of
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.state.sharding import has_memory, local_of
from lazysnap.state.source import StateSource

LEAST_BYTES = 1 << 20
"""Less than this is not worth a file of its own."""
PIECES = "lazysnap.pieces"
"""Key in the header's metadata: the place of each tensor in its whole. Equal bytes of different pieces are thereby
different files."""

Memory = tuple[int, int, str, torch.Size, torch.dtype, tuple[int, ...]]
Parameters = Mapping[str, Sequence[torch.Tensor]]
"""The live tensors with the same memory, by name in the state."""


def frozen_parameters(
    named: Iterable[tuple[str, torch.Tensor]],
    source: StateSource,
    changed: Collection[str] = (),
    least_bytes: int = LEAST_BYTES,
) -> Parameters:
    """The frozen ones among the tensors of a state; none, if together they have fewer than ``least_bytes``.

    What shares memory with anything else of the state, or with what an optimizer holds, is not frozen; nor is what
    stands under a name in ``changed``.
    """
    held = [item for optimizer in source.optimizers() for group in optimizer.param_groups for item in group["params"]]
    held_ids = {id(item) for item in held}
    candidates: dict[Memory, list[torch.Tensor]] = defaultdict(list)
    for parameter in source.frozen_tensors():
        if not parameter.requires_grad and id(parameter) not in held_ids and _is_eligible(parameter):
            candidates[_memory(parameter)].append(parameter)
    if not candidates:
        return {}
    found: dict[Memory, list[str]] = defaultdict(list)
    others = [*held, *source.lazy_tensors()]
    for name, tensor in named:
        if name not in changed and not _is_odd(tensor) and _memory(tensor) in candidates:
            found[_memory(tensor)].append(name)
        else:
            others.append(tensor)
    busy = {_storage(tensor) for tensor in others if not _is_odd(tensor)}
    chosen = {memory: names for memory, names in found.items() if _storage(candidates[memory][0]) not in busy}
    if sum(memory[1] for memory in chosen) < least_bytes:
        return {}
    return {name: candidates[memory] for memory, names in chosen.items() for name in names}


def _is_eligible(parameter: torch.Tensor) -> bool:
    local = local_of(parameter)
    return (
        not _is_odd(parameter)
        and not (isinstance(parameter, DTensor) and any(kind.is_partial() for kind in parameter.placements))
        and has_copier(local.device)
        and not local.is_inference()
        and is_storable(local.dtype)
        and not is_converted(local)
        and not local.is_conj()
        and not local.is_neg()
        and local.is_contiguous()
        and local.nbytes > 0
    )


def _is_odd(tensor: torch.Tensor) -> bool:
    """True if its memory is of another kind: sparse, quantized, none. A subclass may have plain memory."""
    local = local_of(tensor)
    return local.layout is not torch.strided or local.device.type == "meta" or not has_memory(local)


def _memory(tensor: torch.Tensor) -> Memory:
    local = local_of(tensor)
    return local.data_ptr(), local.nbytes, str(local.device), local.shape, local.dtype, local.stride()


def _storage(tensor: torch.Tensor) -> tuple[int, str]:
    local = local_of(tensor)
    return local.untyped_storage().data_ptr(), str(local.device)


@dataclass(frozen=True, eq=False)
class FrozenSet:
    """The frozen tensors that this rank captures, and how they were when they were chosen."""

    aliases: dict[str, str]
    """Further names of tied tensors."""
    layout: Layout
    logical: dict[str, dict[str, Any]]
    """Further facts of the manifest about each tensor, by name; see ``CapturePlan.logical``."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors in the form and order of the file. They keep their memory alive."""
    parameters: tuple[tuple[int, torch.Tensor], ...]
    """The live parameters, each with the index of its tensor."""
    _places: tuple[Memory, ...] = field(repr=False)
    _facts: list[tuple[int, int]] = field(repr=False)
    _ready: tuple[torch.Event, ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        parameters: Parameters,
        captured: Iterable[tuple[str, torch.Tensor]],
        tied: Mapping[str, str] | None = None,
        facts: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> "FrozenSet | None":
        """Those of the ``captured`` tensors, plain ones, that are among ``parameters``; ``None`` without any.

        ``tied``: further names of captured ones. ``facts``: what the manifest says of those that are pieces.
        """
        same: dict[object, list[str]] = defaultdict(list)
        found: dict[str, torch.Tensor] = {}
        for name, tensor in captured:
            if name in parameters and tensor.numel():
                same[_memory(tensor)].append(name)
                found[name] = tensor
        if not found:
            return None
        aliases = {name: min(names) for names in same.values() for name in names if name != min(names)}
        aliases.update({name: aliases.get(one, one) for name, one in (tied or {}).items() if one in found})
        # By name, so that every start of a run gives the same bytes.
        stored = {name: stored_form(found[name].detach()) for name in sorted(found) if name not in aliases}
        logical: dict[str, dict[str, Any]] = {name: dict((facts or {}).get(name, {})) for name in stored}
        pieces = json.dumps({name: logical[name] for name in stored if logical[name]})
        for name in stored:
            if (dtype := logical_name(found[name].dtype)) is not None:
                logical[name]["dtype"] = dtype
        specs = [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in stored.items()]
        layout = Layout.plan(specs, aliases | ({PIECES: pieces} if pieces != "{}" else {}))
        names = [spec.name for spec in layout.specs]
        live = tuple((index, one) for index, name in enumerate(names) for one in parameters[name])
        devices = {tensor.device for tensor in stored.values() if tensor.device.type != "cpu"}
        return cls(
            aliases=aliases,
            layout=layout,
            logical={name: said for name, said in logical.items() if said},
            tensors=tuple(stored[name] for name in names),
            parameters=live,
            _places=tuple(_memory(found[name]) for name in names),
            _facts=_facts_of(live),
            # What wrote them runs before this on the compute stream.
            _ready=tuple(
                torch.accelerator.current_stream(device).record_event() for device in sorted(devices, key=str)
            ),
        )

    @cached_property
    def names(self) -> list[str]:
        """Names in the order of the file; tied tensors have one name."""
        return [spec.name for spec in self.layout.specs]

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.layout.size_bytes

    def all_names(self) -> set[str]:
        """Every name in the state that stands for one of them."""
        return {*self.names, *self.aliases}

    def is_like(self, other: "FrozenSet") -> bool:
        """True if both are the same names of the same memory."""
        return (self.layout, self.logical, self._places) == (other.layout, other.logical, other._places)

    # ---------------------------------------------------------------- watching

    def changed(self) -> list[str]:
        """Return the names of tensors whose pointer or version changed. Hot: once per boundary."""
        found = zip(self.parameters, _facts_of(self.parameters), self._facts, strict=True)
        return sorted({self.names[index] for (index, _), now, then in found if now != then})

    def accept(self) -> None:
        """Take the present pointers and versions as unchanged: the same values were loaded into the tensors again."""
        self._facts[:] = _facts_of(self.parameters)

    def trained(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
        """Names of those that an optimizer got hold of, or that need a gradient by now. Hot: once per boundary."""
        held = {id(item) for optimizer in optimizers for group in optimizer.param_groups for item in group["params"]}
        found = {index for index, parameter in self.parameters if id(parameter) in held or parameter.requires_grad}
        return [self.names[index] for index in sorted(found)]

    # ---------------------------------------------------------------- the bytes of the file

    def pieces(self) -> Iterator[memoryview]:
        """The bytes that the live tensors make now. Blocks; copies none on a CPU."""
        yield memoryview(self.layout.header)
        for tensor in self.tensors:
            yield from pieces_of(tensor, self._ready)

    def copied_into(self, room: memoryview) -> Iterator[memoryview]:
        """The same while they are copied to ``room``: each piece as it stands there. Blocks."""
        at = 0
        for piece in self.pieces():
            if piece.readonly:
                room[at : at + len(piece)] = piece
            else:  # in C, without the lock of the interpreter
                target = (ctypes.c_ubyte * len(piece)).from_buffer(room, at)
                ctypes.memmove(target, (ctypes.c_ubyte * len(piece)).from_buffer(piece), len(piece))
            yield room[at : at + len(piece)]
            at += len(piece)


def slices_of(room: memoryview) -> Iterator[memoryview]:
    """A file in memory, in pieces."""
    return (room[start : start + SLICE_BYTES] for start in range(0, len(room), SLICE_BYTES))


def digest_of(pieces: Iterable[memoryview]) -> str:
    """Return the digest that names a file with these bytes (``Checksums.whole``). Blocks."""
    blocks: list[str] = []
    size, block = 0, xxhash.xxh3_128()
    for piece in pieces:
        while len(piece):
            part, piece = piece[: BLOCK_BYTES - size % BLOCK_BYTES], piece[BLOCK_BYTES - size % BLOCK_BYTES :]
            block.update(part)
            size += len(part)
            if size % BLOCK_BYTES == 0:
                blocks.append(block.hexdigest())
                block = xxhash.xxh3_128()
    if size % BLOCK_BYTES:
        blocks.append(block.hexdigest())
    return Checksums(size, BLOCK_BYTES, tuple(blocks)).whole


def _facts_of(parameters: Iterable[tuple[int, torch.Tensor]]) -> list[tuple[int, int]]:
    locals_ = [local_of(parameter) for _, parameter in parameters]
    return [(local.data_ptr(), local._version) for local in locals_]
