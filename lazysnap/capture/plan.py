"""The capture plan: computed once, cheaply checked at every later boundary.

Lazy tensors are copied during the next forward and backward: parameters that an optimizer holds, tensors of its state
with at least one dimension, and tensors that the source names. All others are eager: they may change at any time, so
they are copied at the boundary before control returns (docs/architecture.md).
"""

import contextlib
import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lazysnap.capture.batches import Batch, batches_of
from lazysnap.capture.devices import has_copier
from lazysnap.capture.dtypes import DTYPE_NAMES, is_converted, is_storable, logical_name, stored_form
from lazysnap.errors import StateError
from lazysnap.memory.slots import TrainerSlot
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import json_text
from lazysnap.shard.strides import order_of
from lazysnap.state.codec import path_text
from lazysnap.state.modules import is_uninitialised
from lazysnap.state.sharding import has_memory, local_of
from lazysnap.state.source import StateSource
from lazysnap.state.walk import Walk

Key = tuple[int, int, str]

_TensorGuards: Any = None
"""torch's check of the inputs of a compiled graph. A private name, which may be missing."""
with contextlib.suppress(ImportError):
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards


def key_of(tensor: torch.Tensor) -> Key:
    """Return address, size in bytes and device of a plain tensor's memory."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), str(tensor.device)


def version_of(tensor: torch.Tensor) -> int:
    """Return how many writes torch counted; 0 for a tensor that was made in inference mode, of which it counts none."""
    if tensor.is_inference():
        return 0
    return tensor._version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return ``version_of`` of each. Hot."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one was made in inference mode; checking each first takes three times as long
        return list(map(version_of, tensors))


def storage_of(tensor: torch.Tensor) -> tuple[int, str]:
    """Return address and device of the storage that a tensor, or this rank's part of it, is a view of."""
    local = local_of(tensor)
    return local.untyped_storage().data_ptr(), str(local.device)


@dataclass(frozen=True)
class TensorRecord:
    """The facts about one tensor of the state at the time of the plan."""

    name: str
    lazy: bool
    primary: int
    """Index of the record with the same bytes (tied weights); its own index otherwise."""
    pointer: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    offset: int
    """Bytes from the start of the image."""
    nbytes: int
    stored_shape: tuple[int, ...]
    """Shape and dtype in the shard; they differ from the tensor's for dtypes without a name in the shard."""
    stored_dtype: torch.dtype
    is_dense: bool
    """True if its bytes are contiguous as in the shard, so that no kernel of torch is needed to copy it."""
    is_frozen: bool
    """True for a parameter without gradient: see ``capture.frozen``."""


