"""What one process of N does, through the package's own code, for ``scale``; files of other ranks are made up.

The state is a transformer's, of one column: as many tensors, rows, files and names as a large one, and few bytes. What
is replaced, or called beside the public API: the ranks' ``World`` and the ``KeeperClient`` of ``lazysnap.engine``;
storage is a file system of fsspec, whose files are made by ``lazysnap.shard``; ``LevelWriter`` of
``lazysnap.keeper.level_writer`` (retention); ``Coordinator`` of ``lazysnap.grants.coordinator`` with the messages that
it gets; ``meet_keepers``, and ``Encoding`` of ``lazysnap.keeper.encoding`` with readers that count.
"""

import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar
from unittest import mock

import fsspec
import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.workers import Line
from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.engine import engine as engine_module
from lazysnap.grants.coordinator import Coordinator, LevelGrants, Own
from lazysnap.grants.messages import LevelReport, Progress, Report, StepKey
from lazysnap.grants.node import NodeLevel
from lazysnap.keeper import encoding
from lazysnap.keeper.events import MemoryEntry, MemoryInventory
from lazysnap.keeper.level_writer import LevelWriter
from lazysnap.keeper.node_files import NodeFiles
from lazysnap.keeper.parity_store import ParityStore
from lazysnap.keeper.protocol import Parity
from lazysnap.levels.source import MemorySource, NodeSource, RateLimiter
from lazysnap.ranks.meeting import meet_keepers
from lazysnap.ranks.partition import STORERS
from lazysnap.ranks.world import World
from lazysnap.resolver import Entry, Inventory
from lazysnap.restore.survey import fields_of
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import PAGE, Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.names import NodeName, SnapshotName, parse_file_name
from lazysnap.state.walk import walk
from lazysnap.topology import Team, places, share

RUN, START, EARLIER = "00000000000000ab", "00000000000000cd", "00000000000000cc"
URL = "imagined://run"
KEPT = 3
"""Snapshots on storage, and whole captures in each keeper's memory."""
PER_NODE = 8
"""Ranks; their number is a multiple of it."""
PART_BYTES = 64 << 20
"""Of a node, in what is counted of parity."""
TOGETHER = 64
"""Reports that the coordinator takes at once."""
LAYER_ROWS = (12_288, 4_096, 16_384, 4_096, 16_384, 4_096, 4_096)
EMBEDDING_ROWS = 65_536
LAYERS = 19

fsspec.register_implementation("imagined", "benchmarks.simulated.ImaginedFiles")


# ------------------------------------------------------------------------------------------------ made up


@lru_cache
def rows() -> dict[str, int]:
    """Of weights and AdamW's two moments of each: 402 tensors."""
    parameters = [rows for _ in range(LAYERS) for rows in LAYER_ROWS] + [EMBEDDING_ROWS]
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    return {f"{kind}_{number}": count for kind in kinds for number, count in enumerate(parameters)}


