"""How fast do nodes protect each other, and how fast is a lost node's memory computed? Beside bare sockets.

Each node is a process with a host name of its own, so it has a keeper of its own, and reads over real sockets.
"""

import argparse
import functools
import math
import operator
import os
import socket
import statistics
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.raw import KEEP_HEAP, memcpy_s, slot_bytes, timed, warm
from benchmarks.report import Report
from benchmarks.workers import (
    DEADLINE_S,
    MARKER,
    Line,
    by_event,
    call,
    call_each_rank,
    call_ranks,
    columns,
    processes,
    tell,
)

BLOCK = 1 << 20
EVERY = 10
"""Steps from one capture to the next: the one that is granted is the next that is captured."""
WARM = 2
"""Rounds that do not count: memory for parity is new in them."""
ASKED = 0.5
"""Of the lowest limit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 3, 4, 8], help="in one group")
    parser.add_argument("--megabytes", type=int, default=200, help="of state per node")
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace, report: Report) -> None:
    report.take("limits", functools.partial(call, "parity.limits", {"size": args.megabytes * 1_000_000}))
    for nodes in args.nodes:
        job = {"level": "memory", "nodes": nodes, "megabytes": args.megabytes, "rounds": args.rounds}
        report.take(f"{nodes} nodes", functools.partial(call, "parity.measure", job))
    local = min([line["gb_per_s"] for line in report.of("limit")], default=math.nan)
    for line in [*report.of("encode"), *report.of("rebuild")]:
        shares = []
        for rate, tcp_rate in zip(line["gb_per_s"], line["tcp_gb_per_s"], strict=True):  # of the same round
            shares.append(rate / min(tcp_rate, local))
        text = f"{line['measure']}, {line['nodes']} nodes"
        report.target(text, ">= {} of the lowest limit", ASKED, statistics.median(shares))


# ------------------------------------------------------------------------------------------------ in a worker


def limits(job: Line) -> Iterator[Line]:
    """A worker: what one core of this machine does at best."""
    from lazysnap.parity.codes import library, multiply_add

    size = job["size"]
    yield {"measure": "limit", "limit": "memcpy, 1 thread", "gb_per_s": size / memcpy_s(size, 1) / 1e9}
    data = warm(size)
    out = warm(size)

    def add(weight: int) -> None:
        for at in range(0, size, BLOCK):
            multiply_add(weight, data[at : at + BLOCK], out[at : at + BLOCK])

    for name, weight in (("XOR", 1), ("product", 0x8E)):
        add(weight)
        seconds = []
        for _ in range(5):
            seconds.append(timed(functools.partial(add, weight)))
        rate = size / statistics.median(seconds) / 1e9
        yield {"measure": "limit", "limit": f"{name}, {library()}", "gb_per_s": rate}


def measure(job: Line) -> Iterator[Line]:
    """A worker: nodes protect each other; then one of them is lost, again and again."""
    run = uuid.uuid4().hex
    nodes = job["nodes"]
    job = {**job, "run": run, "job_id": run}
    environment = {MARKER: run, "OMP_NUM_THREADS": "1", **KEEP_HEAP}
    try:
        captured = columns(call_each_rank("parity.node", job, nodes, **environment))
        facts = {"nodes": nodes, "may_be_lost": captured["may_be_lost"][0], "state_mb": float(job["megabytes"])}
        yield {"measure": "encode", **facts, **figures(captured["rounds"], range(nodes))}
        yield {"measure": "memory of a node", **facts, **captured["memory"][0]}
        rounds: list[list[Line]] = [[] for _ in range(nodes)]
        starts = []
        for number in range(job["rounds"]):
            lines = call_ranks("parity.again", {**job, "start": number}, nodes, **environment)
            events = columns(list(map(by_event, lines)))
            if columns(events["stepped"])["state"] != captured["state"]:
                raise RuntimeError("what was restored is not what was captured")
            for node, measured in enumerate(events["measured"]):
                rounds[node].append(measured["round"])
            starts.append(phases(events))
        yield {"measure": "rebuild", **facts, **figures(rounds, range(nodes - 1, nodes))}
        yield {"measure": "lost node", **facts, **columns(starts)}
    finally:
        for process in processes(run):
            process.kill()


def figures(nodes: list[list[Line]], readers: range) -> Line:
    """Of the rounds of all nodes: what some of them read together."""
    rounds = []
    for lines in zip(*nodes, strict=True):
        of_readers = columns(lines[readers.start : readers.stop])
        of_all = columns(list(lines))
        size = sum(of_readers["bytes"])
        rates = {}
        for name in ("", "tcp_"):
            rates[f"{name}gb_per_s"] = size / max(of_readers[f"{name}s"]) / 1e9
            rates[f"{name}cpu_s_per_gb"] = sum(of_all[f"{name}cpu_s"]) / size * 1e9
        rounds.append(rates)
    return columns(rounds)


def phases(events: Line) -> Line:
    """Seconds of the slowest rank in each, from the launch to the end of the first step.

    ``events``: the lines of all ranks, by event.
    """
    seconds: Line = {}
    ended_at = [0.0] * len(events["stepped"])
    for name in ("imported", "built", "met", "fetched", "loaded"):
        began_at = ended_at
        ended_at = columns(events[name])["at"]
        seconds[f"{name}_s"] = max(map(operator.sub, ended_at, began_at))
    seconds["step_s"] = max(columns(events["stepped"])["seconds"])
    return {**seconds, "total_s": sum(seconds.values())}


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


def engine_of(job: Line, training: Any) -> Any:
    """The engine of a node. Raises: as ``SnapshotEngine``."""
    from benchmarks.training import config
    from lazysnap import SnapshotEngine

    return SnapshotEngine(replace(config(job), every_n_steps=EVERY), training.objects())


def node(job: Line) -> Iterator[Line]:
    """A worker: captures are protected, one after the other; then the last node dies."""
    import torch.distributed as dist

    from benchmarks.training import Layers, die, ready

    name = f"node{os.environ['RANK']}"
    rank = begin(job, name)
    nodes = job["nodes"]
    training = Layers(job["megabytes"])
    engine = engine_of(job, training)
    _, lost = engine._run.restart.discovery.group
    training.step_of_ones()
    size = training.state_bytes()
    engine.boundary(EVERY)
    ready(engine)
    keepers = []
    for process in processes(job["run"]):
        if "lazysnap.keeper" in process.cmdline():
            keepers.append(process)
            if f"--node={name}" in process.cmdline():
                keeper = process
    rounds = []
    for number in range(2, 2 + WARM + job["rounds"]):
        training.step_of_ones()
        dist.barrier()
        cpu_before_s = _cpu_s(keepers)
        started = time.perf_counter()
        engine.boundary(number * EVERY)
        if not engine.wait(number * EVERY, until="protected", timeout_s=DEADLINE_S):
            raise RuntimeError(f"step {number * EVERY} was not protected: {engine.statistics()}")
        seconds = time.perf_counter() - started
        dist.barrier()
        ours = {"bytes": lost * size, "s": seconds, "cpu_s": (_cpu_s(keepers) - cpu_before_s) / nodes}
        rounds.append({**ours, **bare(lost * size // (nodes - 1), range(nodes))})
    parity_mb = 2 * size / 1e6 * lost / (nodes - lost)
    memory = {"slots_mb": slot_bytes() / 1e6, "parity_mb": parity_mb, "keeper_mb": keeper.memory_full_info().uss / 1e6}
    yield {"rounds": rounds[WARM:], "may_be_lost": lost, "memory": memory, "state": training.fingerprint()}
    dist.barrier()
    if rank == nodes - 1:
        keeper.kill()
        keeper.wait()
    die()


def again(job: Line) -> None:
    """A worker: the start after that; another node is in the place of the lost one."""
    import torch.distributed as dist

    from benchmarks.training import Layers, die

    rank = int(os.environ["RANK"])
    host = f"node{rank}"
    if rank == job["nodes"] - 1:
        host = f"spare{job['start']}"
    begin(job, host)
    tell(job, "imported")
    training = Layers(job["megabytes"])
    tell(job, "built")
    engine = engine_of(job, training)
    tell(job, "met")
    dist.barrier()  # what is timed waits for nobody
    snapshot = engine._fetch()
    if snapshot is None:
        raise RuntimeError("nothing was restored")
    tell(job, "fetched")
    engine._load(snapshot)
    tell(job, "loaded")
    state = training.fingerprint()
    started = time.perf_counter()
    training.step_of_ones()
    tell(job, "stepped", seconds=time.perf_counter() - started, state=state)
    tell(job, "measured", round=rebuild(job, engine, snapshot.step))
    die()


def rebuild(job: Line, engine: Any, step: int) -> Line:
    """The part of the lost node is computed once more, by the new one, into memory that it has. Collective."""
    import torch.distributed as dist

    from lazysnap.levels.blocks import WantedBytes
    from lazysnap.resolver import Entry
    from lazysnap.restore.lost_parts import lost_parts
    from lazysnap.restore.parity import Parity
    from lazysnap.restore.peer_memory import PeerMemory
    from lazysnap.snapshots.reader import read

    rank = dist.get_rank()
    nodes = dist.get_world_size()
    inventory = engine._client.memory(DEADLINE_S)
    place = engine._world.place.node
    entries = []
    for capture in inventory.entries:
        if capture.step == step:
            entries.append(Entry("memory", capture.run_id, capture.start, step, capture.rank, nodes, node=place))
    parities = []
    for parity in inventory.parity:
        if parity.step == step:
            parities.append((place, parity))
    answers: list[Any] = [None] * nodes
    dist.all_gather_object(answers, (entries, parities))
    all_entries = []
    all_parities = []
    for entries_of_node, parities_of_node in answers:
        all_entries += entries_of_node
        all_parities += parities_of_node
    parts, computed, _ = lost_parts(all_entries, all_parities)
    group, lost = engine._run.restart.discovery.group
    out = warm(parts[0].pieces.sizes[nodes - 1])
    everyone = processes(job["run"])

    def put(at: int, data: memoryview) -> None:
        out[at : at + len(data)] = data

    ours = {"bytes": (group - lost) * len(out), "s": 0.0, "cpu_s": 0.0}
    dist.barrier()
    if rank == nodes - 1:
        cpu_before_s = _cpu_s(everyone)
        started = time.perf_counter()
        memory = PeerMemory(engine._run.restart.discovery)
        source = Parity(memory)
        source.lost = parts
        [entry] = [entry for entry in computed if entry.rank == rank]
        shard = source.open(entry, "the lost node")
        read({shard: [WantedBytes(shard.offset, shard.offset + shard.layout.size_bytes, put)]})
        memory.close()
        ours |= {"s": time.perf_counter() - started, "cpu_s": _cpu_s(everyone) - cpu_before_s}
    dist.barrier()
    return {**ours, **bare(ours["bytes"] // (nodes - 1), range(nodes - 1, nodes))}


# ------------------------------------------------------------------------------------------------ bare sockets


def bare(size: int, readers: range) -> Line:
    """Each of these nodes reads so many bytes from each other node, over a connection of each: no messages, nothing is
    compared or computed. Seconds until this node is through, and its processor time. Collective.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    nodes = dist.get_world_size()
    ports: list[Any] = [None] * nodes
    clients = []
    servers = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dist.all_gather_object(ports, listener.getsockname()[1])
        if rank in readers:
            for port in [*ports[:rank], *ports[rank + 1 :]]:
                clients.append(socket.create_connection(("127.0.0.1", port)))
        for reader in readers:
            if reader != rank:
                server, _ = listener.accept()
                servers.append(server)

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
            remaining = size
            while remaining:
                remaining -= connection.recv_into(buffer[: min(BLOCK, remaining)])
            connection.sendall(b"!")

    source = warm(BLOCK)
    ready = threading.Barrier(len(clients) + len(servers) + 1)
    transfers = []
    with ThreadPoolExecutor(len(clients) + len(servers)) as pool:
        for connection in servers:
            transfers.append(pool.submit(send, connection))
        for connection in clients:
            transfers.append(pool.submit(receive, connection))
        ready.wait()
        dist.barrier()
        cpu_started = time.process_time()
        started = time.perf_counter()
        for transfer in transfers:
            transfer.result()
        seconds = {"tcp_s": time.perf_counter() - started, "tcp_cpu_s": time.process_time() - cpu_started}
    dist.barrier()
    return seconds


def _cpu_s(sampled: list[Any]) -> float:
    """Processor time of processes, in seconds."""
    return sum(sum(process.cpu_times()[:2]) for process in sampled)
