"""The reader of a snapshot: headers of its shards, small state, and the place of each tensor. Needs no torch."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from lazysnap.errors import FormatError, SnapshotNotFound
from lazysnap.levels import SnapshotStore
from lazysnap.levels.blocks import Blocks, FileBlocks, WantedBytes, fill
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import Progress, no_progress
from lazysnap.resolver import RestartPlan
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.pieces import Extent, extent_of
from lazysnap.shard.strides import Order, is_order
from lazysnap.snapshots.catalogue import Catalogue, in_parallel

_LOOKS = 10
"""Listings of a level before giving up, if listed files are deleted before they are open."""
_MOST_OPEN = 128
"""Files of a snapshot that stay open. Each takes two of a process's descriptors, of which 1,024 are usual."""

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class OpenShard:
    """One shard whose header was read."""

    rank: int
    meta: CaptureMeta
    layout: Layout
    blocks: Blocks
    offset: int = 0
    """The place in these blocks where it begins."""
    unverified: memoryview | None = None
    """The header, if it was not compared with its checksum yet: ``read`` does that."""

    @property
    def where(self) -> str:
        """The shard, for messages."""
        return self.blocks.where

    @property
    def names(self) -> list[str]:
        """All names of its tensors, the further ones of tied tensors too."""
        return [*(spec.name for spec in self.layout.specs), *self.meta.aliases]

    def find(self, name: str) -> "StoredTensor | None":
        """A tensor by one of its names, which may be a further name of a tied one; ``None``, if it is not here."""
        if name in self.meta.aliases or name in self.layout:
            return self.stored(self.meta.aliases.get(name, name))
        return None

    def stored(self, name: str) -> "StoredTensor":
        """One of its tensors. Raises: FormatError, if there is none, or if its entry in the manifest is wrong."""
        if name not in self.layout:
            raise FormatError(
                f"{self.where}: the manifest refers to a tensor {name!r}, the shard has none of that name"
            )
        spec, offset = self.layout.find(name)
        facts = self.meta.tensors.get(name, {})
        if not isinstance(facts, dict):
            raise FormatError(f"{self.where}: tensor {name}: expected an object, the manifest says {facts!r:.50}")
        logical = facts.get("dtype")
        if not isinstance(logical, (str, type(None))):
            raise FormatError(f"{self.where}: tensor {name}: bad dtype {logical!r:.50}")
        found = StoredTensor(self, name, spec, self.offset + offset, facts)
        if "order" in facts and not is_order(facts["order"], len(found.shape)):
            raise FormatError(
                f"{self.where}: tensor {name}: order must be the numbers of its {len(found.shape)} dimensions, each "
                f"once, the manifest says {facts['order']!r:.100}"
            )
        return found


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor in one shard."""

    shard: OpenShard
    name: str
    spec: TensorSpec
    offset: int
    """The place in the blocks of the shard."""
    facts: Mapping[str, object]
    """Its entry in the manifest."""

    @property
    def key(self) -> tuple[int, str]:
        """Equal for tied tensors."""
        return id(self.shard), self.name

    @property
    def logical(self) -> str | None:
        """Its dtype in the program, if the shard stores another one."""
        logical = self.facts.get("dtype")
        return str(logical) if logical is not None else None

    @property
    def order(self) -> Order | None:
        """Memory order of the tensor in the program; ``None``: row-major. Its bytes in the shard are always so."""
        order = self.facts.get("order")
        return tuple(order) if isinstance(order, list) else None

    @property
    def is_scoped(self) -> bool:
        """True if it is a box of a tensor of all ranks, rather than a tensor of one rank."""
        return "scope" in self.facts

    @property
    def shape(self) -> Extent:
        """The shape in the program: complex numbers may be stored as pairs of real ones."""
        is_pairs = self.logical is not None and self.logical.startswith("complex")
        return self.spec.shape[:-1] if is_pairs else self.spec.shape

    @cached_property
    def extent(self) -> tuple[Extent, Extent]:
        """Shape of the whole tensor, and where this box lies in it. Raises: FormatError."""
        if not self.is_scoped:
            return self.shape, (0,) * len(self.shape)
        return extent_of(dict(self.facts), self.shape, f"{self.shard.where}: tensor {self.name}")


class OpenSnapshot:
    """The shards of all ranks."""

    def __init__(self, plan: RestartPlan, shards: Sequence[OpenShard]) -> None:
        self.plan = plan
        self.shards = shards
        """By rank."""

    def meta(self, rank: int) -> CaptureMeta:
        """The metadata of a rank, small state included."""
        return self.shards[rank].meta

    def close(self) -> None:
        """Close its files. A later read opens them again."""
        for blocks in {shard.blocks for shard in self.shards}:
            blocks.close()

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Add level and step to errors in its small state."""
        try:
            yield
        except FormatError as error:
            if str(error).startswith(self.plan.level):
                raise
            raise FormatError(f"{self.plan.level}: step {self.plan.step}: {error}") from error


