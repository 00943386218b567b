"""Tensors put together from the parts that the shards of several ranks hold. Needs no torch."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from lazysnap.errors import FormatError, StateError
from lazysnap.shard.layout import ITEM_BITS, TensorSpec
from lazysnap.shard.pieces import Cover, Extent, Overlap, Piece
from lazysnap.snapshots.reader import OpenShard, OpenSnapshot, StoredTensor

Box = Callable[[str, Extent], tuple[Extent, Extent]]
"""Returns offsets and shape of what is wanted of a tensor, from its name and its global shape."""


def whole_box(name: str, shape: Extent) -> tuple[Extent, Extent]:
    """A ``Box`` that is the whole tensor."""
    return (0,) * len(shape), shape


@dataclass(frozen=True)
class Tile:
    """A part of a wanted box that one shard holds."""

    stored: StoredTensor
    box: Overlap

    @property
    def offsets(self) -> Extent:
        """The place of its first element in the wanted box."""
        return tuple(part.start for part in self.box.target)


class JoinedTensor:
    """One tensor of all ranks, and the box of it that is wanted."""

    def __init__(self, name: str, first: StoredTensor, box: tuple[Extent, Extent]) -> None:
        """``first``: one of its parts, not added yet. Its dtype is that of all, and its memory order counts."""
        self.name = name
        self.first = first
        self.shape = first.extent[0]
        """The shape of the whole tensor."""
        self.box = box
        """Offsets and shape of what is wanted."""
        self._cover = Cover(*box)
        self._parts: dict[int, StoredTensor] = {}

    def add(self, rank: int, stored: StoredTensor) -> None:
        """Add the part of a rank. Raises: FormatError, if it does not fit the others."""
        shape, offsets = stored.extent
        first = self.first
        actual = (stored.spec.dtype, stored.logical, shape)
        expected = (first.spec.dtype, first.logical, self.shape)
        if actual != expected or len(stored.spec.shape) != len(first.spec.shape):
            raise FormatError(
                f"{stored.shard.where}: tensor {stored.name} is {_text(*actual)}, elsewhere {_text(*expected)}"
            )
        self._parts[rank] = stored
        self._cover.add(Piece(rank, offsets, stored.shape))

    @property
    def is_whole(self) -> bool:
        """True if every element that is wanted is in some part."""
        return not self._cover.missing

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for tied tensors of which the same box is wanted."""
        return (self.box, *(part.key for part in self._parts.values()))

    @property
    def tiles(self) -> list[Tile]:
        """Parts that do not overlap; together they are what is wanted."""
        return [Tile(self._parts[box.piece.rank], box) for box in self._cover.tiles]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element; complex numbers may be stored as two."""
        return ITEM_BITS[self.first.spec.dtype] // 8 * math.prod(self.first.spec.shape[len(self.shape) :])

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.item_bytes * math.prod(self.shape)

    def spec(self, name: str) -> TensorSpec:
        """Its entry in a safetensors file, as ``name``."""
        return TensorSpec(name, self.first.spec.dtype, (*self.shape, *self.first.spec.shape[len(self.shape) :]))

    def check(self) -> None:
        """Raises: FormatError, if a part is missing. No format notices that: it would leave garbage."""
        if not self.is_whole:
            total = math.prod(self.box[1])
            filled = total - self._cover.missing
            raise FormatError(
                f"tensor {self.name}: its pieces cover {filled} of {total} elements of {list(self.shape)}"
            )


def _text(dtype: str, logical: str | None, shape: Extent) -> str:
    return f"{logical or dtype} {list(shape)}"


class Assembly:
    """Tensors by their names in the state of one rank, from the shards added so far.

    A tensor that this rank holds alone comes from its own shard. Every other one is put together from the parts of all
    ranks, whatever their number and mesh were.
    """

    def __init__(self, own: int, box: Box = whole_box) -> None:
        """``own``: the rank whose state it is."""
        self._own = own
        self._box = box
        self._shards: list[OpenShard] = []
        self._tensors: dict[str, JoinedTensor] = {}
        self._missing: dict[str, None] = {}
        self._seen: set[str] = set()
        """Names of all tensors in the shards added so far, wanted or not."""

    @property
    def missing(self) -> Collection[str]:
        """Names of wanted tensors of which a part was in no shard so far."""
        return self._missing.keys()

    def add(self, shard: OpenShard) -> dict[str, StoredTensor]:
        """Add the shard of a rank; the own rank's first.

        Returns a part of each tensor, wanted or not, that was in no shard before.
        Raises: FormatError, if it does not fit others.
        """
        self._shards.append(shard)
        new: dict[str, StoredTensor] = {}
        for name in shard.names:
            stored = self._part_in(shard, name)
            if stored is not None and name not in self._seen:
                self._seen.add(name)
                new[name] = stored
            if stored is not None and name in self._missing:
                self._put(name, stored)
        return new

    def want(self, names: Iterable[str]) -> None:
        """Look for these tensors in all shards, and in those that are added later. Raises: FormatError."""
        for name in names:
            if name not in self._tensors:
                self._missing[name] = None
                for shard in self._shards:
                    if name in self._missing and (stored := self._part_in(shard, name)) is not None:
                        self._put(name, stored)

    def _part_in(self, shard: OpenShard, name: str) -> StoredTensor | None:
        """Return a tensor in a shard by one of its names; of other ranks only parts of shared ones."""
        stored = shard.find(name)
        return stored if stored is not None and (stored.is_scoped or shard.rank == self._own) else None

    def _put(self, name: str, stored: StoredTensor) -> None:
        tensor = self._tensors.get(name)
        if tensor is None:
            tensor = self._tensors[name] = JoinedTensor(name, stored, self._box(name, stored.extent[0]))
        tensor.add(stored.shard.rank, stored)
        if tensor.is_whole:
            del self._missing[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> JoinedTensor:
        """Return a tensor that was wanted. Raises: FormatError, if no shard has it, or parts are missing."""
        if name not in self._tensors:
            raise FormatError(f"no shard has the tensor {name!r}")
        self._tensors[name].check()
        return self._tensors[name]


class WholeSnapshot:
    """The tensors of an open snapshot by their names in the state of one rank."""

    def __init__(self, snapshot: OpenSnapshot, rank: int = 0) -> None:
        """``rank``: whose small state and own tensors are used.

        Raises: StateError, if the ranks number their parameters in different ways; FormatError.
        """
        self.snapshot = snapshot
        self.meta = snapshot.meta(rank)
        """The metadata of this rank."""
        first = snapshot.meta(0).parameters
        for other, shard in enumerate(snapshot.shards):
            if shard.meta.parameters != first:
                raise StateError(
                    f"{shard.where}: the optimizers of rank {other} hold other parameters than those of rank 0 "
                    "(pipeline parallelism?): their states have no distinct names; restore with as many ranks "
                    "as saved it, through the engine"
                )
        self._assembly = Assembly(rank)
        # This rank first: of equal parts the first one is read.
        for shard in (snapshot.shards[rank], *snapshot.shards[:rank], *snapshot.shards[rank + 1 :]):
            self._assembly.add(shard)

    def tensor(self, name: str) -> JoinedTensor:
        """Return a tensor. Raises: FormatError, if shards lack a part of it, or do not fit each other."""
        with self.snapshot.naming():
            self._assembly.want([name])
            return self._assembly.tensor(name)
