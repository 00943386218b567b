"""Snapshots of thousands of ranks that are nowhere: names and manifests are made up when they are asked for.

For scale.py: what one rank does at its plan, per snapshot and at a restart, without tensors and processes.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lazysnap.shard.checksum import BLOCK_BYTES, Checksums
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.names import ShardName, SnapshotName, parse_file_name
from lazysnap.topology import places, share

RUN, START = "00000000000000ab", "00000000000000cd"
URL = "s3://imagined/run"
PER_NODE = 8
WIDTH = 4096
LAYERS = 19
_LAYER = {
    "attention.qkv.weight": (3 * WIDTH, WIDTH),
    "attention.out.weight": (WIDTH, WIDTH),
    "mlp.up.weight": (4 * WIDTH, WIDTH),
    "mlp.down.weight": (WIDTH, 4 * WIDTH),
    "mlp.up.bias": (4 * WIDTH,),
    "norm.first.weight": (WIDTH,),
    "norm.second.weight": (WIDTH,),
}
Shape = tuple[int, ...]
Pieces = dict[str, tuple[Shape, Shape, Shape]]
"""By name: global shape, offsets, shape of the piece."""


@lru_cache
def tensors() -> dict[str, Shape]:
    """A transformer's weights and AdamW's two moments of each: 402 tensors."""
    parameters = {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in _LAYER.items()}
    parameters["embedding.weight"] = (65_536, WIDTH)
    found = {f"model.{name}": shape for name, shape in parameters.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        found |= {f"optimizer.state.{n}.{moment}": shape for n, shape in enumerate(parameters.values())}
    return found


def rows_of(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where FSDP2 cuts a dimension: equal parts, the last ones shorter or empty."""
    part = -(-size // ranks)
    return min(size, rank * part), min(size, (rank + 1) * part)


def box(kind: str, shape: Shape, rank: int, ranks: int) -> tuple[Shape, Shape]:
    """What a rank wants of a tensor: offsets and shape."""
    if kind == "ddp":
        return (0,) * len(shape), shape
    start, stop = rows_of(shape[0], rank, ranks)
    return (start, *(0 for _ in shape[1:])), (stop - start, *shape[1:])


def pieces(kind: str, rank: int, ranks: int) -> Pieces:
    """What a rank captures."""
    found: Pieces = {}
    if kind == "ddp":
        names = list(tensors())
        sizes = [(shape[0], 4 * volume(shape[1:])) for shape in tensors().values()]
        for rows in share(sizes, rank % PER_NODE, min(PER_NODE, ranks)):
            shape = tensors()[names[rows.index]]
            found[names[rows.index]] = (
                shape,
                (rows.start, *(0 for _ in shape[1:])),
                (rows.stop - rows.start, *shape[1:]),
            )
        return found
    for name, shape in tensors().items():
        offsets, part = box(kind, shape, rank, ranks)
        if part[0]:
            found[name] = shape, offsets, part
    return found


def volume(shape: Shape) -> int:
    """Elements."""
    count = 1
    for size in shape:
        count *= size
    return count


def capture(kind: str, rank: int, ranks: int, step: int) -> tuple[Layout, CaptureMeta]:
    """The layout of a rank's shard and what is written beside it."""
    held = pieces(kind, rank, ranks)
    layout = Layout.plan(TensorSpec(name, "F32", part) for name, (_, _, part) in held.items())
    scope = "full" if kind == "ddp" else "shard"
    facts = {
        name: {"scope": scope, "global_shape": list(shape), "offsets": list(offsets)}
        for name, (shape, offsets, _) in held.items()
    }
    state = {name: {"$": "tensor", "v": name} for name in tensors()}
    where = {"run_id": RUN, "start": START, "step": step, "rank": rank, "world_size": ranks}
    return layout, CaptureMeta(**where, captured_ns=1, tensors=facts, state=state)


@dataclass(frozen=True)
class Small:
    """A manifest of nothing much, where only its number matters."""

    def manifest(self, rank: int, ranks: int, step: int) -> Manifest:
        """One rank's."""
        where = {"run_id": RUN, "start": START, "step": step, "rank": rank, "world_size": ranks}
        return manifest_of(CaptureMeta(**where, captured_ns=1, state={}), 4096, 4096)


@dataclass(frozen=True)
class Whole:
    """The manifest of a rank that trains the model above."""

    kind: str

    def manifest(self, rank: int, ranks: int, step: int) -> Manifest:
        """One rank's."""
        layout, meta = capture(self.kind, rank, ranks, step)
        return manifest_of(meta, len(layout.header), layout.size_bytes)


def manifest_of(meta: CaptureMeta, header_bytes: int, size_bytes: int) -> Manifest:
    """With a checksum for every block."""
    blocks = ("0" * 32,) * -(-size_bytes // BLOCK_BYTES)
    return Manifest(
        meta, ShardName(meta.rank, meta.world_size).shard, header_bytes, Checksums(size_bytes, BLOCK_BYTES, blocks), 1
    )


class ImaginedStorage:
    """A place that has every rank's shard of some steps; counts what is asked of it."""

    url = URL
    parallel_writes = parallel_reads = 1
    checks_writes = True

    def __init__(self, ranks: int, steps: range, of: Any) -> None:
        self.ranks = ranks
        self.steps = list(steps)
        self.asked: Counter[str] = Counter()
        self.made_up_s = 0.0
        """Processor time that was spent on making things up."""
        self._of = of
        self._gone: set[str] = set()

    @contextlib.contextmanager
    def _making_up(self, what: str) -> Iterator[None]:
        self.asked[what] += 1
        started = time.process_time()
        yield
        self.made_up_s += time.process_time() - started

    def list(self, path: str = "", prefix: str = "") -> list[str]:
        with self._making_up("list"):
            if not path:
                return [SnapshotName(RUN, step, START).directory for step in self.steps]
            if prefix.startswith("keep-"):
                return []
            pairs = (ShardName(rank, self.ranks) for rank in range(self.ranks))
            names = (name for pair in pairs for name in (pair.manifest, pair.shard))
            return sorted(name for name in names if name.startswith(prefix) and f"{path}/{name}" not in self._gone)

    def _manifest(self, path: str) -> Manifest:
        directory, name = path.split("/")
        at, parsed = SnapshotName.parse(directory), parse_file_name(name)
        if at is None or at.step not in self.steps or parsed is None or path in self._gone:
            raise FileNotFoundError(path)
        return self._of.manifest(parsed[0].rank, parsed[0].world_size, at.step)

    def manifest(self, rank: int, step: int) -> Manifest:
        """What a rank wrote, not counted."""
        return self._of.manifest(rank, self.ranks, step)

    def get(self, path: str) -> bytes:
        with self._making_up("get"):
            return self._manifest(path).encode()

    def size(self, path: str) -> int:
        with self._making_up("size"):
            return self._manifest(path).size_bytes

    def stamp(self, path: str) -> object:
        self.asked["stamp"] += 1
        return 1

    def is_link(self, path: str) -> bool:
        return False  # asks nothing: an object store has no links

    def is_leased(self, path: str) -> bool:
        self.asked["is_leased"] += 1
        return False

    def delete(self, path: str) -> None:
        self.asked["delete"] += 1
        self._gone.add(path)

    def delete_directory(self, path: str) -> None:
        self.asked["delete_directory"] += 1


def nodes(ranks: int) -> list[str]:
    """The node of every rank."""
    return [f"node-{rank // PER_NODE:05d}.cluster/{rank // PER_NODE:036d}/net:[4026531840]" for rank in range(ranks)]


def place_list(ranks: int) -> list[Any]:
    """The place of every rank."""
    return places(nodes(ranks))