def cut(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where FSDP2 cuts: equal parts, the last ones shorter or empty."""
    part = -(-size // ranks)
    return min(size, rank * part), min(size, (rank + 1) * part)


def storing(ranks: int) -> range:
    """The ranks of the nodes that store what all nodes hold."""
    return range(min(ranks, STORERS * PER_NODE))


@lru_cache(maxsize=64)
def shard(kind: str, rank: int, ranks: int) -> tuple[bytes, Line]:
    """The bytes of a rank's shard, and what its manifest says of them."""
    if kind == "ddp":
        parts = {}
        if rank in storing(ranks):  # one after the other: of what its node stores its part
            held = share([(size, 4) for size in rows().values()], rank, len(storing(ranks)))
            parts = {list(rows())[one.index]: (one.start, one.stop) for one in held}
    else:
        parts = {name: cut(size, rank, ranks) for name, size in rows().items()}
        parts = {name: part for name, part in parts.items() if part[0] < part[1]}
    layout = Layout.plan(TensorSpec(f"model.{name}", "F32", (stop - start,)) for name, (start, stop) in parts.items())
    data = layout.header + bytes(layout.size_bytes - len(layout.header))
    scope = "full" if kind == "ddp" else "shard"
    facts = {
        f"model.{name}": {"scope": scope, "global_shape": [rows()[name]], "offsets": [start]}
        for name, (start, _) in parts.items()
    }
    return data, facts


@lru_cache
def names(ranks: int) -> list[NodeName]:
    """Of the files of all nodes."""
    return [NodeName(node, ranks // PER_NODE) for node in range(ranks // PER_NODE)]


def ranks_of(node: int) -> range:
    return range(node * PER_NODE, (node + 1) * PER_NODE)


@lru_cache(maxsize=16)
def node_file(kind: str, node: int, ranks: int) -> tuple[bytes, Manifest]:
    """The file of a node, and its manifest at step 1."""
    state = {"model": {name: {"$": "tensor", "v": f"model.{name}"} for name in rows()}}
    replicas = list(storing(ranks)) if kind == "ddp" else None
    sources = []
    for rank in ranks_of(node):
        data, facts = shard(kind, rank, ranks)
        meta = CaptureMeta(RUN, START, 1, rank, ranks, 1, tensors=facts, state=state, replicas=replicas)
        sources.append((meta, MemorySource(memoryview(data.ljust(-(-len(data) // PAGE) * PAGE, b"\0")), len(data))))
    made = NodeSource(sources)
    whole = bytes(made.view(0, -(-made.size_bytes // PAGE) * PAGE)[: made.size_bytes])
    return whole, Manifest(names(ranks)[node], made.shards, Checksums.of(memoryview(whole)), 1)


def manifest(kind: str, node: int, ranks: int, step: int) -> Manifest:
    _, made = node_file(kind, node, ranks)
    return replace(made, shards=tuple(replace(one, meta=replace(one.meta, step=step)) for one in made.shards))


class Clock:
    """Processor time of this process, without what was spent on making things up."""

    made_up_s = 0.0

    def __init__(self) -> None:
        Clock.made_up_s = 0.0
        self._started = time.process_time()

    def seconds(self) -> float:
        return time.process_time() - self._started - Clock.made_up_s

    @classmethod
    @contextlib.contextmanager
    def making_up(cls) -> Iterator[None]:
        started = time.thread_time()
        yield
        cls.made_up_s += time.thread_time() - started


class ImaginedFiles(fsspec.AbstractFileSystem):
    """A place that has every rank's files of some steps, made up when they are asked for; counts what is asked."""

    protocol = "imagined"
    kind, ranks = "ddp", 1
    steps: ClassVar[list[int]]
    asked: ClassVar[Counter[str]]
    opened: ClassVar[set[str]]
    gone: ClassVar[set[str]]

    @classmethod
    def fill(cls, kind: str, ranks: int, steps: range) -> None:
        """One place for all instances, which storages make as they like."""
        cls.kind, cls.ranks, cls.steps = kind, ranks, list(steps)
        cls.asked, cls.opened, cls.gone = Counter(), set(), set()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        with Clock.making_up():
            self.asked["lists"] += 1
            _, _, directory = self._strip_protocol(path).partition("/")
            if directory:
                made = (f"run/{directory}/{name}" for one in names(self.ranks) for name in (one.manifest, one.file))
                paths = [path for path in made if path not in self.gone]
            else:
                paths = [f"run/{SnapshotName(RUN, step, START).directory}" for step in self.steps]
            return [{"name": path, "size": None, "type": "other"} for path in paths] if detail else paths

    def _content(self, path: str) -> bytes:
        """Raises: FileNotFoundError."""
        _, directory, name = self._strip_protocol(path).split("/")
        at, parsed = SnapshotName.parse(directory), parse_file_name(name)
        if at is None or at.step not in self.steps or parsed is None or self._strip_protocol(path) in self.gone:
            raise FileNotFoundError(path)
        stem, suffix = parsed
        if suffix == "json":
            return manifest(self.kind, stem.node, self.ranks, at.step).encode()
        return node_file(self.kind, stem.node, self.ranks)[0]

    def info(self, path: str, **_: Any) -> Line:
        with Clock.making_up():
            if self._strip_protocol(path).count("/") < 2:
                return {"name": path, "size": None, "type": "directory"}
            return {"name": path, "size": len(self._content(path)), "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        with Clock.making_up():
            self.asked["manifests" if path.endswith(".json") else "ranges"] += 1
            self.opened.update({path} if not path.endswith(".json") else ())
            return self._content(path)[start:end]

    def rm_file(self, path: str) -> None:
        self.asked["deletions"] += 1
        self.gone.add(self._strip_protocol(path))

    def rmdir(self, path: str) -> None:
        self.asked["deletions"] += 1


class Fellows(World):
    """All other ranks: each answers what this one says, with its own number and node."""

    def __init__(self, rank: int, ranks: int, listing: Any = None) -> None:
        """``listing``: what rank 0 says that storage has, where this is another one."""
        super().__init__()
        self.rank, self.size, self._listing = rank, ranks, listing
        self.said: list[tuple[str, Any]] = []
        """What this rank told the others: at what, and the words."""
        self.told_bytes = 0
        """Of all answers."""

    def exchange(self, what: str, value: Any) -> list[Any]:
        """See ``World``."""
        self.exchanges += 1
        self.said.append((what, value))
        with Clock.making_up():
            answers = self._answers(what, value)
        self.told_bytes += sum(map(len, answers))
        return [item for _, item in map(json.loads, answers)]

    def exchange_after(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """See ``World``."""
        return self.exchange(what, work())

    def _answers(self, what: str, value: Any) -> list[str]:
        text = _dumped([what, value])
        nodes = [f"node-{rank // PER_NODE:05d}.cluster/{rank // PER_NODE:036d}/net" for rank in range(self.size)]
        if what == "making the engine" and isinstance(value, str):
            return [_dumped([what, node]) for node in nodes]
        if what == "what is on storage":  # one lists for all
            first = text if self.rank == 0 else _dumped([what, self._listing])
            return [first, *[_dumped([what, []])] * (self.size - 1)]
        if what == "what of it is whole":
            return [_dumped([what, [_whole(other, self.size)]]) for other in range(self.size)]
        answers = []
        for other, node in enumerate(nodes):
            # A rank of twice as many takes two shares of the work.
            answer = text.replace(f'"rank":{self.rank},', f'"rank":{other},')
            answer = answer.replace(f'"rank":{self.rank + self.size},', f'"rank":{other + self.size},')
            answers.append(answer.replace(nodes[self.rank], node))
        if what == "linking keepers":  # rank 0 makes the certificate
            answers = [_dumped([what, {"cert_pem": "", "key_pem": ""}]), *[_dumped([what, None])] * (self.size - 1)]
        if what == "where keepers are":  # the first rank of each node tells
            for first, node in {node: rank for rank, node in reversed([*enumerate(nodes)])}.items():
                door = {"host": f"{first}.cluster", "ports": [1, 2, 3], "domain": first, "library": "ISA-L"}
                answers[node] = _dumped([what, door])
        if what == "what is in memory":  # one lost what is newest, so memory has nothing whole
            other = (self.rank + 1) % self.size
            answers[other] = answers[other].replace(START, EARLIER)
        return answers


def _whole(part: int, parts: int) -> Line:
    """What one of so many ranks finds, who share the manifests out."""
    ranks, entries = ImaginedFiles.ranks, []
    for step, node in itertools.product(ImaginedFiles.steps, range(part, len(names(ranks)), parts)):
        directory = SnapshotName(RUN, step, START).directory
        for rank in ranks_of(node):
            entry = Entry(URL, 1, RUN, START, step, rank, ranks, directory, file=names(ranks)[node].text)
            entries.append(entry)
    return fields_of(Inventory(URL, tuple(entries)))


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def imagined_keeper(rank: int, ranks: int) -> mock.Mock:
    """A ``KeeperClient`` that holds whole captures of one rank, newer than those on storage."""
    facts: Line = {"slot": None, "run_id": RUN, "frozen": None, "rank": rank, "world_size": ranks, "start": START}
    held = (MemoryEntry(step=10 + n, sequence=n, checksums=None, **facts) for n in range(KEPT))
    return mock.Mock(**{"serve_peers.return_value": [1, 2, 3], "inventory.return_value": MemoryInventory(tuple(held))})


# ------------------------------------------------------------------------------------------------ simulated


@contextlib.contextmanager
def model_of(kind: str, rank: int, ranks: int) -> Iterator[torch.nn.ParameterDict]:
    """What a rank trains, in a process group that has nobody else."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = torch.nn.ParameterDict()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    # Torch remembers by the mesh which rows are this rank's: each rank has a mesh of its own name.
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(f"seen_by_{rank}",))
    for name, size in rows().items():
        start, stop = (0, size) if kind == "ddp" else cut(size, rank, ranks)
        shape = {"shape": torch.Size((size,)), "stride": (1,)}
        part = torch.zeros(stop - start)
        model[name] = part if kind == "ddp" else DTensor.from_local(part, mesh, [Shard(0)], run_check=False, **shape)
    try:
        yield model
    finally:
        dist.destroy_process_group()


def engine_of(model: torch.nn.ParameterDict, fellows: Fellows, taken: int) -> SnapshotEngine:
    """The engine of one rank; ``taken``: ranks of the snapshots that there are."""
    level = PersistentLevel(URL, every_n_steps=1, keep_last=KEPT)
    with (
        mock.patch.object(engine_module, "World", return_value=fellows),
        mock.patch.object(engine_module, "KeeperClient", return_value=imagined_keeper(fellows.rank, taken)),
    ):
        return SnapshotEngine(SnapshotConfig(levels=(level,), job_id="imagined"), {"model": model})


def plan(kind: str, ranks: int) -> Line:
    """One rank's planning: its engine, where all ranks are, its shard and manifest."""
    fellows, others = Fellows(0, ranks), Fellows(0, ranks)  # before there is a process group
    with model_of(kind, 0, ranks) as model:
        engine_of(model, others, ranks)  # what is imported and made once
        clock = Clock()
        engine_of(model, fellows, ranks)
        fellows.settle(walk({}), (), ())
        encoded = manifest(kind, 0, ranks, 1).encode()
        seconds = clock.seconds()
    return {"cpu_s": seconds, "told_bytes": fellows.told_bytes, "manifest_bytes": len(encoded), "said": fellows.said}


def restart(kind: str, taken: int, ranks: int, rank: int, listing: Any = None) -> Line:
    """One rank's restart from storage, as the captures in memory are not whole on all nodes."""
    fellows = Fellows(rank, ranks, listing)
    ImaginedFiles.fill(kind, taken, range(1, KEPT + 1))
    with model_of(kind, rank, ranks) as model:
        engine = engine_of(model, fellows, taken)
        fellows.told_bytes, fellows.said[:] = 0, []
        clock = Clock()
        found = engine.fetch()
        seconds = clock.seconds()
    assert found is not None
    assert (found.step, found.level, found.skipped) == (KEPT, URL, ()), found
    opened, asked = len(ImaginedFiles.opened), ImaginedFiles.asked
    # Each file that is opened has its manifest read once more.
    counted = {"lists": asked["lists"], "survey_reads": asked["manifests"] - opened, "files_opened": opened}
    return {"cpu_s": seconds, **counted, "told_bytes": fellows.told_bytes, "said": fellows.said}


def restarts(kind: str, taken: int, ranks: int) -> list[Line]:
    """Of the first rank, one in the middle, and the last."""
    first = restart(kind, taken, ranks, 0)
    listing = dict(first["said"])["what is on storage"]
    return [first, *(restart(kind, taken, ranks, rank, listing) for rank in (ranks // 2, ranks - 1))]


def retention(ranks: int) -> Line:
    """What the keeper of one node asks of a level after a snapshot, once it runs evenly."""
    team = Team.of(places([f"node {rank // PER_NODE}" for rank in range(ranks)]), ranks // 2)
    ImaginedFiles.fill("fsdp", ranks, range(1, KEPT + 2))
    level = PersistentLevel(URL, keep_last=KEPT, verify=False)
    own = LevelWriter(level, 0, NodeFiles(team, RUN, START, is_shared=True), mock.Mock())
    own._loop = mock.Mock()  # nothing that goes is granted again
    for newest in (KEPT + 1, KEPT + 2):  # the first time it opens the level
        ImaginedFiles.steps = list(range(newest - KEPT, newest + 1))  # the others deleted theirs, too
        ImaginedFiles.asked.clear()
        clock = Clock()
        own.learned((NodeLevel(complete={StepKey(step, START) for step in range(1, newest + 1)}),), {})
        own._tidy()
        seconds = clock.seconds()
        gone = SnapshotName(RUN, newest - KEPT, START).directory
        assert len([path for path in ImaginedFiles.gone if f"/{gone}/" in path and path.endswith(".json")]) == 1
    return {"cpu_s": seconds, "operations": sum(ImaginedFiles.asked.values())}


def coordinator(ranks: int, snapshots: int = 4) -> Line:
    """What the coordinator does per snapshot: hears from every node that it has its file, publishes, grants a step."""
    nodes, started_by = ranks // PER_NODE, Own(0, frozenset())
    level = LevelGrants(PersistentLevel("/level", every_n_steps=1, keep_last=KEPT))
    own = Coordinator(1, START, nodes, (level,))
    encode, decoder = msgspec.msgpack.encode, msgspec.msgpack.Decoder(Report)

    def hear(progress: Progress, stored: tuple[int, ...]) -> int:
        """From all nodes, as many at a time as a busy link brings."""
        said = LevelReport(level.grant, None, progress, True, stored, level.turn)
        begun = started_by if level.grant is None else Own(level.grant, frozenset((level.grant,)))
        with Clock.making_up():
            texts = [encode(Report(node, own.epoch, (said,))) for node in range(nodes)]
        for number, text in enumerate(texts, 1):
            own.receive(decoder.decode(text))
            if number % TOGETHER == 0 or number == nodes:
                own.decide(begun)
        return sum(map(len, texts))

    hear(Progress.IDLE, ())
    clock, size = Clock(), 0
    for _ in range(snapshots):
        size += len(encode(own.order())) * nodes
        granted = level.grant
        assert granted is not None
        size += hear(Progress.COMMITTED, (*sorted(level.complete)[-KEPT + 1 :], granted))
        assert granted in level.complete
    return {"cpu_s": clock.seconds() / snapshots, "messages": 2 * nodes, "bytes": size // snapshots}


def protection(ranks: int) -> Line:
    """What protection between nodes takes: the words of one node at the start, and per protected step what goes over
    the links of all nodes, and what one node reads of the others.
    """
    clock = Clock()
    fellows = Fellows(0, ranks)
    met = meet_keepers(fellows, imagined_keeper(0, ranks), SnapshotConfig(job_id="imagined"), "imagined")
    assert met.parity is not None
    seconds, granted = clock.seconds(), coordinator(ranks)
    counts, read = reads(met.parity)
    return {
        "meeting_cpu_s": seconds,
        "meeting_told_bytes": fellows.told_bytes,
        "peers_bytes": len(msgspec.json.encode(met.peers)),
        "parity_bytes": len(msgspec.json.encode(met.parity)),
        "link_messages_per_node": granted["messages"] / (ranks // PER_NODE),
        "link_bytes_per_node": granted["bytes"] / (ranks // PER_NODE),
        "read_requests_per_node": counts,
        "read_parts_per_node": read,
    }


def reads(parity: Parity) -> tuple[int, float]:
    """Requests of one node to the others of its group for the parity of one step, and bytes read, in parts of a node:
    by ``keeper.encoding``, with readers that count.
    """
    ranks = [[number, 100, PART_BYTES // PER_NODE, None] for number in range(PER_NODE)]
    index = _dumped(ranks).encode()
    part = len(index).to_bytes(8, "little") + index + bytes(PER_NODE * 100 + PART_BYTES // PER_NODE * PER_NODE)
    asked: Counter[str] = Counter()

    class Reader:
        def __init__(self, *_: Any) -> None: ...

        def open(self, _: Any) -> int:
            asked["requests"] += 1
            return len(part)

        def read_into(self, offset: int, out: memoryview) -> int:
            asked["requests"] += 1
            asked["bytes"] += len(out)
            out[:] = part[offset : offset + len(out)]
            return 0

        def finish(self) -> None:
            asked["requests"] += 1

    own = MemorySource(memoryview(part), len(part))
    identity = mock.Mock(run_id=RUN, start=START)
    with (
        mock.patch.object(encoding, "PeerReader", Reader),
        mock.patch.object(encoding, "open_part", return_value=mock.Mock(size_bytes=len(part), view=own.view)),
    ):
        made = encoding.Encoding(parity, identity, Team(node=parity.members[0][0]), mock.Mock(), RateLimiter(None))
        made.encode(1, ParityStore(), mock.Mock(), lambda: None)
    return asked["requests"], asked["bytes"] / len(part)


def run(settings: Line) -> Iterator[Line]:
    """A worker: all measures for one number of ranks; of a restart the rank for which it takes longest."""
    ranks = settings["ranks"]
    for kind in ("ddp", "fsdp"):
        yield {"measure": "plan", "kind": kind, "ranks": ranks, **_figures(plan(kind, ranks))}
    for kind, (world, now) in itertools.product(("ddp", "fsdp"), (("same", ranks), ("half", ranks // 2))):
        each = [_figures(one) for one in restarts(kind, ranks, now)]
        worst = {name: max(one[name] for one in each) for name in each[0]}
        yield {"measure": "restart", "kind": kind, "ranks": ranks, "world": world, **worst}
    yield {"measure": "retention", "ranks": ranks, **retention(ranks)}
    yield {"measure": "coordinator", "ranks": ranks, **coordinator(ranks)}
    if ranks > PER_NODE:
        yield {"measure": "protection", "ranks": ranks, **protection(ranks)}


def _figures(line: Line) -> Line:
    return {name: value for name, value in line.items() if name != "said"}
