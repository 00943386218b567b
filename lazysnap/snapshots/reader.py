"""The reader of a snapshot: headers of its shards, small state, and the place of each tensor. Needs no torch."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from lazysnap.errors import FormatError, SnapshotNotFound
from lazysnap.levels.blocks import Blocks, FileBlocks, WantedBytes, fill
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import ByteCounter, header_of, no_progress
from lazysnap.levels.storage import Storage
from lazysnap.resolver import RestartPlan
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Shard
from lazysnap.shard.pieces import Extent, extent_of
from lazysnap.shard.strides import Order, is_order
from lazysnap.snapshots.catalogue import Catalogue, in_parallel

_ATTEMPTS = 10
"""Maximum listings of a level, if listed files are deleted before they are opened."""
MOST_OPEN = 128
"""Maximum open files of a snapshot. Each takes two descriptors of a process, which usually has 1,024."""

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class OpenShard:
    """One shard whose header was read."""

    meta: CaptureMeta
    layout: Layout
    blocks: Blocks
    offset: int = 0
    """Its offset in these blocks."""
    unverified: memoryview | None = None
    """The header, if it was not verified yet: ``read`` does that."""

    @property
    def where(self) -> str:
        """The shard, for messages."""
        return self.blocks.where

    @property
    def names(self) -> list[str]:
        """All names of its tensors, the further ones of tied tensors too."""
        return [*(spec.name for spec in self.layout.specs), *self.meta.aliases]

    def find(self, name: str) -> "StoredTensor | None":
        """Return a tensor by one of its names, as a tied tensor has several; ``None``, if it is not in this shard."""
        if name in self.meta.aliases or name in self.layout:
            return self.stored(self.meta.aliases.get(name, name))
        return None

    def stored(self, name: str) -> "StoredTensor":
        """Return a tensor by its first name. Raises: FormatError, if there is none, or the manifest's entry is bad."""
        if name not in self.layout:
            raise FormatError(
                f"{self.where}: the manifest refers to a tensor {name!r}, the shard has none of that name"
            )
        spec, offset = self.layout.find(name)
        facts = self.meta.tensors.get(name, {})
        logical = facts.get("dtype")
        if not isinstance(logical, (str, type(None))):
            raise FormatError(f"{self.where}: tensor {name}: bad dtype {logical!r:.50}")
        tensor = StoredTensor(self, spec, self.offset + offset, facts)
        if "order" in facts and not is_order(facts["order"], len(tensor.shape)):
            raise FormatError(
                f"{self.where}: tensor {name}: order must be the numbers of its {len(tensor.shape)} dimensions, each "
                f"once, the manifest says {facts['order']!r:.100}"
            )
        return tensor


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor in one shard."""

    shard: OpenShard
    spec: TensorSpec
    offset: int
    """The place in the blocks of the shard."""
    facts: Mapping[str, object]
    """Its entry in the manifest."""

    @property
    def key(self) -> tuple[int, str]:
        """Equal for tied tensors."""
        return id(self.shard), self.spec.name

    @property
    def logical(self) -> str | None:
        """Its dtype in the program, if the shard stores another one."""
        logical = self.facts.get("dtype")
        if logical is None:
            return None
        return str(logical)

    @property
    def order(self) -> Order | None:
        """Memory order of the tensor in the program; ``None``: row-major. Its bytes in the shard are always so."""
        order = self.facts.get("order")
        if not isinstance(order, list):
            return None
        return tuple(order)

    @property
    def is_scoped(self) -> bool:
        """True if it is a box of a tensor of all ranks, rather than a tensor of one rank."""
        return "scope" in self.facts

    @property
    def shape(self) -> Extent:
        """The shape in the program: complex numbers may be stored as pairs of real ones."""
        if self.logical is not None and self.logical.startswith("complex"):
            return self.spec.shape[:-1]
        return self.spec.shape

    @cached_property
    def extent(self) -> tuple[Extent, Extent]:
        """Shape of the whole tensor, and the offsets of this box in it. Raises: FormatError."""
        if not self.is_scoped:
            return self.shape, (0,) * len(self.shape)
        return extent_of(dict(self.facts), self.shape, f"{self.shard.where}: tensor {self.spec.name}")


class OpenSnapshot:
    """The shards of all ranks."""

    def __init__(self, plan: RestartPlan, shards: Sequence[OpenShard]) -> None:
        self.plan = plan
        self.shards = shards
        """The shards, in the order of the ranks."""

    def close(self) -> None:
        """Close its files. A later read opens them again."""
        for shard in self.shards:
            shard.blocks.close()

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Add level and step to errors in its small state."""
        try:
            yield
        except FormatError as error:
            if str(error).startswith(self.plan.level):
                raise
            raise FormatError(f"{self.plan.level}: step {self.plan.step}: {error}") from error


