"""One snapshot that is open to be read: the headers of all its shards, and what of a tensor stands in which of them."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lazysnap.capture.dtypes import DTYPES, logical_facts
from lazysnap.dcp.finder import in_parallel
from lazysnap.errors import ShardCorrupt, StateError
from lazysnap.levels import SnapshotStore
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.shards import ShardPlace
from lazysnap.resolver import FrozenEntry, RestartPlan
from lazysnap.shard.layout import MAX_HEADER_BYTES, Layout
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.pieces import Extent, Piece, extent_of, tiles


@dataclass(frozen=True, eq=False)
class OpenShard:
    """One shard, or one image of immutable tensors, of which the header was read."""

    place: ShardPlace
    manifest: Manifest
    header: memoryview
    """Not yet compared with its checksum: that is done before any tensor is read from this shard."""
    layout: Layout

    @property
    def where(self) -> str:
        """The file, for messages."""
        return self.place.where


def open_shard(place: ShardPlace, manifest: Manifest) -> OpenShard:
    """Read the header of a shard. Blocks. Raises: ShardCorrupt, if it is not there or not whole; LevelError."""
    length = manifest.header_bytes
    if length > MAX_HEADER_BYTES + 8:
        raise ShardCorrupt(f"{place.where}: a header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
    try:
        size = place.storage.size(place.shard_path)
        if size != manifest.size_bytes:
            raise ShardCorrupt(f"{place.where}: {size} bytes, the manifest says {manifest.size_bytes}")
        header = map_anonymous(length)
        place.storage.read_into(place.shard_path, 0, header)
    except FileNotFoundError as error:
        lost = f"the shard of rank {manifest.meta.rank} is lost"
        raise ShardCorrupt(f"{place.where}: a manifest without its shard: {lost}") from error
    return OpenShard(place, manifest, header, manifest.layout(header, place.where))


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor in one shard."""

    shard: OpenShard
    name: str
    offset: int
    dtype: torch.dtype
    """As the program knows it; complex numbers stand as pairs, which are the same bytes."""
    shape: tuple[int, ...]

    @property
    def facts(self) -> Mapping[str, object]:
        """Its entry in the manifest."""
        found: Mapping[str, object] = self.shard.manifest.meta.tensors.get(self.name, {})
        return found

    @property
    def is_scoped(self) -> bool:
        """Whether it is a box of a tensor that belongs to all ranks, rather than a tensor of its rank."""
        return "scope" in self.facts

    def extent(self) -> tuple[Extent, Extent]:
        """Shape of the whole tensor, and where this box lies in it. Raises: ShardCorrupt."""
        if not self.is_scoped:
            return self.shape, (0,) * len(self.shape)
        return extent_of(dict(self.facts), self.shape, f"{self.shard.where}: tensor {self.name}")


@dataclass(frozen=True)
class WholeTensor:
    """One tensor over all shards."""

    dtype: torch.dtype
    shape: Extent
    pieces: list[Piece]
    """Boxes that fill it, each once."""
    stored: Mapping[tuple[int, str], Stored]
    """By rank and name of a piece."""


