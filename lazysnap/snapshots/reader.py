"""The reader of a snapshot: headers of its shards, small state, and the place of each tensor. Needs no torch."""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lazysnap.errors import FormatError, ShardCorrupt, SnapshotNotFound
from lazysnap.levels.blocks import Blocks, FileBlocks, Wanted, fill
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import map_anonymous
from lazysnap.resolver import Entry, FrozenEntry, RestartPlan
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.pieces import Extent, extent_of
from lazysnap.snapshots.catalogue import Catalogue, in_parallel

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class OpenShard:
    """One shard, or the frozen tensors, whose header was read."""

    rank: int
    """The rank that wrote it. Frozen tensors serve all ranks."""
    meta: CaptureMeta
    layout: Layout
    blocks: Blocks
    offset: int = 0
    """Where it begins in these blocks."""
    unverified: memoryview | None = None
    """The header, if it was not compared with its checksum yet: ``read`` does that."""

    @property
    def where(self) -> str:
        """The shard, for messages."""
        return self.blocks.where

    def stored(self, name: str) -> "Stored":
        """One of its tensors. Raises: ShardCorrupt, if there is none, or if its entry in the manifest is wrong."""
        if name not in self.layout:
            raise ShardCorrupt(
                f"{self.where}: the manifest refers to a tensor {name!r}, the shard has none of that name"
            )
        spec, offset = self.layout.find(name)
        facts = self.meta.tensors.get(name, {})
        if not isinstance(facts, dict):
            raise ShardCorrupt(f"{self.where}: tensor {name}: expected an object, the manifest says {facts!r:.50}")
        logical = facts.get("dtype")
        if not isinstance(logical, (str, type(None))):
            raise ShardCorrupt(f"{self.where}: tensor {name}: bad dtype {logical!r:.50}")
        return Stored(self, name, spec, self.offset + offset, facts)


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor in one shard."""

    shard: OpenShard
    name: str
    spec: TensorSpec
    offset: int
    """In the blocks of the shard."""
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
    def is_scoped(self) -> bool:
        """Whether it is a box of a tensor of all ranks, rather than a tensor of one rank."""
        return "scope" in self.facts

    @property
    def shape(self) -> Extent:
        """In the program: complex numbers may be stored as pairs of real ones."""
        is_pairs = self.logical is not None and self.logical.startswith("complex")
        return self.spec.shape[:-1] if is_pairs else self.spec.shape

    def extent(self) -> tuple[Extent, Extent]:
        """Shape of the whole tensor, and where this box lies in it. Raises: ShardCorrupt."""
        if not self.is_scoped:
            return self.shape, (0,) * len(self.shape)
        return extent_of(dict(self.facts), self.shape, f"{self.shard.where}: tensor {self.name}")


class OpenSnapshot:
    """The shards of all ranks, each with the frozen tensors that it refers to."""

    def __init__(
        self, plan: RestartPlan, ranks: Sequence[tuple[OpenShard, ...]], places: Sequence[FilePlace] = ()
    ) -> None:
        """``places``: of the shards, for leases while they are read."""
        self.plan = plan
        self.ranks = ranks
        # One lease for each directory protects the whole snapshot.
        self._leased = {place.directory: place for place in places}.values()

    def meta(self, rank: int) -> CaptureMeta:
        """The metadata of a rank, small state included."""
        return self.ranks[rank][0].meta

    def find(self, rank: int, name: str) -> Stored | None:
        """A tensor of a rank, which may be stored under the name of a tied tensor; ``None``, if the rank has none."""
        for shard in self.ranks[rank]:
            if name in shard.meta.aliases or name in shard.layout:
                return shard.stored(shard.meta.aliases.get(name, name))
        return None

    @contextlib.contextmanager
    def leased(self) -> Iterator[None]:
        """Hold leases, so that retention does not delete the snapshot."""
        with contextlib.ExitStack() as stack:
            for place in self._leased:
                stack.enter_context(place.storage.lease(place.file_path))
            yield

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Add level and step to errors in its small state."""
        try:
            yield
        except ShardCorrupt as error:
            if str(error).startswith(self.plan.level):
                raise
            raise ShardCorrupt(f"{self.plan.level}: step {self.plan.step}: {error}") from error


def open_shard(place: FilePlace, manifest: Manifest, rank: int, *, verify: bool) -> OpenShard:
    """Read the header of a rank's shard, and compare it with its checksum: now (``verify``), or in ``read``.

    Blocks: reads the header alone, or with ``verify`` its blocks. Raises: ShardCorrupt; FileNotFoundError;
    LevelError.
    """
    shard, blocks = manifest.of(rank), FileBlocks(place, manifest)
    try:
        if verify:
            header = blocks.header(shard)
        else:
            header = map_anonymous(shard.header_bytes)
            place.storage.read_into(place.file_path, shard.offset, header)
        layout = shard.layout(header, place.where)
    except BaseException:
        blocks.close()
        raise
    return OpenShard(rank, shard.meta, layout, blocks, shard.offset, None if verify else header)


