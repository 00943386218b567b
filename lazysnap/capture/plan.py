"""The capture plan: worked out once, cheaply checked at every later boundary.

What is lazy (copied during the next forward and backward): parameters that an optimizer holds, tensors of its state
with at least one dimension, and what the source names besides. Everything else is eager: copied at the boundary
before control returns, since it may change at any time (docs/architecture.md).
"""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lazysnap.capture.batches import Batch, batches_of
from lazysnap.capture.devices import has_copier
from lazysnap.capture.dtypes import DTYPE_NAMES, is_converted, is_storable, logical_name, stored_form
from lazysnap.capture.likeness import Likeness
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


def key_of(tensor: torch.Tensor) -> Key:
    """Return address, size in bytes and device of a plain tensor's memory."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), str(tensor.device)


def storage_of(tensor: torch.Tensor) -> tuple[int, str]:
    """Return address and device of the storage that a tensor, or this rank's part of it, is a view of."""
    local = local_of(tensor)
    return local.untyped_storage().data_ptr(), str(local.device)


@dataclass(frozen=True)
class TensorRecord:
    """Facts about one tensor of the state at the time of the plan."""

    name: str
    lazy: bool
    primary: int
    """Index of the record whose bytes stand for this one too (tied weights); its own index otherwise."""
    pointer: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    offset: int
    """Bytes from the start of the image."""
    nbytes: int
    stored_shape: tuple[int, ...]
    """Shape and dtype in the shard; others than the tensor's for dtypes that a shard has no name for."""
    stored_dtype: torch.dtype
    is_dense: bool
    """Its bytes lie one behind the other as the shard has them: no kernel of torch is needed to copy it."""
    is_frozen: bool
    """It is a parameter without gradient: see ``capture.frozen``."""