def open_shard(rank: int, blocks: FileBlocks, *, verify: bool) -> OpenShard:
    """Read the header of a rank's shard, and compare it with its checksum: now (``verify``), or in ``read``.

    ``blocks``: of the file, which stays open.
    Blocks: reads the header alone, or with ``verify`` its blocks. Raises: FormatError; FileNotFoundError;
    LevelError.
    """
    shard = blocks.manifest.of(rank)
    header = blocks.header(shard) if verify else blocks.unverified(shard)
    layout = shard.layout(header, blocks.where)
    return OpenShard(rank, shard.meta, layout, blocks, shard.offset, None if verify else header)


def open_snapshot(catalogue: Catalogue, plan: RestartPlan, *, verify: bool = False) -> OpenSnapshot:
    """Read the headers of all shards; ``verify``: as ``open_shard``.

    The files stay open until the snapshot is closed (of very many the first ones): where the place allows, they can be
    read even if retention deletes them meanwhile. ``plan``: of this catalogue.
    Blocks. Raises: FormatError, naming a shard that is damaged; LevelError; FileNotFoundError.
    """
    ranks = catalogue.shards(plan)
    wanted: dict[FilePlace, list[int]] = defaultdict(list)
    files: dict[FilePlace, FileBlocks] = {}
    for entry, manifest in ranks:
        place = catalogue.store.place(entry)
        wanted[place].append(entry.rank)
        files.setdefault(place, FileBlocks(place, manifest, stays_open=len(files) < _MOST_OPEN))

    def opened(place: FilePlace) -> dict[int, OpenShard]:
        """The wanted shards of one file, by rank."""
        blocks = files[place]
        shards = {rank: open_shard(rank, blocks, verify=verify) for rank in wanted[place]}
        blocks.release()
        return shards

    try:
        of_files = dict(zip(files, in_parallel(opened, list(files)), strict=True))
    except BaseException:
        for blocks in files.values():
            blocks.close()
        raise
    shards = [of_files[catalogue.store.place(entry)][entry.rank] for entry, _ in ranks]
    return OpenSnapshot(plan, shards)


def look_again(store: SnapshotStore, attempt: Callable[[Catalogue], Result]) -> Result:
    """Return ``attempt(catalogue)``; with a new catalogue, if a file vanished since it was listed.

    Retention of a running training deletes a snapshot only after a newer one is complete: a new listing has that one.
    Blocks. Raises: SnapshotNotFound, if files vanished in every look; what ``attempt`` raises, a FileNotFoundError
    after two equal listings.
    """
    before = None
    for _ in range(_LOOKS):
        catalogue = Catalogue(store)
        try:
            return attempt(catalogue)
        except FileNotFoundError as error:  # SnapshotNotFound is one, too
            if catalogue.listed == before:
                raise
            before, last = catalogue.listed, error
    raise SnapshotNotFound(
        f"{store.url}: {_LOOKS} times a snapshot was deleted while it was read; raise keep_last of the training that "
        "writes there, or give a snapshot a name with engine.keep() and read that"
    ) from last


def read(jobs: Mapping[OpenShard, Sequence[WantedBytes]], *, progress: Progress = no_progress) -> None:
    """Like ``blocks.fill``; also compares headers that were not compared yet."""
    wanted: dict[Blocks, list[WantedBytes]] = {}
    for shard, parts in jobs.items():
        header = [] if shard.unverified is None else [_compared(shard, shard.unverified)]
        wanted[shard.blocks] = [*wanted.get(shard.blocks, ()), *header, *parts]
    fill(wanted, progress=progress)


def _compared(shard: OpenShard, header: memoryview) -> WantedBytes:
    """Compare the header that was read first with the verified blocks."""

    def put(at: int, data: memoryview) -> None:
        if header[at : at + len(data)] != data:
            raise FormatError(f"{shard.where}: the header changed while it was read")

    return WantedBytes(shard.offset, shard.offset + len(header), put)