def open_snapshot(catalogue: Catalogue, plan: RestartPlan, *, verify: bool = False) -> OpenSnapshot:
    """Read the headers of all shards, and of the frozen tensors that they refer to; ``verify``: as ``open_shard``.

    ``plan``: of this catalogue. Blocks. Raises: ShardCorrupt, naming a shard that is damaged; LevelError;
    FileNotFoundError.
    """
    ranks, found = catalogue.shards(plan), catalogue.frozen(plan)
    entries = [entry for entry, _ in ranks]
    all_of_them: list[tuple[Entry | FrozenEntry, Manifest]] = [*ranks, *found]
    places = [catalogue.store.place(entry) for entry, _ in all_of_them]

    def opened(one: tuple[Entry | FrozenEntry, Manifest]) -> OpenShard:
        rank = one[0].rank if isinstance(one[0], Entry) else 0
        return open_shard(catalogue.store.place(one[0]), one[1], rank, verify=verify)

    shards = in_parallel(opened, all_of_them)
    frozen = {one.digest: shard for (one, _), shard in zip(found, shards[len(entries) :], strict=True)}
    opens = [
        (shard,) if entry.frozen is None else (shard, frozen[entry.frozen])
        for entry, shard in zip(entries, shards, strict=False)
    ]
    for held in opens:
        _check_apart(held)
    return OpenSnapshot(plan, opens, places)


def open_best(
    catalogue: Catalogue,
    plans: Iterable[RestartPlan],
    use: Callable[[OpenSnapshot], Result],
    what: str,
    *,
    is_strict: bool,
) -> Result:
    """Apply ``use`` to the first of these snapshots that can be opened and used; warn of those that cannot.

    ``what``: what was asked for, for the message. Blocks. Raises: SnapshotNotFound, if none can be used; LevelError;
    with ``is_strict`` also ShardCorrupt, for the first snapshot.
    """
    skipped: list[str] = []
    for plan in plans:
        try:
            result = use(open_snapshot(catalogue, plan))
        except (FormatError, FileNotFoundError) as error:
            if not is_strict:
                skipped.append(str(error))
            elif isinstance(error, FileNotFoundError):
                raise SnapshotNotFound(f"{catalogue.store.url}: a file of snapshot {what} is gone: {error}") from error
            else:
                raise
        else:
            for problem in [*catalogue.problems, *catalogue.incomplete, *skipped]:
                logger.warning("%s", problem)
            return result
    problems = [*catalogue.problems, *catalogue.incomplete, *skipped]
    found = f"; found: {'; '.join(problems[:8])}" if problems else ""
    raise SnapshotNotFound(
        f"{catalogue.store.url}: no complete snapshot {what} that can be read{found}; "
        f"`lazysnap ls {catalogue.store.url}` lists what is there"
    )


def _check_apart(shards: Sequence[OpenShard]) -> None:
    """Raises: ShardCorrupt, if a shard and its frozen tensors have a name in common."""
    seen: Counter[str] = Counter()
    for shard in shards if len(shards) > 1 else ():
        seen.update([*(spec.name for spec in shard.layout.specs), *shard.meta.aliases])
        twice = next((name for name, count in seen.items() if count > 1), None)
        if twice is not None:
            raise ShardCorrupt(f"{shard.where}: tensor {twice!r} is in the shard and among the frozen tensors")


def read(
    jobs: Mapping[OpenShard, Sequence[Wanted]],
    *,
    verify: bool = True,
    beat: Callable[[int], None] = lambda count: None,
) -> int:
    """As ``blocks.fill``; also compares headers that were not compared yet."""
    wanted: dict[Blocks, list[Wanted]] = {}
    for shard, parts in jobs.items():
        header = [_compared(shard, shard.unverified)] if verify and shard.unverified is not None else []
        wanted[shard.blocks] = [*wanted.get(shard.blocks, ()), *header, *parts]
    return fill(wanted, verify=verify, beat=beat)


def _compared(shard: OpenShard, header: memoryview) -> Wanted:
    """Compare the header that was read first with the verified blocks."""

    def put(at: int, data: memoryview) -> None:
        if header[at : at + len(data)] != data:
            raise ShardCorrupt(f"{shard.where}: the header changed while it was read")

    return Wanted(shard.offset, shard.offset + len(header), put)
