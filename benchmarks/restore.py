"""How long until a training goes on, and what of it is the loading? Beside stock Lightning and DCP."""

import argparse
import contextlib
import itertools
import math
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.frame import DEADLINE_S, SIZES, Line, Report, Targets, by_name, lines_of, say, start, table
from benchmarks.places import LEVELS, each, list_of
from benchmarks.raw import KEEP_HEAP

PHASES = ("imports", "build", "load", "step", "total")
METHODS = ("lightning", "dcp", "lazysnap", "lazysnap-lightning")
STATE_BYTES = {"tiny": 2 << 20, "small": 40 << 20, "30m": 400 << 20, "100m": 1200 << 20}
"""About; a guest gets memory for that."""
TOUCHED = 4
"""Times the state: more than any method needs to load it."""
STEP = 1
KEYS = ("measure", "level", "method", "ranks")
COMPARED = PHASES
TARGETS = (
    # Level, method, the method that loads the same from a local disk, and how many times faster that is to be.
    ("memory", "lazysnap", "lightning", 5),
    ("memory", "lazysnap-lightning", "lightning", 5),
    ("local", "lazysnap", "dcp", 1),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="100m", help="of the model")
    parser.add_argument("--levels", type=list_of(LEVELS), default=list(LEVELS), help="of " + ", ".join(LEVELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="sharded by FSDP2 if there are several")
    parser.add_argument("--methods", type=list_of(METHODS), default=list(METHODS), help="of " + ", ".join(METHODS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")


def run(args: argparse.Namespace, report: Report) -> None:
    # Several processes in a guest: each with its own copy of the state.
    for work in each(args.levels, 2 * STATE_BYTES[args.size], report):
        for ranks in args.ranks:
            job = {"size": SIZES[args.size], "rounds": args.rounds, "ranks": ranks, "methods": args.methods}
            job |= {"device": args.device, "touched": TOUCHED * STATE_BYTES[args.size] // ranks}
            work("restore.rounds", job, args.timeout_s)
    report.show(tables(report), targets(report, args.ranks).table())


def tables(report: Report) -> str:
    names = ("level", "ranks", "method", "state MB", *PHASES, "exact")
    lines = [{**line, "state MB": line["bytes"] / 1e6, "exact": str(line["exact"])} for line in report.of("restore")]
    title = "From the start of a process to the end of its first step, in seconds"
    return table(title, names, [[line[name] for name in names] for line in lines])


def targets(report: Report, worlds: list[int]) -> Targets:
    made, lines = Targets(), by_name(report.of("restore"), "level", "method", "ranks")
    load_s = {key: statistics.median(line["load"]) for key, line in lines.items()}
    for ranks, (level, method, other, times) in itertools.product(worlds, TARGETS):
        if ranks == 1 or "lightning" not in method + other:
            text = f"{ranks} rank{'s' * (ranks > 1)}: {method} from {level}, against {other} from a local disk: load"
            reached = load_s.get(("local", other, ranks), math.nan) / load_s.get((level, method, ranks), math.nan)
            made.check(text, ">= {} times faster", times, reached)
    return made


# ------------------------------------------------------------------------------------------------ rounds, in a worker


def rounds(settings: Line) -> Iterator[Line]:
    """A worker at one level: every method saves once, and loads again and again; who comes first turns."""
    ranks, methods = settings["ranks"], settings["methods"]
    methods = [method for method in methods if ranks == 1 or "lightning" not in method]
    if settings["level"] == "memory":
        methods = [method for method in methods if method.startswith("lazysnap")]
    saved = {method: [by["saved"]["state"] for by in _run("save", method, settings)] for method in methods}
    os.sync()
    taken: dict[str, list[Line]] = {method: [] for method in methods}
    is_exact = dict.fromkeys(methods, True)
    for number in range(settings["rounds"]):
        turned = number % len(methods) if methods else 0
        for method in methods[turned:] + methods[:turned]:
            for directory in (settings["forget"], *([] if "://" in settings["url"] else [settings["url"]])):
                _forget(Path(directory))
            events = _run("load", method, settings)
            taken[method].append(_phases(events))
            is_exact[method] &= saved[method] == [by["loaded"]["state"] for by in events]
    facts = {"measure": "restore", "level": settings["level"], "ranks": ranks}
    for method, found in taken.items():
        more = {"method": method, "bytes": found[0]["bytes"], "exact": is_exact[method]}
        yield {**facts, **more, **{name: [one[name] for one in found] for name in PHASES}}


def _forget(directory: Path) -> None:
    """Take the bytes of all files below from the page cache; they are on the disk."""
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):  # a server's file may go meanwhile
            if not file.is_symlink() and file.is_file():
                handle = os.open(file, os.O_RDONLY)
                try:
                    os.fdatasync(handle)
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(handle)


def _run(act: str, method: str, settings: Line) -> list[dict[str, Line]]:
    """One job on all its ranks: the events of each by name, times from the start of its process."""
    ranks = settings["ranks"]
    name = f"{method}-{ranks}"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    job = {**settings, "act": act, "method": method, "url": f"{settings['url']}/{name}", "port": port}
    job |= {"job_id": f"restore-{name}-{os.getpid()}", "threads": max(1, (os.cpu_count() or 1) // ranks)}
    if "://" not in job["url"] and job["level"] != "memory":
        Path(job["url"]).mkdir(parents=True, exist_ok=True)
    started = []
    for rank in range(ranks):
        local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        more = {**KEEP_HEAP, **local, "MASTER_PORT": str(port)} if ranks > 1 else KEEP_HEAP
        started.append((time.monotonic(), start("restore.rank", {**job, "rank": rank}, **more)))
    events = []
    try:
        for begun, process in started:
            out, errors = process.communicate(timeout=DEADLINE_S)
            by = {line["event"]: {**line, "at": line["at"] - begun} for line in lines_of(out)}
            if process.returncode not in (0, -signal.SIGKILL) or ("saved" if act == "save" else "stepped") not in by:
                raise RuntimeError(f"{act} {method}: " + (errors.strip().splitlines() or [f"got {list(by)}"])[-1])
            events.append(by)
    finally:
        for _, process in started:
            process.kill()
            process.wait()
    return events


def _phases(ranks: list[dict[str, Line]]) -> Line:
    """Seconds of the slowest rank in each phase; ``total`` is from the start of a process to the end of its step."""
    found = []
    for by in ranks:
        load_s, total_s = by["loaded"]["seconds"], by["stepped"]["at"] - by["loaded"]["aside_s"]
        step_s = total_s - by["built"]["at"] - load_s  # with a trainer: what it does besides, too
        build_s = by["built"]["at"] - by["imported"]["at"]
        found.append(dict(zip(PHASES, (by["imported"]["at"], build_s, load_s, step_s, total_s), strict=True)))
    size = sum(by["stepped"]["bytes"] for by in ranks)
    return {"bytes": size, **{name: max(one[name] for one in found) for name in PHASES}}


# ------------------------------------------------------------------------------------------------ one rank


def rank(job: Line) -> None:
    """A worker: saves once, or loads and does a step; says when it is through with each phase."""
    import torch

    # The import of what a method needs is a phase of its own.
    if "lightning" in job["method"]:
        import lightning  # noqa: F401
    if job["method"].startswith("lazysnap"):
        import lazysnap.engine  # noqa: F401
    if job["method"] == "dcp":
        import torch.distributed.checkpoint.state_dict
    from benchmarks.training import Training

    if job["options"] is not None:
        import fsspec

        fsspec.config.conf["s3"] = job["options"]  # for all methods the same, as users set it
    if job["ranks"] > 1:
        torch.distributed.init_process_group("gloo", rank=job["rank"], world_size=job["ranks"])
    _tell("imported")
    torch.set_num_threads(job["threads"])
    training = Training(job["size"], device=job["device"], ranks=job["ranks"])
    if "lightning" in job["method"]:
        _with_lightning(job, training)
        return
    _tell("built")
    save, load = {"lazysnap": (_save_lazysnap, _load_lazysnap), "dcp": (_save_dcp, _load_dcp)}[job["method"]]
    if job["act"] == "save":
        save(job, training)
        _tell("saved", state=training.fingerprint())
        return
    _touch(job)
    _barrier(job)  # nobody waits for the others while the clock runs
    started = time.monotonic()
    load(job, training)
    _loaded(training, time.monotonic() - started)
    training.backward(STEP)
    training.update()
    _tell("stepped", bytes=training.state_bytes())
    _barrier(job)
    _die()


def _tell(event: str, **facts: Any) -> None:
    say({"event": event, "at": time.monotonic(), **facts})  # the clock is the same in all processes


def _loaded(training: Any, seconds: float) -> None:
    """And what was loaded; the time for that is not counted."""
    started = time.monotonic()
    state = training.fingerprint()
    _tell("loaded", seconds=seconds, state=state, aside_s=time.monotonic() - started)


def _die() -> None:
    """As a crash: a keeper that is there stays."""
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _barrier(job: Line) -> None:
    if job["ranks"] > 1:
        import torch.distributed as dist

        dist.barrier()


def _touch(job: Line) -> None:
    """Use memory once and give it back to the heap, which keeps it (``KEEP_HEAP``), for whichever method comes."""
    import torch

    torch.ones(job["touched"], dtype=torch.uint8)


def _give_gradients(training: Any) -> None:
    """A step that costs little, so that the optimizer has its state."""
    import torch

    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.update()


def _config(job: Line) -> Any:
    from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig

    level = () if job["level"] == "memory" else (PersistentLevel(job["url"], every_n_steps=1),)
    return SnapshotConfig(levels=level, memory=MemoryLevel(linger_s=DEADLINE_S), job_id=job["job_id"])


def _save_lazysnap(job: Line, training: Any) -> None:
    from benchmarks.training import capture, ready
    from lazysnap import SnapshotEngine

    engine = SnapshotEngine(_config(job), training.objects())
    _give_gradients(training)
    engine.boundary(STEP)  # with several ranks the size of each one's part is known from here on
    ready(engine)
    _barrier(job)
    capture(engine, STEP + 1)
    if job["level"] == "memory":
        _barrier(job)
        _tell("saved", state=training.fingerprint())
        _die()
    if not engine.close():
        raise RuntimeError("the snapshot did not become durable")


def _load_lazysnap(job: Line, training: Any) -> None:
    from lazysnap import SnapshotEngine

    engine = SnapshotEngine(_config(job), training.objects())
    found = engine.restore("latest")
    level = None if found is None else found.level
    if level != (job["url"] if job["level"] != "memory" else "memory"):
        raise RuntimeError(f"restored from {level}: {found and found.skipped}")


def _dcp_state(training: Any) -> Line:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def _dcp_storage(job: Line, kind: str) -> Any:
    import torch.distributed.checkpoint as dcp

    if "://" not in job["url"]:
        return getattr(dcp, f"FileSystem{kind}")(job["url"])
    from torch.distributed.checkpoint import _fsspec_filesystem

    return getattr(_fsspec_filesystem, f"Fsspec{kind}")(job["url"])


def _save_dcp(job: Line, training: Any) -> None:
    import torch.distributed.checkpoint as dcp

    _give_gradients(training)
    dcp.save(_dcp_state(training), storage_writer=_dcp_storage(job, "Writer"))


def _load_dcp(job: Line, training: Any) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = _dcp_state(training)  # gives the optimizer a state to load into
    dcp.load(state, storage_reader=_dcp_storage(job, "Reader"))
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(training.model, training.optimizer, **parts)


def _with_lightning(job: Line, training: Any) -> None:
    """The same under ``Trainer.fit``; what it loads is timed in its checkpoint connector, whoever provides it."""
    import lightning as L
    import torch

    is_ours, saves, is_memory = job["method"] != "lightning", job["act"] == "save", job["level"] == "memory"

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = training.model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(training.batch_of(index))

        def configure_optimizers(self) -> Any:
            return training.optimizer

    class End(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if saves and trainer.global_step == STEP:  # in memory alone: nothing else would end it
                if not ours.engine.wait(STEP, until="captured", timeout_s=DEADLINE_S):
                    raise RuntimeError("the capture did not become whole")
                _tell("saved", state=training.fingerprint())
                _die()

            if not saves:
                _loaded(training, sum(spent))

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step > STEP:
                _tell("stepped", bytes=training.state_bytes())
                _die()

    callbacks: list[Any] = [End()]
    if is_ours:
        from lazysnap import LazySnapshotCallback

        ours = LazySnapshotCallback(config=_config(job))
        callbacks.append(ours)
    trainer = L.Trainer(
        max_steps=STEP if saves and not is_memory else -1,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
    )
    connector, spent = trainer._checkpoint_connector, []

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                spent.append(time.monotonic() - started)

        return call

    for name in ("_restore_modules_and_callbacks", "restore_training_state", "resume_end"):
        setattr(connector, name, timed(getattr(connector, name)))
    _touch(job)
    batches = torch.utils.data.DataLoader(torch.zeros(1000, 1), num_workers=0)
    _tell("built")
    path = f"{job['url']}/stock.ckpt"
    if not saves:
        trainer.fit(Module(), batches, ckpt_path="latest" if is_ours else path, weights_only=False)
        return
    trainer.fit(Module(), batches)
    if not is_ours:
        trainer.save_checkpoint(path)
    _tell("saved", state=training.fingerprint())