class OpenSnapshot:
    """The shards of all ranks, and the immutable tensors that they refer to."""

    def __init__(self, plan: RestartPlan, images: Sequence[tuple[OpenShard, ...]], own_rank: int) -> None:
        """``images``: for each rank its shard and what it refers to. ``own_rank``: whose tensors a rank-scoped one is.

        Raises: StateError, if the ranks number their parameters in different ways.
        """
        self.plan = plan
        self.own_rank = own_rank
        self._images = images
        self._wholes: dict[str, WholeTensor] = {}
        first = images[0][0].manifest.meta.parameters
        for rank, held in enumerate(images):
            if held[0].manifest.meta.parameters != first:
                raise StateError(
                    f"{held[0].where}: the optimizers of rank {rank} hold other parameters than those of rank 0 "
                    "(pipeline parallelism?): their states cannot be told apart by name; restore with as many ranks "
                    "as saved it, through the engine"
                )

    @property
    def own(self) -> Manifest:
        """The manifest whose small state is this rank's."""
        return self._images[self.own_rank][0].manifest

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Errors of what is done with its state name it."""
        try:
            yield
        except ShardCorrupt as error:
            if str(error).startswith(self.plan.level):
                raise
            raise ShardCorrupt(f"{self._where}: {error}") from error

    def facts(self, name: str) -> tuple[torch.dtype, Extent]:
        """Dtype and shape of a whole tensor. Raises: ShardCorrupt, if no shard has it."""
        stored = self._find(self.own_rank, name) or self._first_elsewhere.get(name)
        if stored is None:
            raise ShardCorrupt(f"{self._where}: no shard has the tensor {name!r}")
        return stored.dtype, stored.extent()[0]

    def whole(self, name: str) -> WholeTensor:
        """A tensor with all of its pieces. Raises: ShardCorrupt, if some of it is in no shard."""
        if name not in self._wholes:
            self._wholes[name] = self._put_together(name)
        return self._wholes[name]

    def _put_together(self, name: str) -> WholeTensor:
        dtype, shape = self.facts(name)
        own = self._find(self.own_rank, name)
        found = [(self.own_rank, own)] if own is not None and not own.is_scoped else self._boxes(name)
        pieces, stored = [], {}
        for rank, item in found:
            whole_shape, offsets = item.extent()
            if (item.dtype, whole_shape) != (dtype, shape):
                raise ShardCorrupt(
                    f"{item.shard.where}: tensor {name} is {item.dtype} {list(whole_shape)}, elsewhere {dtype} "
                    f"{list(shape)}"
                )
            pieces.append(Piece(rank, item.name, offsets, item.shape))
            stored[rank, item.name] = item
        return WholeTensor(dtype, shape, tiles(name, pieces, shape), stored)

    def _boxes(self, name: str) -> list[tuple[int, Stored]]:
        """The boxes of a tensor that all ranks hold part of, by the rank that holds them."""
        # Its own first: of equal boxes the first one is read.
        ranks = [self.own_rank, *(rank for rank in range(len(self._images)) if rank != self.own_rank)]
        held = [(rank, self._find(rank, name)) for rank in ranks]
        return [(rank, stored) for rank, stored in held if stored is not None and stored.is_scoped]

    def _find(self, rank: int, name: str) -> Stored | None:
        """The tensor as ``rank`` stored it; it may have stored it under the name of one that it is tied to."""
        for shard in self._images[rank]:
            aliases = shard.manifest.meta.aliases
            if name in aliases or name in shard.layout:
                return _stored(shard, aliases.get(name, name))
        return None

    @cached_property
    def _first_elsewhere(self) -> dict[str, Stored]:
        """By name, for names that this rank stored nothing of: any box of it."""
        found: dict[str, Stored] = {}
        for shard in (shard for held in self._images for shard in held):
            for name in [*(spec.name for spec in shard.layout.specs), *shard.manifest.meta.aliases]:
                if name not in found:
                    stored = _stored(shard, shard.manifest.meta.aliases.get(name, name))
                    if stored.is_scoped:
                        found[name] = stored
        return found

    @property
    def _where(self) -> str:
        return f"{self.plan.level}: step {self.plan.step}"


def _stored(shard: OpenShard, name: str) -> Stored:
    if name not in shard.layout:
        raise ShardCorrupt(f"{shard.where}: the manifest refers to a tensor {name!r}, the shard has none of that name")
    spec, offset = shard.layout.find(name)
    facts = shard.manifest.meta.tensors.get(name, {})
    if not isinstance(facts, dict):
        raise ShardCorrupt(f"{shard.where}: tensor {name}: expected an object, the manifest says {facts!r:.50}")
    logical = facts.get("dtype")
    if spec.dtype not in DTYPES or not isinstance(logical, (str, type(None))):
        raise ShardCorrupt(f"{shard.where}: tensor {name}: torch has no dtype for {spec.dtype} {logical or ''!r:.50}")
    try:
        dtype, shape = logical_facts(DTYPES[spec.dtype], spec.shape, logical)
    except ValueError as error:
        raise ShardCorrupt(f"{shard.where}: tensor {name}: {error}") from error
    return Stored(shard, name, offset, dtype, shape)


def open_snapshot(
    store: SnapshotStore, plan: RestartPlan, manifests: Sequence[Manifest], own_rank: int
) -> OpenSnapshot:
    """Read the headers of all shards, and manifests and headers of the immutable tensors that they refer to.

    Blocks. Raises: ShardCorrupt, naming a shard that is lost or damaged; LevelError; FileNotFoundError.
    """
    images = {digest: offers[0] for digest, offers in plan.frozen.items()}

    def open_frozen(entry: FrozenEntry) -> OpenShard:
        manifest = store.read_manifest(entry)
        return open_shard(store.place(entry), manifest)

    def open_own(pair: tuple[ShardPlace, Manifest]) -> OpenShard:
        return open_shard(*pair)

    entries = [offers[0] for offers in plan.sources]
    places = [store.place(entry) for entry in entries]
    shards = in_parallel(open_own, list(zip(places, manifests, strict=True)))
    frozen = dict(zip(images, in_parallel(open_frozen, list(images.values())), strict=True))
    held = [
        (shard,) if entry.frozen is None else (shard, frozen[entry.frozen])
        for entry, shard in zip(entries, shards, strict=True)
    ]
    _check_apart(held)
    return OpenSnapshot(plan, held, own_rank)


def _check_apart(images: Sequence[Sequence[OpenShard]]) -> None:
    """Raises: ShardCorrupt, if a name stands for tensors in a shard and in what it refers to."""
    for shards in images:
        seen: defaultdict[str, int] = defaultdict(int)
        for shard in shards if len(shards) > 1 else ():
            for name in [*(spec.name for spec in shard.layout.specs), *shard.manifest.meta.aliases]:
                seen[name] += 1
                if seen[name] > 1:
                    raise ShardCorrupt(
                        f"{shard.where}: tensor {name!r} is in the shard and among the immutable tensors"
                    )
