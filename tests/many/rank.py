"""One rank of a small training over gloo that resumes from "latest"; started as a process, killed by the tests.

usage: rank.py SETTINGS_JSON     (kind, rank, world, meeting, directory, steps, journal, result, every, levels)

``kind``: ddp, fsdp (FSDP2), hsdp, tp (FSDP2 x TP), plain; beat, talk: no training at all. ``by_rank`` holds what
differs. The journal gets one line per event, each a single append. Where there are as many GPUs as ranks, each rank
trains on one, over NCCL; else on the CPU.
"""

import contextlib
import ctypes
import datetime
import hashlib
import json
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.waiting import TIMEOUT_S, capture_for_all, stop, until
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lazysnap import MemoryLevel, PersistentLevel, Redundancy, SnapshotConfig, SnapshotEngine
from lazysnap.errors import WaitTimeout
from lazysnap.keeper.trainer_link import Silence
from lazysnap.ranks.world import World
from lazysnap.state.sharding import local_of

WIDTH = 24


class Net(torch.nn.Module):
    """Odd sizes, a buffer that changes in forward; ``base``: what is not trained; ``tied``: head to embedding."""

    def __init__(self, *, base: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, 50_000).requires_grad_(False) if base else None
        self.embed = torch.nn.Embedding(37, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.first = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.second = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 37, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(3))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens)) * self.scale.sum()
        if self.base is not None:
            hidden = hidden + self.base(hidden)[:, :WIDTH]
        return self.head(hidden + self.second(torch.relu(self.first(hidden))))


class Hoarder(torch.optim.SGD):
    """Keeps more than anybody could have known before."""

    def step(self, closure: Callable | None = None) -> None:
        super().step(closure)
        parameter = self.param_groups[0]["params"][0]
        self.state[parameter].setdefault("hoard", torch.zeros(self.size, dtype=torch.uint8))


