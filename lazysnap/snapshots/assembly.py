"""Assembles tensors from their parts in the shards of several ranks. Needs no torch."""

import math
from collections.abc import Callable, Collection, Iterable

from lazysnap.errors import FormatError, StateError
from lazysnap.shard.layout import ITEM_BITS, TensorSpec
from lazysnap.shard.pieces import Cover, Extent, Overlap, Piece
from lazysnap.snapshots.reader import OpenShard, OpenSnapshot, StoredTensor

Box = Callable[[str, Extent], tuple[Extent, Extent]]
"""Returns offsets and shape of the wanted box of a tensor, from its name and its global shape."""


def whole_box(name: str, shape: Extent) -> tuple[Extent, Extent]:
    """Return the whole tensor as its wanted box: a ``Box``."""
    return (0,) * len(shape), shape


class JoinedTensor:
    """A tensor of all ranks, and the wanted box of it."""

    def __init__(self, name: str, first: StoredTensor, box: tuple[Extent, Extent]) -> None:
        """``first``: a part of the tensor, not added yet. All parts have its dtype, and its memory order counts."""
        self.name = name
        self.first = first
        self.shape = first.extent[0]
        """The shape of the whole tensor."""
        self.box = box
        """Offsets and shape of the wanted box."""
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
                f"{stored.shard.where}: tensor {stored.spec.name} is {_text(*actual)}, elsewhere {_text(*expected)}"
            )
        self._parts[rank] = stored
        self._cover.add(Piece(rank, offsets, stored.shape))

    @property
    def is_whole(self) -> bool:
        """True if every element of the wanted box is in some part."""
        return not self._cover.missing

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for tied tensors with the same wanted box."""
        return (self.box, *(part.key for part in self._parts.values()))

    @property
    def tiles(self) -> list[tuple[StoredTensor, Overlap]]:
        """Return non-overlapping parts, each with the used range; together they are the wanted box."""
        return [(self._parts[overlap.piece.rank], overlap) for overlap in self._cover.tiles]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element; complex numbers may be stored as two."""
        return ITEM_BITS[self.first.spec.dtype] // 8 * math.prod(self._item_shape)

    @property
    def _item_shape(self) -> Extent:
        """Dimensions of one element in the file: ``(2,)`` for a complex number that is stored as two, else empty."""
        return self.first.spec.shape[len(self.shape) :]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.item_bytes * math.prod(self.shape)

    def spec(self, name: str) -> TensorSpec:
        """Return its entry in a safetensors file, as ``name``."""
        return TensorSpec(name, self.first.spec.dtype, (*self.shape, *self._item_shape))

    def check(self) -> None:
        """Check that no part is missing, which would leave garbage without an error. Raises: FormatError."""
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

    A tensor that only this rank holds comes from its own shard. Every other one is assembled from the parts of all
    ranks, for any number of ranks and mesh.
    """

    def __init__(self, rank: int, box: Box = whole_box) -> None:
        """``rank``: the rank whose state it is."""
        self._rank = rank
        self._box = box
        self._shards: list[OpenShard] = []
        self._tensors: dict[str, JoinedTensor] = {}
        self._missing: dict[str, None] = {}
        self._seen: set[str] = set()
        """Names of all tensors in the shards added so far, requested or not."""

    @property
    def missing(self) -> Collection[str]:
        """Names of requested tensors that are not whole yet."""
        return self._missing.keys()

    def add(self, shard: OpenShard) -> dict[str, StoredTensor]:
        """Add the shard of a rank; that of the rank whose state it is comes first.

        Returns: a part of each tensor, requested or not, that was in no shard before.
        Raises: FormatError, if it does not fit others.
        """
        self._shards.append(shard)
        new: dict[str, StoredTensor] = {}
        for name in shard.names:
            stored = self._part_in(shard, name)
            if stored is None:
                continue
            if name not in self._seen:
                self._seen.add(name)
                new[name] = stored
            if name in self._missing:
                self._put(name, stored)
        return new

    def request(self, names: Iterable[str]) -> None:
        """Request these tensors from all shards, also from shards that are added later. Raises: FormatError."""
        for name in names:
            if name not in self._tensors:
                self._missing[name] = None
                self._search(name)

    def _search(self, name: str) -> None:
        """Take the parts of a missing tensor from the shards, until it is whole."""
        for shard in self._shards:
            stored = self._part_in(shard, name)
            if stored is not None:
                self._put(name, stored)
            if name not in self._missing:
                return

    def _part_in(self, shard: OpenShard, name: str) -> StoredTensor | None:
        """Return a tensor in a shard by one of its names; of other ranks only parts of shared ones."""
        stored = shard.find(name)
        if stored is not None and not stored.is_scoped and shard.meta.rank != self._rank:
            return None
        return stored

    def _put(self, name: str, stored: StoredTensor) -> None:
        """Add a part to a tensor that is missing."""
        if name not in self._tensors:
            self._tensors[name] = JoinedTensor(name, stored, self._box(name, stored.extent[0]))
        tensor = self._tensors[name]
        tensor.add(stored.shard.meta.rank, stored)
        if tensor.is_whole:
            del self._missing[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> JoinedTensor:
        """Return a tensor that was requested. Raises: FormatError, if no shard has it, or parts are missing."""
        if name not in self._tensors:
            raise FormatError(f"no shard has the tensor {name!r}")
        self._tensors[name].check()
        return self._tensors[name]


class WholeSnapshot:
    """The tensors of an open snapshot by their names in the state of one rank."""

    def __init__(self, snapshot: OpenSnapshot, rank: int = 0) -> None:
        """``rank``: the rank whose small state and own tensors are used.

        Raises: StateError, if the ranks number their parameters in different ways; FormatError.
        """
        self.snapshot = snapshot
        self.meta = snapshot.shards[rank].meta
        """The metadata of this rank."""
        parameters = snapshot.shards[0].meta.parameters
        for shard_rank, shard in enumerate(snapshot.shards):
            if shard.meta.parameters != parameters:
                raise StateError(
                    f"{shard.where}: the optimizers of rank {shard_rank} hold other parameters than those of rank 0 "
                    "(pipeline parallelism?): their states have no distinct names; restore with as many ranks "
                    "as saved it, through the engine"
                )
        self._assembly = Assembly(rank)
        # This rank first, because of equal parts the first is read.
        for shard in (snapshot.shards[rank], *snapshot.shards[:rank], *snapshot.shards[rank + 1 :]):
            self._assembly.add(shard)

    def tensor(self, name: str) -> JoinedTensor:
        """Return a tensor. Raises: FormatError, if shards lack a part of it, or do not fit each other."""
        with self.snapshot.naming():
            self._assembly.request([name])
            return self._assembly.tensor(name)