@dataclass(frozen=True)
class CapturePlan:
    """The place of every tensor of the state. ``records`` are in the order of the walk, ``order`` in file order."""

    names: list[str]
    """Names in the order of the walk; the very list of the walk that the plan was made from."""
    records: list[TensorRecord]
    order: list[int]
    layout: Layout
    logical: dict[str, dict[str, Any]]
    """Further facts of the manifest about each tensor, by name: dtype, memory order, scope, place in the whole."""
    aliases: dict[str, str]
    signature: object
    replicas: list[int] = field(default_factory=list)
    """See ``CaptureMeta``."""
    outline: dict[str, list[Any]] = field(default_factory=dict, repr=False)
    """See ``outline_of``, of the walk that the plan was made from."""
    likeness: Likeness | None = field(default=None, repr=False)
    """A faster comparison of the same facts but addresses."""
    _views: "weakref.WeakKeyDictionary[TrainerSlot, dict[int, torch.Tensor]]" = field(
        default_factory=weakref.WeakKeyDictionary, repr=False
    )
    """Made once per slot; they go with it."""

    @cached_property
    def facts_text(self) -> str:
        """Fields of the metadata that are the same in every capture of this plan: JSON, without braces around it."""
        fields: dict[str, Any] = {"tensors": self.logical, "aliases": self.aliases}
        if self.replicas:
            fields["replicas"] = self.replicas
        return json_text(fields)[1:-1]

    @cached_property
    def lazy(self) -> list[int]:
        """Records that are copied beside training, in the order of the walk."""
        return [index for index, record in enumerate(self.records) if record.lazy]

    @cached_property
    def eager_batches(self) -> list[Batch]:
        """Records in CPU memory that are copied at the boundary, each once, in file order.

        Only real tensors of one element are put together: those are dense, whatever strides they have by then.
        """
        batches: list[Batch] = []
        for is_scalar, chosen in groupby(self._on_cpu(is_lazy=False), self._is_real_scalar):
            if is_scalar:
                batches += batches_of(self.records, list(chosen))
            else:
                batches += [batch for index in chosen for batch in batches_of(self.records, [index])]
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
        chosen = ((index, self.records[index]) for index in self.order)
        return [i for i, record in chosen if record.lazy is is_lazy and record.nbytes and record.device.type == "cpu"]

    @cached_property
    def devices(self) -> list[torch.device]:
        """Devices whose memory is copied by streams of their own."""
        found = {record.device for record in self.records if record.device.type != "cpu"}
        return sorted(found, key=str)

    @cached_property
    def lazy_pointers(self) -> list[int]:
        """The address of each tensor of ``lazy``."""
        return [self.records[index].pointer for index in self.lazy]

    @cached_property
    def _tied(self) -> list[int]:
        return [index for index, record in enumerate(self.records) if record.primary != index]

    @cached_property
    def _loose(self) -> list[int]:
        """Those whose place may change, on its device: where it stays, the device is the same, too."""
        return [index for index, record in enumerate(self.records) if not record.lazy]

    @cached_property
    def _turnable(self) -> list[int]:
        """Those whose place may change and whose strides are part of the manifest."""
        return [index for index in self._loose if len(self.records[index].shape) > 1]

    @cached_property
    def is_converting(self) -> bool:
        """True if a tensor is stored as another dtype than its own."""
        return any(record.stored_dtype is not record.dtype for record in self.records)

    def outline_of(self, tensors: Sequence[torch.Tensor]) -> dict[str, list[Any]]:
        """Return the facts about the tensors of a walk that the plan rests on, by name."""
        # As lists: comparing those takes a third of comparing record by record.
        return {
            "shape": [tensor.shape for tensor in tensors],
            "dtype": [tensor.dtype for tensor in tensors],
            "device": [tensors[index].device for index in self._loose],
            "place": [(tensors[index].data_ptr(), tensors[index].stride()) for index in self.lazy],
            "strides": [tensors[index].stride() for index in self._turnable],
            "pending conjugation or sign": [tensor.is_conj() or tensor.is_neg() for tensor in tensors],
        }

    def mismatch(self, walk: Walk, signature: object) -> str | None:
        """Why the plan does not hold for ``walk`` any more, ``None`` if it does."""
        if signature != self.signature:
            return "the optimizers hold other parameters or other state"
        tensors = walk.tensors
        if walk.names is not self.names and walk.names != self.names:
            return "the structure of the state changed"
        if self.likeness is not None and self.likeness.holds_for(tensors):
            if [tensors[index].data_ptr() for index in self.lazy] != self.lazy_pointers:
                return "a tensor changed its place"
        else:
            found = self.outline_of(tensors)
            changed = next((fact for fact, then in self.outline.items() if found[fact] != then), None)
            if changed is not None:
                return f"a tensor changed its {changed}"
        for index in self._tied:
            record = self.records[index]
            if tensors[record.primary].data_ptr() != tensors[index].data_ptr():
                return f"tensor {record.name} is no longer tied to another one"
        return None

    def view(self, slot: TrainerSlot, index: int) -> torch.Tensor:
        """Return the record's place in the image of ``slot`` as a tensor, made once per slot."""
        views = self._views.setdefault(slot, {})
        if index not in views:
            record = self.records[index]
            views[index] = view_of(slot.image, record.offset, record.stored_dtype, record.stored_shape)
        return views[index]