def open_shard(meta: CaptureMeta, blocks: Blocks, offset: int, size_bytes: int) -> OpenShard:
    """Read the header of the shard that begins at an offset, and verify it. Closes the file, unless it stays open.

    Blocks: reads the blocks that have the header. Raises: FormatError; FileNotFoundError; LevelError; KeeperError.
    """
    header = header_of(blocks, offset, size_bytes)
    blocks.release()
    return OpenShard(meta, Layout.parse(header, size_bytes, blocks.where), blocks, offset)


def _open_unverified(shard: Shard, blocks: FileBlocks) -> OpenShard:
    """As ``open_shard``, but read the header alone; ``read`` verifies it."""
    header = blocks.unverified(shard)
    blocks.release()
    return OpenShard(shard.meta, shard.layout(header, blocks.where), blocks, shard.offset, header)


def open_snapshot(catalogue: Catalogue, plan: RestartPlan, *, verify: bool = False) -> OpenSnapshot:
    """Read the headers of all shards. ``verify``: verify them now, not in ``read``, and let no file stay open.

    Otherwise files stay open until the snapshot is closed (of very many the first ones): where the place allows, they
    can be read even if retention deletes them meanwhile. ``plan``: of this catalogue.
    Blocks. Raises: FormatError, naming a shard that is damaged; LevelError; FileNotFoundError.
    """
    ranks: dict[FilePlace, list[int]] = defaultdict(list)
    files: dict[FilePlace, FileBlocks] = {}
    for entry, manifest in catalogue.shards(plan):
        place = FilePlace.of(catalogue.storage, entry)
        ranks[place].append(entry.rank)
        if place not in files:
            files[place] = FileBlocks(place, manifest, stays_open=len(files) < MOST_OPEN)
    shards: dict[int, OpenShard] = {}

    def open_file(place: FilePlace) -> None:
        blocks = files[place]
        for rank in ranks[place]:
            shard = blocks.manifest.of(rank)
            if verify:
                shards[rank] = open_shard(shard.meta, blocks, shard.offset, shard.size_bytes)
            else:
                shards[rank] = _open_unverified(shard, blocks)
        if verify:
            blocks.close()  # otherwise it keeps a block

    try:
        in_parallel(open_file, list(files))
    except BaseException:
        for blocks in files.values():
            blocks.close()
        raise
    return OpenSnapshot(plan, [shards[rank] for rank in sorted(shards)])


def retry_if_deleted(storage: Storage, attempt: Callable[[Catalogue], Result]) -> Result:
    """Return ``attempt(catalogue)``, with a new catalogue if a listed file vanished.

    Retention of a running training deletes a snapshot only after a newer one is complete, which a new listing contains.
    Blocks. Raises: SnapshotNotFound, if files vanished in every attempt; what ``attempt`` raises, a FileNotFoundError
    after two equal listings.
    """
    previous_listing = None
    for _ in range(_ATTEMPTS):
        catalogue = Catalogue(storage)
        try:
            return attempt(catalogue)
        except FileNotFoundError as error:  # SnapshotNotFound is a FileNotFoundError, too
            if catalogue.listed == previous_listing:
                raise
            previous_listing = catalogue.listed
            last_error = error
    raise SnapshotNotFound(
        f"{storage.url}: {_ATTEMPTS} times a snapshot was deleted while it was read; raise keep_last of the training "
        "that writes there, or give a snapshot a name with engine.keep() and read that"
    ) from last_error


def read(jobs: Mapping[OpenShard, Sequence[WantedBytes]], *, progress: ByteCounter = no_progress) -> None:
    """Read these bytes of shards as ``blocks.fill``, and verify the remaining headers."""
    jobs_of_blocks: dict[Blocks, list[WantedBytes]] = defaultdict(list)
    for shard, parts in jobs.items():
        if shard.unverified is not None:
            jobs_of_blocks[shard.blocks].append(_header_check(shard, shard.unverified))
        jobs_of_blocks[shard.blocks] += parts
    fill(jobs_of_blocks, progress=progress)


def _header_check(shard: OpenShard, header: memoryview) -> WantedBytes:
    """Return a read that compares the unverified header with the verified blocks."""

    def compare(offset: int, data: memoryview) -> None:
        if header[offset : offset + len(data)] != data:
            raise FormatError(f"{shard.where}: the header changed while it was read")

    return WantedBytes(shard.offset, shard.offset + len(header), compare)