class Patience:
    """Seconds after which a keeper counts as silent, also on connections that are there."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __get__(self, silence: Silence, owner: type) -> float:
        return self.seconds

    def __set__(self, silence: Silence, seconds: float) -> None:
        pass


class Gatherer:
    """Asks all ranks whenever its state is collected, as some metrics do."""

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def state_dict(self) -> dict:
        dist.all_reduce(self.total.fill_(1))
        return {"total": int(self.total)}

    def load_state_dict(self, state: dict) -> None:
        pass


class Unloader:
    """Does not take its state back, or dies of it."""

    def __init__(self, *, dies: bool) -> None:
        self.dies = dies

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("not today")


def make_odd(odd: str | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> object:
    """What this rank alone has that cannot be restored; what its loop keeps."""
    if odd == "sparse":
        model.register_buffer("odd", torch.eye(3).to_sparse())
    if odd == "swapped":
        optimizer.param_groups[0]["params"].reverse()
    # A dict is filled in place, an object loads itself. Whose it is comes back, or is known at a fresh start.
    return Unloader(dies=odd == "dying") if odd in ("unloadable", "dying") else {"rank": None, "drawn": 0.0}


def device_of(rank: int, world: int) -> torch.device:
    """Where a rank trains. NCCL refuses two ranks on one GPU."""
    if torch.cuda.device_count() < world:
        return torch.device("cpu")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def build(kind: str, world: int, settings: dict, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    model = Net(base=settings.get("base", False), tied=settings.get("tied", False)).to(device)
    if kind == "ddp":
        # Unless parameters may be unused, DDP changes its buckets after the first step: with more than two ranks
        # gradients are then added up in another order right after a start than later on, and no two runs are equal.
        return torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)
    if kind == "tp":
        mesh = init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])
    if kind == "hsdp":
        return fully_shard(
            model, mesh=init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=("replica", "shard"))
        )
    if kind == "fsdp":
        mesh = init_device_mesh(device.type, (world,))
        for part in (model.first, model.second):
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters and optimizer, settings included, as a whole, whatever the mesh; collective for DTensors."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(whole(parameter.detach()).contiguous().cpu().numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for key in sorted(state):
            total.update(whole(torch.as_tensor(state[key])).contiguous().cpu().numpy().tobytes())
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        total.update(json.dumps(settings, sort_keys=True).encode())
    return total.hexdigest()


def own(model: torch.nn.Module, loop: dict) -> list[str]:
    """What is of this rank alone: its buffers, what its loop keeps, and what it would draw next."""
    total = hashlib.sha256()
    for buffer in model.buffers():
        total.update(whole(buffer).cpu().numpy().tobytes())
    ahead, plain = torch.Generator(), random.Random()
    ahead.set_state(torch.get_rng_state())
    plain.setstate(random.getstate())
    draw = torch.rand((), generator=ahead, dtype=torch.float64).item()
    return [total.hexdigest(), f"{loop['rank']}:{loop['drawn']}", f"{draw}:{plain.random()}"]


def load_by_dcp(directory: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As a user of stock torch would, who knows nothing of an engine."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def count_exchanges() -> Callable[[], int]:
    """Count from now on how often the ranks tell each other something: two gathers each time."""
    gathers, gather = [], dist.all_gather
    dist.all_gather = lambda *args, **options: gathers.append(args) or gather(*args, **options)
    return lambda: len(gathers) // 2


def beat(rank: int, timeout_s: float, write: Callable[..., None]) -> None:
    """Rank 1 works until the ranks have told each other four times, in six seconds, that it does."""
    world, exchanges = World(timeout_s), count_exchanges()

    def work() -> int:
        while rank == 1 and exchanges() < 4:
            time.sleep(0.01)
        return rank and exchanges()

    write("told", world.exchange_after("working", work))


def talk(rank: int, timeout_s: float, write: Callable[..., None]) -> None:
    """Every rank says something of another length, one of them very much; the program has set a default device."""
    with torch.device("meta"):
        told = World(timeout_s).exchange("talking", [rank, "é" * (300_000 if rank == 1 else rank)])
    write("told", *(f"{number}:{len(text)}" for number, text in told))


def keeper_of(engine: SnapshotEngine) -> int | None:
    return engine._client.keeper_pid


@contextlib.contextmanager
def timed(write: Callable[..., None]) -> Iterator[None]:
    """Tells how long others were waited for in vain."""
    started = time.monotonic()
    try:
        yield
    except WaitTimeout:
        write("missed", time.monotonic() - started)
        raise


def listen(text: str) -> threading.Event:
    """Is set by a line of the log that holds ``text``."""
    said = threading.Event()

    class Listener(logging.StreamHandler):
        def emit(self, record: logging.LogRecord) -> None:
            super().emit(record)
            if text in record.getMessage():
                said.set()

    logging.getLogger("lazysnap").addHandler(Listener())
    return said


def live_on(host: str) -> None:
    """Be on another machine, as far as this process and the keeper that it starts can tell: by its name."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x04000000):  # CLONE_NEWUTS
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(host)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def main() -> None:
    settings = json.loads(sys.argv[1])
    settings.update(settings.get("by_rank", {}).get(str(settings["rank"]), {}))
    if "node" in settings:
        socket.gethostname = lambda: settings["node"]
    kind, rank, world = settings["kind"], settings["rank"], settings["world"]
    if "clock_s" in settings:  # the machine's clock was set
        clock = time.time_ns
        time.time_ns = lambda: clock() + settings["clock_s"] * 10**9
    if "host" in settings:
        live_on(settings["host"])
    exchanges = count_exchanges()
    journal = os.open(settings["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(*words: object) -> None:
        os.write(journal, (" ".join(map(str, [rank, *words])) + "\n").encode())

    write("pid", os.getpid())

    heard = listen(settings["until_heard"]) if "until_heard" in settings else None
    device = device_of(rank, world)
    if world > 1 or kind != "plain":
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{settings['meeting']}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=settings.get("timeout_s", 30)),
        )
    if settings.get("absent"):
        threading.Event().wait()
    if kind in ("beat", "talk"):
        (beat if kind == "beat" else talk)(rank, settings["collective_timeout_s"], write)
        os._exit(0)
    model = build(kind, world, settings, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = Hoarder(trained, lr=1e-2) if "hoard" in settings else torch.optim.AdamW(trained, lr=1e-2)
    if "hoard" in settings:
        optimizer.size = settings["hoard"] << 20
    loop = make_odd(settings.get("odd"), model, optimizer)
    if settings.get("dcp"):
        load_by_dcp(settings["dcp"], model, optimizer)
        write("loaded", digest(model, optimizer))
        os._exit(0)
    every = settings.get("every", 1)
    levels = tuple(PersistentLevel(**level) for level in settings["levels"])
    parity = settings.get("parity", 1)
    redundancy = None
    if parity is not None:
        redundancy = Redundancy(parity=parity, every_n_steps=1)
    config = SnapshotConfig(
        every_n_steps=every,
        levels=levels,
        verify_restart=settings.get("verify_restart", False),
        memory=MemoryLevel(
            linger_s=settings.get("linger_s", 30.0),
            max_bytes=settings.get("max_bytes"),
            spill_dir=settings.get("spill_dir"),
        ),
        require_memory=settings.get("require_memory", False),
        collective_timeout_s=settings.get("collective_timeout_s", 30.0),
        io_timeout_s=settings.get("io_timeout_s", 20.0),
        redundancy=redundancy,
    )
    state = {"model": model, "optimizer": optimizer, "loop": loop}
    if settings.get("gathers"):
        state["gathered"] = Gatherer()
    with timed(write):
        engine = SnapshotEngine(config, state)
    # What each draws is its own from the start, as with a sampler or dropout.
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    with timed(write):
        snapshot = None if settings.get("fresh") else engine.restore(settings.get("which", "latest"))
    if snapshot is None:
        loop["rank"] = rank
    start = snapshot.step if snapshot else 0
    write("resumed", start, snapshot.level if snapshot else "nothing", digest(model, optimizer), *own(model, loop))
    if settings.get("resumes_protected"):
        # A deadline that is longer than a test may take: what is known is answered at once.
        until(lambda: engine.wait(until="protected", timeout_s=3600), lambda: "the resumed step is not protected")
        write("protected", start)
    if settings.get("look"):
        engine.abandon()
        os._exit(0)
    write("keeper", start, keeper := keeper_of(engine))
    if "thaw" in settings:  # the keeper was stopped while the engines of all ranks were made
        dist.barrier()
        os.kill(settings["thaw"], signal.SIGCONT)
    if not settings.get("unready"):
        engine._prepare()
        write("ready", engine._wait_ready(timeout_s=TIMEOUT_S))
    if "silent_after_s" in settings:  # only now: the keeper had as long as it took to start
        Silence._patience_s = Patience(settings["silent_after_s"])
    for step in range(start + 1, settings["steps"] + 1):
        # The same data whatever the world: each rank takes its part of the global batch.
        generator = torch.Generator().manual_seed(step)
        # Ranks of one tensor-parallel group work on the same part.
        part, parts = (rank // 2, world // 2) if kind == "tp" else (rank, world)
        tokens = torch.randint(0, 37, (16,), generator=generator)[part::parts].to(device)
        loop["drawn"] = torch.rand(()).item() + random.random()
        loss = torch.nn.functional.cross_entropy(model(tokens), tokens)
        # Ranks of one tensor-parallel group draw different numbers, and must have the same loss.
        (loss if kind == "tp" else loss * loop["drawn"]).backward()
        optimizer.step()
        for group in optimizer.param_groups:  # as a schedule does
            group["lr"] *= 0.98
        optimizer.zero_grad()
        if settings.get("averaged") and step > 2:
            for parameter in model.parameters():
                if not parameter.requires_grad:  # as teachers are updated
                    with torch.no_grad():
                        local_of(parameter).mul_(0.9)
        time.sleep(settings.get("lag_s", 0.0))  # a rank that is slower than the others
        if settings.get("swells_at") == step:
            loop["room"] = torch.zeros(12 << 20, dtype=torch.uint8)  # other slots are needed from here on
        write("trained", step)
        if settings.get("silent"):
            continue
        if settings.get("renewed_at") == step:
            until(lambda: keeper_of(engine) not in (None, keeper), lambda: "another keeper")
            write("renewed", engine._wait_ready(timeout_s=TIMEOUT_S))
        if engine.boundary(step):
            write("begun", step)
        else:
            write("skipped", step)
            if engine.statistics().unprotected is None or "thaw" in settings:
                engine._wait_ready(timeout_s=TIMEOUT_S)  # the first boundary asks for memory
        if settings.get("keep_at") == step:
            write("named", engine.keep("mine"))
        engine.gate()
        write("gated", step)
        write("collectives", exchanges())
        if "values" in settings:
            engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
            write("kept", step, engine.keep_best("loss", settings["values"][step - 1], count=2))
        if settings.get("freeze_at") == step:
            stop(keeper_of(engine))
        if settings.get("hear_at") == step:
            until(lambda: engine.statistics() is not None and heard.is_set(), settings["until_heard"])
        if settings.get("thaw_at") == step:
            os.kill(keeper_of(engine), signal.SIGCONT)
        if step > settings.get("until_stored_after", settings["steps"]):
            # Whatever it takes: ranks stop together when a newer snapshot is stored on all.
            newest = max(engine.statistics().last_durable_step.values(), default=0)
            is_stored = torch.tensor(int(newest > settings["until_stored_after"]))
            dist.all_reduce(is_stored, dist.ReduceOp.MIN)
            settings["stop_at"] = step if is_stored else None
        if settings.get("hold_at") == step:
            write("held", step)
            until(lambda: os.path.exists(settings["result"] + "-go"), lambda: "being let go")
        if settings.get("stop_at") == step:
            write("stopped", step, digest(model, optimizer), *own(model, loop))
            if settings.get("wait_protected"):
                capture_for_all(engine, step)
                write(
                    "protected", step, engine.wait(step, until="protected", timeout_s=settings.get("wait_s", TIMEOUT_S))
                )
            if settings.get("wait_durable"):
                write("durable", step, engine.wait(step, until="durable", timeout_s=settings.get("wait_s", TIMEOUT_S)))
            engine.abandon()
            os._exit(9)
    if heard is not None:
        until(lambda: engine.statistics() is not None and heard.is_set(), settings["until_heard"])
    write("closed", engine.close())
    write("persisted", *engine.statistics().persisted.values())
    with open(f"{settings['result']}.{rank}", "w") as result:
        result.write(" ".join([digest(model, optimizer), *own(model, loop)]))
    if dist.is_initialized():
        sys.stdout.flush()
        dist.barrier()
        os._exit(0)  # gloo's own tear-down aborts or hangs now and then, with or without snapshots


if __name__ == "__main__":
    main()
