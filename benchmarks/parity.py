"""How fast do nodes protect each other, and how fast is a lost node's memory computed? Beside bare sockets.

Each node is a process with a host name of its own, so it has a keeper of its own, and reads over real sockets.
"""

import argparse
import functools
import math
import os
import socket
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks import SIZES
from benchmarks.raw import KEEP_HEAP, memcpy_s, peak_memory, slot_bytes, timed, warm
from benchmarks.report import Report
from benchmarks.workers import DEADLINE_S, MARKER, Line, call, call_ranks, processes, tell

BLOCK = 1 << 20
EVERY = 10
"""Steps from one capture to the next: the one that is granted is the next that is captured."""
WARM = 2
"""Rounds that do not count: memory for parity is new in them."""
ASKED = 0.5
"""Of the lowest limit."""
SURVIVAL_NODES = (8, 64, 256, 2048)
SCHEMES = {"parity=1, pairs": (2, 1), "parity=1, groups of 8": (8, 1), "parity=2, groups of 8": (8, 2)}
"""Nodes of a group, and how many of them may be lost."""
WARM_STEPS, STEPS = 40, 100
"""Of the training that is slowed down."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 3, 4, 8], help="in one group")
    parser.add_argument("--megabytes", type=int, default=200, help="of state per node")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=SIZES, default="small", help="that is trained while captures are protected")
    parser.add_argument("--turns", type=int, default=3, help="of that training, with redundancy and without")


def run(args: argparse.Namespace, report: Report) -> None:
    report.take("limits", functools.partial(call, "parity.limits", {"size": args.megabytes * 1_000_000}))
    report.take("survival", survivals)
    for nodes in args.nodes:
        job = {"level": "memory", "nodes": nodes, "megabytes": args.megabytes, "rounds": args.rounds}
        report.take(f"{nodes} nodes", functools.partial(call, "parity.measure", job))
    job = {"level": "memory", "size": SIZES[args.model], "device": "cpu", "ranks": 2, "turns": args.turns}
    if args.turns:
        report.take("training", functools.partial(call, "parity.slowed", job))
    local = min((line["gb_per_s"] for line in report.of("limit")), default=math.nan)
    for what in ("encode", "rebuild"):
        for line in report.of(what):
            lowest = [min(rate, local) for rate in line["tcp_gb_per_s"]]  # of the same round
            parts = [rate / limit for rate, limit in zip(line["gb_per_s"], lowest, strict=True)]
            text = f"{what}, {line['nodes']} nodes"
            report.target(text, ">= {} of the lowest limit", ASKED, statistics.median(parts))


def survivals() -> Iterator[Line]:
    """In % of all sets of so many nodes, each as likely."""
    for nodes in SURVIVAL_NODES:
        for scheme, (size, parity) in SCHEMES.items():
            facts = {"measure": "survival", "nodes": nodes, "redundancy": scheme}
            yield {**facts, **{f"lost_{lost}": 100 * survival(nodes, size, parity, lost) for lost in range(1, 5)}}


def survival(nodes: int, size: int, parity: int, lost: int) -> float:
    """The probability that so many lost nodes are survived, each set of them being as likely. Exact."""
    if not 0 <= lost <= nodes:
        raise ValueError(f"of {nodes} nodes 0 to {nodes} can be lost, got {lost}")
    from lazysnap.parity.groups import groups_of

    ways = [1] + [0] * lost
    for group in groups_of(nodes, size, parity):
        some = [math.comb(len(group.members), count) for count in range(parity + 1)]
        ways = [sum(some[j] * ways[k - j] for j in range(min(parity, k) + 1)) for k in range(lost + 1)]
    return ways[lost] / math.comb(nodes, lost)


# ------------------------------------------------------------------------------------------------ in a worker


def limits(job: Line) -> Iterator[Line]:
    """A worker: what one core of this machine does at best."""
    from lazysnap.parity.codes import library, multiply_add

    size = job["size"]
    yield {"measure": "limit", "limit": "memcpy, 1 thread", "gb_per_s": size / memcpy_s(size, 1) / 1e9}
    data, out = warm(size), warm(size)

    def add(weight: int) -> None:
        for at in range(0, size, BLOCK):
            multiply_add(weight, data[at : at + BLOCK], out[at : at + BLOCK])

    for name, weight in (("XOR", 1), ("product", 0x8E)):
        add(weight)
        seconds = statistics.median(timed(functools.partial(add, weight)) for _ in range(5))
        yield {"measure": "limit", "limit": f"{name}, {library()}", "gb_per_s": size / seconds / 1e9}


def measure(job: Line) -> Iterator[Line]:
    """A worker: nodes protect each other; then one of them is lost, again and again."""
    run, nodes = uuid.uuid4().hex, job["nodes"]
    job = {**job, "run": run, "job_id": run}
    environment = {MARKER: run, "OMP_NUM_THREADS": "1", **KEEP_HEAP}
    try:
        said = [one for [one] in call_ranks("parity.node", job, nodes, **environment)]
        facts = {"nodes": nodes, "may_be_lost": said[0]["may_be_lost"], "state_mb": float(job["megabytes"])}
        yield {"measure": "encode", **facts, **figures([one["rounds"] for one in said], range(nodes))}
        yield {"measure": "memory of a node", **facts, **said[0]["memory"]}
        starts = []
        for number in range(job["rounds"]):
            lines = call_ranks("parity.again", {**job, "start": number}, nodes, **environment)
            starts.append([{line["event"]: line for line in one} for one in lines])
            if [by["stepped"]["state"] for by in starts[-1]] != [one["state"] for one in said]:
                raise RuntimeError("what was restored is not what was captured")
        rounds = [[by["measured"]["round"] for by in events] for events in zip(*starts, strict=True)]
        yield {"measure": "rebuild", **facts, **figures(rounds, range(nodes - 1, nodes))}
        lost = [phases(events) for events in starts]
        yield {"measure": "lost node", **facts, **{name: [one[name] for one in lost] for name in lost[0]}}
    finally:
        for process in processes(run):
            process.kill()


def figures(nodes: list[list[Line]], readers: range) -> Line:
    """Of the rounds of all nodes: what some of them read together."""
    found: dict[str, list[float]] = {}
    for each in zip(*nodes, strict=True):
        size = sum(each[reader]["bytes"] for reader in readers)
        for name in ("", "tcp_"):
            seconds = max(each[reader][f"{name}s"] for reader in readers)
            found.setdefault(f"{name}gb_per_s", []).append(size / seconds / 1e9)
            cpu_s = sum(one[f"{name}cpu_s"] for one in each)
            found.setdefault(f"{name}cpu_s_per_gb", []).append(cpu_s / size * 1e9)
    return found


def phases(ranks: list[dict[str, Line]]) -> Line:
    """Seconds of the slowest rank in each, from the launch to the end of the first step."""
    names = ("imported", "built", "met", "fetched", "loaded")
    found: Line = {}
    for before, name in zip((None, *names), names, strict=False):
        found[f"{name}_s"] = max(by[name]["at"] - (by[before]["at"] if before else 0.0) for by in ranks)
    found["step_s"] = max(by["stepped"]["seconds"] for by in ranks)
    return {**found, "total_s": sum(found.values())}


def slowed(job: Line) -> Iterator[Line]:
    """A worker: the same training with redundancy and without, by turns; a capture at every step."""
    taken: dict[str, list[Line]] = {"auto": [], "none": []}
    for turn in range(job["turns"]):
        for redundancy in ("auto", "none") if turn % 2 else ("none", "auto"):
            run = uuid.uuid4().hex
            own = {**job, "redundancy": redundancy, "run": run, "job_id": run}
            try:
                with peak_memory(run, 0.2) as peak:
                    said = [one for [one] in call_ranks("parity.train", own, job["ranks"], **{MARKER: run})]
            finally:
                for process in processes(run):
                    process.kill()
            taken[redundancy].append({**said[0], "peak_mb_per_node": peak[0] / 1e6 / job["ranks"]})
    for redundancy, lines in taken.items():
        facts = {"measure": "training", "redundancy": redundancy, "nodes": job["ranks"]}
        yield {**facts, **{name: [one[name] for one in lines] for name in lines[0]}}


# ------------------------------------------------------------------------------------------------ one node


def begin(job: Line, host: str) -> int:
    """Be a node of that name; its number."""
    import torch
    import torch.distributed as dist

    import lazysnap.engine  # noqa: F401  a part of what is imported

    socket.gethostname = lambda: host  # what tells nodes apart
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    return dist.get_rank()


class State:
    """A model and its optimizer, that this node has alone."""

    def __init__(self, job: Line) -> None:
        import torch

        from benchmarks.training import layers

        self.model = layers(job["megabytes"])
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)

    def step(self) -> None:
        import torch

        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def engine(self, job: Line) -> Any:
        from benchmarks.training import config
        from lazysnap import SnapshotEngine

        settings = replace(config(job), every_n_steps=EVERY)
        return SnapshotEngine(settings, {"model": self.model, "optimizer": self._optimizer})

    @property
    def _tensors(self) -> list[Any]:
        held = [value for state in self._optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *held]

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def sums(self) -> list[float]:
        """Equal for equal states."""
        return [float(tensor.double().sum()) for tensor in self._tensors]


def node(job: Line) -> Iterator[Line]:
    """A worker: captures are protected, one after the other; then the last node dies."""
    import torch.distributed as dist

    from benchmarks.training import ready

    rank, nodes = begin(job, name := f"node{os.environ['RANK']}"), job["nodes"]
    state = State(job)
    engine = state.engine(job)
    _, lost = engine._run.restart.discovery.group
    state.step()
    engine.boundary(EVERY)
    ready(engine)
    keepers = [one for one in processes(job["run"]) if "lazysnap.keeper" in one.cmdline()]
    own = next(one for one in keepers if f"--node={name}" in one.cmdline())
    rounds = []
    for number in range(2, 2 + WARM + job["rounds"]):
        state.step()
        dist.barrier()
        before, started = _cpu_s(keepers), time.perf_counter()
        engine.boundary(number * EVERY)
        if not engine.wait(number * EVERY, until="protected", timeout_s=DEADLINE_S):
            raise RuntimeError(f"step {number * EVERY} was not protected: {engine.statistics()}")
        seconds = time.perf_counter() - started
        dist.barrier()
        ours = {"bytes": lost * state.size, "s": seconds, "cpu_s": (_cpu_s(keepers) - before) / nodes}
        rounds.append({**ours, **bare(lost * state.size // (nodes - 1), range(nodes))})
    parity_mb = 2 * state.size / 1e6 * lost / (nodes - lost)
    memory = {"slots_mb": slot_bytes() / 1e6, "parity_mb": parity_mb, "keeper_mb": own.memory_full_info().uss / 1e6}
    yield {"rounds": rounds[WARM:], "may_be_lost": lost, "memory": memory, "state": state.sums()}
    dist.barrier()
    if rank == nodes - 1:
        own.kill()
        own.wait()
    _leave()


def again(job: Line) -> None:
    """A worker: the start after that; another node is in the place of the lost one."""
    import torch.distributed as dist

    rank, nodes = int(os.environ["RANK"]), job["nodes"]
    begin(job, f"spare{job['start']}" if rank == nodes - 1 else f"node{rank}")
    tell(job, "imported")
    state = State(job)
    tell(job, "built")
    engine = state.engine(job)
    tell(job, "met")
    dist.barrier()  # what is timed waits for nobody
    found = engine._fetch()
    if found is None:
        raise RuntimeError("nothing was restored")
    tell(job, "fetched")
    engine._load(found)
    tell(job, "loaded")
    sums = state.sums()
    started = time.perf_counter()
    state.step()
    tell(job, "stepped", seconds=time.perf_counter() - started, state=sums)
    tell(job, "measured", round=rebuild(job, engine, found.step))
    _leave()


def rebuild(job: Line, engine: Any, step: int) -> Line:
    """The part of the lost node is computed once more, by the new one, into memory that it has. Collective."""
    import torch.distributed as dist

    from lazysnap.levels.blocks import WantedBytes
    from lazysnap.resolver import Entry
    from lazysnap.restore.lost_parts import lost_parts
    from lazysnap.restore.parity import Parity
    from lazysnap.restore.peer_memory import PeerConnections
    from lazysnap.snapshots.reader import read

    rank, nodes = dist.get_rank(), dist.get_world_size()
    inventory = engine._client.memory(DEADLINE_S)
    held = [one for one in inventory.parity if one.step == step]
    entries = [
        Entry("memory", 0, one.run_id, one.start, step, one.rank, nodes, "", node=engine._world.place.node)
        for one in inventory.entries
        if one.step == step
    ]
    told: list[Any] = [None] * nodes
    dist.all_gather_object(told, (engine._world.place.node, entries, held))
    parts, computed, _ = lost_parts(
        (entry for _, entries, _ in told for entry in entries), [(node, one) for node, _, held in told for one in held]
    )
    group, lost = engine._run.restart.discovery.group
    out, everyone = warm(parts[0].pieces.sizes[nodes - 1]), processes(job["run"])

    def put(at: int, data: memoryview) -> None:
        out[at : at + len(data)] = data

    ours = {"bytes": (group - lost) * len(out), "s": 0.0, "cpu_s": 0.0}
    dist.barrier()
    if rank == nodes - 1:
        cpu_s, started = _cpu_s(everyone), time.perf_counter()
        connections = PeerConnections(engine._run.restart.discovery)
        source = Parity(connections)
        source.lost = parts
        [entry] = [entry for entry in computed if entry.rank == rank]
        shard = source.open(entry, "the lost node")
        read({shard: [WantedBytes(shard.offset, shard.offset + shard.layout.size_bytes, put)]})
        connections.close()
        ours |= {"s": time.perf_counter() - started, "cpu_s": _cpu_s(everyone) - cpu_s}
    dist.barrier()
    return {**ours, **bare(ours["bytes"] // (nodes - 1), range(nodes - 1, nodes))}


def train(job: Line) -> Iterator[Line]:
    """A worker: a rank that is a node, of a training that captures at every step."""
    import torch.distributed as dist

    from benchmarks.training import Training, config, ready
    from lazysnap import SnapshotEngine

    begin(job, f"node{os.environ['RANK']}")
    training = Training(job)
    redundancy = None if job["redundancy"] == "none" else job["redundancy"]
    engine = SnapshotEngine(replace(config(job), redundancy=redundancy), training.objects())
    for step in range(1, WARM_STEPS + STEPS + 1):
        training.backward(step)
        dist.barrier()  # as gradients do: no rank is more than a step ahead
        training.update()
        engine.boundary()
        if step == 1:
            ready(engine)
        if step == WARM_STEPS:
            dist.barrier()
            started, protected = time.perf_counter(), engine.statistics().protected
    seconds = time.perf_counter() - started
    found = engine.statistics()
    steps = {"step_ms": 1e3 * seconds / STEPS, "protected_of_100": 100 * (found.protected - protected) / STEPS}
    yield {"state_mb_per_node": training.state_bytes() / 1e6, **steps}
    _leave()


# ------------------------------------------------------------------------------------------------ bare sockets


def bare(size: int, readers: range) -> Line:
    """Each of these nodes reads so many bytes from each other node, over a connection of each: no messages, nothing is
    compared or computed. Seconds until this node is through, and its processor time. Collective.
    """
    import torch.distributed as dist

    rank, nodes = dist.get_rank(), dist.get_world_size()
    told: list[Any] = [None] * nodes
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dist.all_gather_object(told, listener.getsockname()[1])
        sources = [other for other in range(nodes) if other != rank] if rank in readers else []
        clients = [socket.create_connection(("127.0.0.1", told[source])) for source in sources]
        servers = [listener.accept()[0] for reader in readers if reader != rank]

    def send(connection: socket.socket) -> None:
        with connection:
            ready.wait()
            for at in range(0, size, BLOCK):
                connection.sendall(source[: min(BLOCK, size - at)])
            connection.recv(1)

    def receive(connection: socket.socket) -> None:
        buffer = memoryview(bytearray(BLOCK))
        with connection:
            ready.wait()
            left = size
            while left:
                left -= connection.recv_into(buffer[: min(BLOCK, left)])
            connection.sendall(b"!")

    source, ready = warm(BLOCK), threading.Barrier(len(clients) + len(servers) + 1)
    with ThreadPoolExecutor(len(clients) + len(servers)) as pool:
        work = [pool.submit(send, one) for one in servers] + [pool.submit(receive, one) for one in clients]
        ready.wait()
        dist.barrier()
        cpu_s, started = time.process_time(), time.perf_counter()
        for one in work:
            one.result()
        found = {"tcp_s": time.perf_counter() - started, "tcp_cpu_s": time.process_time() - cpu_s}
    dist.barrier()
    return found


def _cpu_s(found: list[Any]) -> float:
    """Processor time of processes, in seconds."""
    return sum(sum(one.cpu_times()[:2]) for one in found)


def _leave() -> None:
    """As a crash: keepers stay."""
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