@dataclass(frozen=True)
class CapturePlan:
    """The place of every tensor of the state. ``records`` are in the order of the walk, ``order`` in file order."""

    names: list[str]
    """Names in the order of the walk; the same list object as in the walk of the plan."""
    records: list[TensorRecord]
    order: list[int]
    layout: Layout
    logical: dict[str, dict[str, Any]]
    """Further facts of the manifest about each tensor, by name: dtype, memory order, scope, place in the whole."""
    aliases: dict[str, str]
    signature: object
    replicas: list[int] = field(default_factory=list)
    """See ``CaptureMeta``."""
    parameters: dict[str, list[str]] | None = None
    """Names of each optimizer's parameters, in its order, by the optimizer's path in the state."""
    outline: dict[str, list[Any]] = field(default_factory=dict, repr=False)
    """The result of ``outline_of`` for the walk of the plan."""
    guards: Any = field(default=None, repr=False)
    """See ``_guards_of``."""
    _views: "weakref.WeakKeyDictionary[TrainerSlot, dict[int, torch.Tensor]]" = field(
        default_factory=weakref.WeakKeyDictionary, repr=False
    )
    """Views of a slot, made once and released with it."""

    @cached_property
    def facts_text(self) -> str:
        """Fields of the metadata that are the same in every capture of this plan: JSON, without braces around it."""
        fields: dict[str, Any] = {"tensors": self.logical, "aliases": self.aliases}
        if self.replicas:
            fields["replicas"] = self.replicas
        if self.parameters is not None:
            fields["parameters"] = self.parameters
        return json_text(fields)[1:-1]

    @cached_property
    def lazy(self) -> list[int]:
        """Records that are copied during training, in the order of the walk."""
        return [index for index, record in enumerate(self.records) if record.lazy]

    @cached_property
    def eager_batches(self) -> list[Batch]:
        """Records in CPU memory that are copied at the boundary, each once, in file order.

        Only real tensors of one element are grouped: these are always dense.
        """
        batches: list[Batch] = []
        for is_scalar, indices in groupby(self._on_cpu(is_lazy=False), self._is_real_scalar):
            if is_scalar:
                batches += batches_of(self.records, list(indices))
                continue
            for index in indices:
                batches += batches_of(self.records, [index])
        return batches

    @cached_property
    def lazy_batches(self) -> list[Batch]:
        """Records that the copy thread copies, each once, in file order."""
        return batches_of(self.records, self._on_cpu(is_lazy=True))

    def _is_real_scalar(self, index: int) -> bool:
        record = self.records[index]
        is_same = record.stored_dtype is record.dtype and not record.dtype.is_complex
        return is_same and record.shape.numel() == 1

    def _on_cpu(self, *, is_lazy: bool) -> list[int]:
        indices = []
        for index in self.order:
            record = self.records[index]
            if record.lazy is is_lazy and record.nbytes and record.device.type == "cpu":
                indices.append(index)
        return indices

    @cached_property
    def devices(self) -> list[torch.device]:
        """Devices whose memory is copied by streams of their own."""
        devices = {record.device for record in self.records if record.device.type != "cpu"}
        return sorted(devices, key=str)

    @cached_property
    def lazy_pointers(self) -> list[int]:
        """The address of each tensor of ``lazy``."""
        return [self.records[index].pointer for index in self.lazy]

    @cached_property
    def _tied(self) -> list[int]:
        return [index for index, record in enumerate(self.records) if record.primary != index]

    @cached_property
    def _eager(self) -> list[int]:
        """Records whose address may change on their device. For the others an equal address implies the same device."""
        return [index for index, record in enumerate(self.records) if not record.lazy]

    @cached_property
    def _eager_with_order(self) -> list[int]:
        """Records whose address may change and whose strides are part of the manifest."""
        return [index for index in self._eager if len(self.records[index].shape) > 1]

    @cached_property
    def is_converting(self) -> bool:
        """True if a tensor is stored as another dtype than its own."""
        return any(record.stored_dtype is not record.dtype for record in self.records)

    def outline_of(self, tensors: Sequence[torch.Tensor]) -> dict[str, list[Any]]:
        """Return the facts about the tensors of a walk on which the plan depends, by name."""
        # As lists: comparing those takes a third of comparing record by record.
        return {
            "shape": [tensor.shape for tensor in tensors],
            "dtype": [tensor.dtype for tensor in tensors],
            "device": [tensors[index].device for index in self._eager],
            "place": [(tensors[index].data_ptr(), tensors[index].stride()) for index in self.lazy],
            "strides": [tensors[index].stride() for index in self._eager_with_order],
            "pending conjugation or sign": [tensor.is_conj() or tensor.is_neg() for tensor in tensors],
        }

    def mismatch(self, walk: Walk, signature: object) -> str | None:
        """Return the reason if the plan is no longer valid for ``walk``, else ``None``."""
        if signature != self.signature:
            return "the optimizers hold other parameters or other state"
        tensors = walk.tensors
        if walk.names is not self.names and walk.names != self.names:
            return "the structure of the state changed"
        if self.is_alike(tensors):
            if [tensors[index].data_ptr() for index in self.lazy] != self.lazy_pointers:
                return "a tensor changed its address"
        else:
            outline = self.outline_of(tensors)
            for fact, planned in self.outline.items():
                if outline[fact] != planned:
                    return f"a tensor changed its {fact}"
        for index in self._tied:
            record = self.records[index]
            if tensors[record.primary].data_ptr() != tensors[index].data_ptr():
                return f"tensor {record.name} is no longer tied to another one"
        return None

    def is_alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if the facts in ``outline`` are the same, except addresses; ``False`` if they may differ. Hot."""
        return self.guards is not None and self.guards.check(*tensors) is True

    def view(self, slot: TrainerSlot, index: int) -> torch.Tensor:
        """Return the record's place in the image of ``slot`` as a tensor, made once per slot."""
        views = self._views.setdefault(slot, {})
        if index not in views:
            record = self.records[index]
            views[index] = view_of(slot.image, record.offset, record.stored_dtype, record.stored_shape)
        return views[index]


