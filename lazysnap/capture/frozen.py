"""Immutable tensors: parameters that require no gradient and that no optimizer holds, stored once per run.

They make an image of their own, called by the checksum of its bytes. That they do not change is checked: every
boundary compares pointers, versions and a sample of their bytes, the end of training all of them.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from lazysnap.capture.dtypes import DTYPE_NAMES, is_converted, is_storable, logical_name, stored_form
from lazysnap.capture.reader import SLICE_BYTES, pieces_of
from lazysnap.capture.samples import DeviceSamples, HostSamples, samples_of
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.state.source import StateSource

LEAST_BYTES = 1 << 20
"""Less than this is not worth an image of its own."""

Identity = tuple[int, int, str, torch.Size, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class ImageDigest:
    """What a pass over all bytes of an image found."""

    checksums: Checksums
    tensors: dict[str, str]
    """A checksum for each tensor, by name."""

    @property
    def whole(self) -> str:
        """The checksum that names the image."""
        return self.checksums.whole


@dataclass(frozen=True, eq=False)
class FrozenSet:
    """Immutable tensors, and how they were when they were chosen."""

    names: tuple[str, ...]
    """In the order of the image; tied tensors by one name."""
    aliases: dict[str, str]
    """Further names of the same tensors."""
    layout: Layout
    logical: dict[str, dict[str, str]]
    tensors: tuple[torch.Tensor, ...]
    """As they stand in the image. Aliases of the parameters: they keep the memory, whatever becomes of those."""
    parameters: tuple[tuple[int, torch.nn.Parameter], ...]
    """The live parameters, each with the index of its name."""
    identities: tuple[Identity, ...]
    _facts: list[tuple[int, int]] = field(repr=False)
    _samples: Sequence[HostSamples | DeviceSamples] = field(repr=False)
    _ready: tuple[torch.cuda.Event, ...] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of the image."""
        return self.layout.size_bytes

    def all_names(self) -> set[str]:
        """Every name in the state that stands for one of them."""
        return {*self.names, *self.aliases}

    def is_like(self, other: "FrozenSet") -> bool:
        """Whether both are the same names of the same memory."""
        return (self.names, self.aliases, self.identities) == (other.names, other.aliases, other.identities)

    def changed(self) -> list[str]:
        """Names of those that are certainly not as they were. Hot: once per boundary."""
        facts = _facts_of(parameter for _, parameter in self.parameters)
        if facts != self._facts:
            found = zip(self.parameters, facts, self._facts, strict=True)
            return sorted({self.names[index] for (index, _), now, then in found if now != then})
        # Their memory is where it was, so it may be read.
        return [self.names[index] for samples in self._samples for index in samples.changed()]

    def accept(self) -> None:
        """The values that they had were loaded into them again. ``changed`` still compares samples of them."""
        self._facts[:] = _facts_of(parameter for _, parameter in self.parameters)

    def left(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
        """Names of those that an optimizer got hold of, or that need a gradient by now. Hot: once per boundary."""
        held = _held_ids(optimizers)
        return sorted(
            {
                self.names[index]
                for index, parameter in self.parameters
                if id(parameter) in held or parameter.requires_grad
            }
        )

    def digest(self, beat: Callable[[], None]) -> ImageDigest:
        """Checksums of the image that the live tensors make now. Blocks; reads all bytes; copies none on a CPU.

        ``beat`` is called for every piece, and may raise to end it.
        """
        whole = _Blocks()
        whole.feed(memoryview(self.layout.header))
        found = {}
        for name, tensor in zip(self.names, self.tensors, strict=True):
            own = xxhash.xxh3_128()
            for piece in self._pieces(tensor):
                beat()
                # The second one finds it in the processor's cache.
                whole.feed(piece)
                own.update(piece)
            found[name] = own.hexdigest()
        return ImageDigest(whole.checksums(), found)

    def copy_into(self, image: memoryview, beat: Callable[[], None]) -> None:
        """Write header and tensors to where they belong. Blocks. ``beat``: as for ``digest``."""
        image[: len(self.layout.header)] = self.layout.header
        for (spec, offset), tensor in zip(map(self.layout.find, self.names), self.tensors, strict=True):
            position = offset
            for piece in self._pieces(tensor):
                beat()
                target = (ctypes.c_ubyte * len(piece)).from_buffer(image, position)
                ctypes.memmove(target, (ctypes.c_ubyte * len(piece)).from_buffer(piece), len(piece))
                position += len(piece)
            assert position == offset + spec.nbytes

    def _pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        return pieces_of(tensor, self._ready)


def digest_of(image: memoryview, layout: Layout, beat: Callable[[], None]) -> ImageDigest:
    """The same of an image that is in memory in one piece. Blocks."""
    whole = _Blocks()
    whole.feed(image[: len(layout.header)])
    found = {}
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        own = xxhash.xxh3_128()
        for start in range(offset, offset + spec.nbytes, SLICE_BYTES):
            beat()
            piece = image[start : min(start + SLICE_BYTES, offset + spec.nbytes)]
            whole.feed(piece)
            own.update(piece)
        found[spec.name] = own.hexdigest()
    return ImageDigest(whole.checksums(), found)


class _Blocks:
    """Checksums per block of an image that arrives in pieces."""

    def __init__(self) -> None:
        self._size = 0
        self._blocks: list[str] = []
        self._open = xxhash.xxh3_128()

    def feed(self, piece: memoryview) -> None:
        while len(piece):
            room = BLOCK_BYTES - self._size % BLOCK_BYTES
            part, piece = piece[:room], piece[room:]
            self._open.update(part)
            self._size += len(part)
            if self._size % BLOCK_BYTES == 0:
                self._close()

    def _close(self) -> None:
        self._blocks.append(self._open.hexdigest())
        self._open = xxhash.xxh3_128()

    def checksums(self) -> Checksums:
        if self._size % BLOCK_BYTES:
            self._close()
        return Checksums(self._size, BLOCK_BYTES, tuple(self._blocks))


def _facts_of(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[int, int]]:
    return [(parameter.data_ptr(), parameter._version) for parameter in parameters]


def _held_ids(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(item) for optimizer in optimizers for group in optimizer.param_groups for item in group["params"]}


def _identity(tensor: torch.Tensor) -> Identity:
    return tensor.data_ptr(), tensor.nbytes, str(tensor.device), tensor.shape, tensor.dtype, tensor.stride()


def _storage(tensor: torch.Tensor) -> tuple[int, str]:
    return tensor.untyped_storage().data_ptr(), str(tensor.device)


def _is_eligible(parameter: torch.nn.Parameter) -> bool:
    return (
        # Subclasses (quantized, sharded) have memory of their own kind.
        type(parameter) is torch.nn.Parameter
        and parameter.layout is torch.strided
        and parameter.device.type in ("cpu", "cuda")
        and not parameter.is_inference()
        and is_storable(parameter.dtype)
        and not is_converted(parameter)
        and not parameter.is_conj()
        and not parameter.is_neg()
        and parameter.is_contiguous()
        and parameter.nbytes > 0
    )


def choose_frozen(
    named: Iterable[tuple[str, torch.Tensor]],
    source: StateSource,
    banned: Collection[str] = (),
    least_bytes: int = LEAST_BYTES,
) -> FrozenSet | None:
    """The immutable ones among the tensors of a state, ``None`` if they are fewer than ``least_bytes``.

    What shares memory with anything else of the state, or with what an optimizer holds, is not immutable; nor is what
    stands under a ``banned`` name.
    """
    optimizers = source.optimizers()
    held = _held_ids(optimizers)
    candidates: dict[Identity, list[torch.nn.Parameter]] = defaultdict(list)
    for parameter in source.frozen_tensors():
        if not parameter.requires_grad and id(parameter) not in held and _is_eligible(parameter):
            candidates[_identity(parameter)].append(parameter)
    if not candidates:
        return None
    others = [item for optimizer in optimizers for group in optimizer.param_groups for item in group["params"]]
    others += source.lazy_tensors()
    found: dict[Identity, list[str]] = defaultdict(list)
    for name, tensor in named:
        if name not in banned and not _is_odd(tensor) and _identity(tensor) in candidates:
            found[_identity(tensor)].append(name)
        else:
            others.append(tensor)
    busy = {_storage(tensor) for tensor in others if not _is_odd(tensor)}
    chosen = {
        min(names): (identity, sorted(names), candidates[identity])
        for identity, names in found.items()
        if _storage(candidates[identity][0]) not in busy
    }
    if sum(identity[1] for identity, _, _ in chosen.values()) < least_bytes:
        return None
    return _make(chosen)


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether its memory is of another kind: sparse, sharded, quantized, none."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return not plain or tensor.device.type == "meta"


def _make(chosen: dict[str, tuple[Identity, list[str], list[torch.nn.Parameter]]]) -> FrozenSet:
    # By name, so that every start of a run gives the same bytes.
    stored = {name: stored_form(chosen[name][2][0].detach()) for name in sorted(chosen)}
    aliases = {other: name for name in stored for other in chosen[name][1][1:]}
    specs = [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in stored.items()]
    layout = Layout.plan(specs, aliases)
    names = tuple(spec.name for spec in layout.specs)
    parameters = tuple((index, parameter) for index, name in enumerate(names) for parameter in chosen[name][2])
    kept = ((name, logical_name(chosen[name][0][4])) for name in names)
    devices = {tensor.device for tensor in stored.values() if tensor.device.type == "cuda"}
    return FrozenSet(
        names=names,
        aliases=aliases,
        layout=layout,
        logical={name: {"dtype": dtype} for name, dtype in kept if dtype is not None},
        tensors=tuple(stored[name] for name in names),
        parameters=parameters,
        identities=tuple(chosen[name][0] for name in names),
        _facts=_facts_of(parameter for _, parameter in parameters),
        _samples=samples_of([(name, stored[name]) for name in names]),
        # What wrote them runs before this on the compute stream.
        _ready=tuple(torch.cuda.current_stream(device).record_event() for device in sorted(devices, key=str)),
    )