def view_of(buffer: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over ``buffer`` at ``offset`` bytes; shares its memory and keeps it alive."""
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    nbytes = count * dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset)
    return flat.view(dtype).view(shape)


def optimizer_signature(source: StateSource) -> object:
    """Changes when an optimizer is replaced, gets a parameter group or creates state."""
    return tuple(
        (id(optimizer), tuple(len(group["params"]) for group in optimizer.param_groups), len(optimizer.state))
        for optimizer in source.optimizers()
    )


def lazy_keys(source: StateSource) -> set[Key]:
    """Which memory only changes behind the gate."""
    tensors = list(source.lazy_tensors())
    for optimizer in source.optimizers():
        for group in optimizer.param_groups:
            tensors += group["params"]
        for state in optimizer.state.values():
            if isinstance(state, dict):
                tensors += [item for item in state.values() if isinstance(item, torch.Tensor) and item.dim()]
    # An optimizer may hold what is no part of the state, and so was not checked.
    keys = {key_of(local_of(tensor)) for tensor in tensors if not is_uninitialised(tensor) and not _problem(tensor)}
    return {key for key in keys if key[0] and key[1]}


def frozen_keys(source: StateSource) -> set[Key]:
    """Return the memory of parameters without gradient."""
    keys = set[Key]()
    for module in source.modules():
        for parameter in module.parameters():
            if not parameter.requires_grad and not is_uninitialised(parameter) and not _problem(parameter):
                keys.add(key_of(local_of(parameter)))
    return keys


def _is_wrapper(tensor: Any) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def _problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be captured, whatever becomes of it; ``None`` if it can."""
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
    if _is_wrapper(tensor) or not has_memory(tensor):
        # What it shows is worked out of tensors inside it.
        return f"a tensor of the subclass {type(tensor).__qualname__}, which has no memory of its own,"
    return None


def check_kinds(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Before anything is trained: raises StateError for a live tensor that no snapshot can hold."""
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
    """Raises: StateError, naming a tensor of the state that cannot be captured."""
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
    """Work the plan out. ``lazy``, ``frozen``: default ``lazy_keys``, ``frozen_keys``.

    ``tied``: names that are not in ``walk``, each with one that is and stands for it.
    Raises: StateError, naming a tensor that cannot be captured.
    """
    check_walk(walk)
    lazy = lazy_keys(source) if lazy is None else lazy
    frozen = frozen_keys(source) if frozen is None else frozen
    are_frozen = [key_of(tensor) in frozen for tensor in walk.tensors]
    facts = _facts(walk, lazy)
    chosen = [i for i, (_, primary) in enumerate(facts) if primary == i]
    # Small and eager tensors first: adjacent copies can be coalesced, and the watermark starts early. Frozen tensors
    # last: whole blocks of the file are theirs alone, and a level stores those once.
    chosen.sort(key=lambda index: (are_frozen[index], facts[index][0], walk.tensors[index].nbytes))
    logical: dict[str, dict[str, Any]] = {}
    specs = []
    for index in chosen:
        name, stored = walk.names[index], stored_form(walk.tensors[index])
        if (kept := logical_name(walk.tensors[index].dtype)) is not None:
            logical[name] = {"dtype": kept}
        if (dims := order_of(walk.tensors[index].shape, walk.tensors[index].stride())) is not None:
            logical.setdefault(name, {})["order"] = list(dims)
        if are_frozen[index]:
            logical.setdefault(name, {})["frozen"] = True
        specs.append(TensorSpec(name, DTYPE_NAMES[stored.dtype], tuple(stored.shape)))
    aliases = {walk.names[i]: walk.names[primary] for i, (_, primary) in enumerate(facts) if primary != i}
    aliases.update({name: aliases.get(primary, primary) for name, primary in (tied or {}).items()})
    layout = Layout.plan(specs, aliases)
    place = {spec.name: (offset, spec.nbytes) for spec, offset in zip(layout.specs, layout.offsets, strict=True)}
    records = [_record(walk, facts, index, place, is_frozen=are_frozen[index]) for index in range(len(facts))]
    order = sorted(chosen, key=lambda index: (records[index].offset, records[index].nbytes))
    plan = CapturePlan(
        walk.names,
        records,
        order,
        layout,
        logical,
        aliases,
        optimizer_signature(source),
        likeness=Likeness(walk.tensors),
    )
    plan.outline.update(plan.outline_of(walk.tensors))
    return plan


def _facts(walk: Walk, lazy: Collection[Key]) -> list[tuple[bool, int]]:
    """Return for each tensor: True if it is captured lazily, and the index of the tensor whose bytes it shares."""
    primaries: dict[object, int] = {}
    facts = []
    for index, tensor in enumerate(walk.tensors):
        key = key_of(tensor)
        same = (key, tensor.shape, tensor.dtype, tensor.stride()) if key[1] else index
        facts.append((key in lazy and not is_converted(tensor), primaries.setdefault(same, index)))
    return facts


def _record(
    walk: Walk,
    facts: Sequence[tuple[bool, int]],
    index: int,
    place: Mapping[str, tuple[int, int]],
    *,
    is_frozen: bool,
) -> TensorRecord:
    tensor, (is_lazy, primary) = walk.tensors[index], facts[index]
    stored = stored_form(tensor)
    offset, nbytes = place.get(walk.names[primary], (0, 0))
    return TensorRecord(
        name=walk.names[index],
        lazy=is_lazy,
        primary=primary,
        pointer=tensor.data_ptr(),
        shape=tensor.shape,
        dtype=tensor.dtype,
        device=tensor.device,
        offset=offset,
        nbytes=nbytes,
        stored_shape=tuple(stored.shape),
        stored_dtype=stored.dtype,
        is_dense=stored.is_contiguous() and not stored.is_conj() and not stored.is_neg(),
        is_frozen=is_frozen,
    )