def view_of(buffer: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over ``buffer`` at ``offset`` bytes; it shares its memory and keeps it alive."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    nbytes = count * dtype.itemsize
    with torch.inference_mode(False):  # a tensor of that mode could not be written to by a boundary outside of it
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset)
        return flat.view(dtype).view(shape)


def _guards_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Return torch's own check of types, shapes, strides, dtypes, devices, pending conjugations and signs; or None.

    Comparing 10,000 tensors takes 2 ms in one call, and 8 ms fact by fact in Python.
    """
    if _TensorGuards is None or not tensors:
        return None
    shapes = []
    strides = []
    for tensor in tensors:
        shapes.append(list(tensor.shape))
        strides.append(list(tensor.stride()))
    with contextlib.suppress(Exception):  # another release of torch may take other arguments
        return _TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
    return None


def optimizer_signature(source: StateSource) -> object:
    """Return a value that changes when an optimizer is replaced, gets a parameter group or creates state."""
    signature = []
    for optimizer in source.optimizers():
        group_sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
        signature.append((id(optimizer), group_sizes, len(optimizer.state)))
    return tuple(signature)


def lazy_keys(source: StateSource) -> set[Key]:
    """Return the memory that changes only after the gate."""
    tensors = list(source.lazy_tensors())
    for optimizer in source.optimizers():
        for group in optimizer.param_groups:
            tensors += group["params"]
        for state in optimizer.state.values():
            tensors += moments_of(state)
    return _keys_of(tensors)


def _keys_of(tensors: Iterable[torch.Tensor]) -> set[Key]:
    """Return the memory of the tensors that have memory and that a snapshot can hold."""
    keys = set()
    for tensor in tensors:
        # An optimizer may hold tensors outside the state, which were not checked.
        if not is_uninitialised(tensor) and not _problem(tensor):
            key = key_of(local_of(tensor))
            if key[0] and key[1]:
                keys.add(key)
    return keys


def moments_of(state: object) -> list[torch.Tensor]:
    """Return the tensors with at least one dimension in an optimizer's state of one parameter."""
    if not isinstance(state, dict):
        return []
    return [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]


def frozen_keys(source: StateSource) -> set[Key]:
    """Return the memory of parameters without gradient."""
    frozen = []
    for module in source.modules():
        for parameter in module.parameters():
            if not parameter.requires_grad:
                frozen.append(parameter)
    return _keys_of(frozen)


def _problem(tensor: torch.Tensor) -> str | None:
    """Return the kind of a tensor that cannot be captured; ``None`` if it can."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor with layout {tensor.layout}"
    if tensor.is_quantized or not is_storable(tensor.dtype):
        return f"a tensor of dtype {tensor.dtype}"
    if isinstance(tensor, DTensor) or is_uninitialised(tensor) or tensor.device.type == "meta":
        return None
    if not has_copier(tensor.device):
        return f"a tensor on the device {tensor.device}, whose copies cannot be ordered by streams and events,"
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if is_wrapper or not has_memory(tensor):
        # Its values are computed from tensors inside it.
        return f"a tensor of the subclass {type(tensor).__qualname__}, which has no memory of its own,"
    return None


def check_kinds(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check, before anything is trained, that a snapshot can hold these live tensors. Raises: StateError."""
    for name, tensor in named:
        problem = _problem(tensor)
        if tensor.device.type == "meta":
            raise _on_meta(name)
        if problem:
            raise _unsupported(name, problem)


def _on_meta(where: str) -> StateError:
    return StateError(
        f"{where}: a tensor on the meta device has no values; give the model memory, with model.to_empty(device=...), "
        "and initialise it, before a snapshot is restored or taken"
    )


def _unsupported(where: str, problem: str) -> StateError:
    return StateError(
        f"{where}: {problem} cannot be captured yet; keep it out of the state, or convert it in state_dict()"
    )


def check_walk(walk: Walk) -> None:
    """Check that a snapshot can hold the state. Raises: StateError, naming a tensor that cannot be captured."""
    for tensor, path in zip(walk.tensors, walk.paths, strict=True):
        problem = _problem(tensor)
        if is_uninitialised(tensor):
            raise StateError(
                f"{path_text(path)}: a parameter of a lazy module that has seen no batch yet has no values; run one "
                "batch through the model before the first snapshot"
            )
        if tensor.device.type == "meta":
            raise _on_meta(path_text(path))
        if problem:
            raise _unsupported(path_text(path), problem)


def make_plan(
    walk: Walk,
    source: StateSource,
    lazy: set[Key] | None = None,
    frozen: set[Key] | None = None,
    tied: Mapping[str, str] | None = None,
) -> CapturePlan:
    """Compute the plan.

    Args:
        lazy: default ``lazy_keys``.
        frozen: default ``frozen_keys``.
        tied: names that are not in ``walk``, each with a name in it whose tensor has the same bytes.

    Raises: StateError, naming a tensor that cannot be captured.
    """
    check_walk(walk)
    if lazy is None:
        lazy = lazy_keys(source)
    if frozen is None:
        frozen = frozen_keys(source)
    unplaced = _records_of(walk, lazy, frozen)
    primaries = []
    aliases = {}
    for index, record in enumerate(unplaced):
        if record.primary == index:
            primaries.append(index)
        else:
            aliases[record.name] = unplaced[record.primary].name
    for name, primary_name in (tied or {}).items():
        aliases[name] = aliases.get(primary_name, primary_name)
    primaries.sort(key=lambda index: _file_order(unplaced[index]))
    specs = []
    logical = {}
    for index in primaries:
        record = unplaced[index]
        specs.append(TensorSpec(record.name, DTYPE_NAMES[record.stored_dtype], record.stored_shape))
        facts = _manifest_facts(walk.tensors[index], is_frozen=record.is_frozen)
        if facts:
            logical[record.name] = facts
    layout = Layout.plan(specs, aliases)
    offsets = {}
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        offsets[spec.name] = offset
    records = []
    for record in unplaced:
        records.append(replace(record, offset=offsets[unplaced[record.primary].name]))
    plan = CapturePlan(
        walk.names,
        records,
        sorted(primaries, key=lambda index: (records[index].offset, records[index].nbytes)),
        layout,
        logical,
        aliases,
        optimizer_signature(source),
        guards=_guards_of(walk.tensors),
    )
    plan.outline.update(plan.outline_of(walk.tensors))
    return plan


def _file_order(record: TensorRecord) -> tuple[bool, bool, int]:
    """Return a key to sort by.

    Small and eager tensors first: adjacent copies can be coalesced, and the watermark starts early. Frozen tensors
    last: whole blocks of the file then contain only these, and a level stores them once.
    """
    return record.is_frozen, record.lazy, record.nbytes


def _records_of(walk: Walk, lazy: Collection[Key], frozen: Collection[Key]) -> list[TensorRecord]:
    """Return the record of each tensor, in the order of the walk, without offsets."""
    primaries: dict[object, int] = {}
    records = []
    for index, (name, tensor) in enumerate(zip(walk.names, walk.tensors, strict=True)):
        key = key_of(tensor)
        primary = index
        if key[1]:
            primary = primaries.setdefault((key, tensor.shape, tensor.dtype, tensor.stride()), index)
        stored = stored_form(tensor)
        record = TensorRecord(
            name=name,
            lazy=key in lazy and not is_converted(tensor),
            primary=primary,
            pointer=tensor.data_ptr(),
            shape=tensor.shape,
            dtype=tensor.dtype,
            device=tensor.device,
            offset=0,
            nbytes=tensor.nbytes,
            stored_shape=tuple(stored.shape),
            stored_dtype=stored.dtype,
            is_dense=stored.is_contiguous() and not stored.is_conj() and not stored.is_neg(),
            is_frozen=key in frozen,
        )
        records.append(record)
    return records


def _manifest_facts(tensor: torch.Tensor, *, is_frozen: bool) -> dict[str, Any]:
    """Return the facts about a tensor for the manifest; empty for most tensors."""
    facts: dict[str, Any] = {}
    dtype = logical_name(tensor.dtype)
    if dtype is not None:
        facts["dtype"] = dtype
    order = order_of(tensor.shape, tensor.stride())
    if order is not None:
        facts["order"] = list(order)
    if is_frozen:
        facts["frozen"] = True
    return facts
