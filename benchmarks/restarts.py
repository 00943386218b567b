"""The workers of ``restore``: every method saves once at a level, and loads again and again."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.frame import DEADLINE_S, Line, last_line, lines_of, say, start
from benchmarks.raw import KEEP_HEAP
from benchmarks.training import Training, capture, ready

PHASES = ("imports", "build", "load", "step", "total")
STEP = 1


def rounds(settings: Line) -> Iterator[Line]:
    """A worker at one level; who comes first turns."""
    ranks, url = settings["ranks"], settings["url"]
    methods = [method for method in settings["methods"] if ranks == 1 or "lightning" not in method]
    if settings["level"] == "memory":
        methods = [method for method in methods if method.startswith("lazysnap")]
    saved = {method: [by["saved"]["state"] for by in _run("save", method, settings)] for method in methods}
    os.sync()
    taken: dict[str, list[Line]] = {method: [] for method in methods}
    is_exact = dict.fromkeys(methods, True)
    for number in range(settings["rounds"]):
        turned = number % max(1, len(methods))
        for method in methods[turned:] + methods[:turned]:
            for directory in {settings["forget"], *([] if "://" in url else [url])}:
                _forget(Path(directory))
            events = _run("load", method, settings)
            taken[method].append(_phases(events))
            is_exact[method] &= saved[method] == [by["loaded"]["state"] for by in events]
    for method, found in taken.items():
        facts = {"measure": "restore", "level": settings["level"], "ranks": ranks, "method": method}
        facts |= {"bytes": found[0]["bytes"], "exact": is_exact[method]}
        yield {**facts, **{name: [one[name] for one in found] for name in PHASES}}


def _forget(directory: Path) -> None:
    """Take the bytes of all files below from the page cache; they are on the disk."""
    for file in directory.rglob("*"):
        try:
            handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # a server's file may go meanwhile
            continue
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _run(act: str, method: str, settings: Line) -> list[dict[str, Line]]:
    """One job on all its ranks: the events of each by name, times from the start of its process."""
    ranks, name = settings["ranks"], f"{method}-{settings['ranks']}"
    job = {**settings, "act": act, "method": method, "url": f"{settings['url']}/{name}"}
    job |= {"job_id": f"restore-{name}-{os.getpid()}", "threads": max(1, (os.cpu_count() or 1) // ranks)}
    if "://" not in job["url"] and job["level"] != "memory":
        Path(job["url"]).mkdir(parents=True, exist_ok=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        more = {**KEEP_HEAP, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    started, events = [], []
    for rank in range(ranks):
        local = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        begun = time.monotonic()
        started.append((begun, start("restarts.rank", job, **more, **(local if ranks > 1 else {}))))
    try:
        for begun, process in started:
            out, errors = process.communicate(timeout=DEADLINE_S)
            by = {line["event"]: {**line, "at": line["at"] - begun} for line in lines_of(out)}
            if process.returncode not in (0, -signal.SIGKILL) or ("saved" if act == "save" else "stepped") not in by:
                raise RuntimeError(f"{act} {method}: {last_line(errors) or list(by)}")
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
        imported_s, built_s, load_s = by["imported"]["at"], by["built"]["at"], by["loaded"]["seconds"]
        total_s = by["stepped"]["at"] - by["loaded"]["aside_s"]
        # The step with what a trainer does besides.
        found.append((imported_s, built_s - imported_s, load_s, total_s - built_s - load_s, total_s))
    slowest = dict(zip(PHASES, map(max, zip(*found, strict=True)), strict=True))
    return {"bytes": sum(by["stepped"]["bytes"] for by in ranks), **slowest}


# ------------------------------------------------------------------------------------------------ one rank


def rank(job: Line) -> None:
    """A worker: saves once, or loads and does a step; says when it is through with each phase."""
    # The import of what a method needs is a phase of its own.
    if "lightning" in job["method"]:
        import lightning  # noqa: F401
    if job["method"].startswith("lazysnap"):
        import lazysnap.engine  # noqa: F401
    if job["method"] == "dcp":
        from torch.distributed.checkpoint import state_dict  # noqa: F401
    if job["options"] is not None:
        import fsspec

        fsspec.config.conf["s3"] = job["options"]  # for all methods, as users set it
    if job["ranks"] > 1:
        dist.init_process_group("gloo")
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
    _barrier()  # nobody waits for the others while the clock runs
    started = time.monotonic()
    load(job, training)
    if job["device"] == "cuda":
        torch.cuda.synchronize()
    _loaded(training, time.monotonic() - started)
    training.backward(STEP)
    training.update()
    _tell("stepped", bytes=training.state_bytes())
    _barrier()
    _die()


def _tell(event: str, **facts: Any) -> None:
    say({"event": event, "at": time.monotonic(), **facts})  # the clock is the same in all processes


def _loaded(training: Training, seconds: float) -> None:
    """And what was loaded; the time for that is not counted."""
    started, state = time.monotonic(), training.fingerprint()
    _tell("loaded", seconds=seconds, state=state, aside_s=time.monotonic() - started)


def _die() -> None:
    """As a crash: a keeper that is there stays."""
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _touch(job: Line) -> None:
    """Use memory once and give it back to the heap, which keeps it (``KEEP_HEAP``), for whichever method comes."""
    torch.ones(job["touched"], dtype=torch.uint8)


def _give_state(training: Training) -> None:
    """To the optimizer, by a step that costs little."""
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.update()


def _config(job: Line) -> Any:
    from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig

    level = PersistentLevel(job["url"], every_n_steps=1, storage_options=job["options"])
    levels = () if job["level"] == "memory" else (level,)
    return SnapshotConfig(levels=levels, memory=MemoryLevel(linger_s=DEADLINE_S), job_id=job["job_id"])


def _save_lazysnap(job: Line, training: Training) -> None:
    from lazysnap import SnapshotEngine

    engine = SnapshotEngine(_config(job), training.objects())
    _give_state(training)
    engine.boundary(STEP)  # with several ranks the size of each one's part is known from here on
    ready(engine)
    _barrier()
    capture(engine, STEP + 1)
    _barrier()
    if job["level"] == "memory":
        _tell("saved", state=training.fingerprint())
        _die()
    if not engine.close():
        raise RuntimeError("the snapshot did not become durable")


def _load_lazysnap(job: Line, training: Training) -> None:
    from lazysnap import SnapshotEngine

    found = SnapshotEngine(_config(job), training.objects()).restore("latest")
    if found is None or found.level != (job["url"] if job["level"] != "memory" else "memory"):
        raise RuntimeError(f"restored {found}")


def _dcp(job: Line, training: Training) -> tuple[Line, Callable[[str], Any]]:
    """The state, which gives the optimizer one to load into; and a way to write to or read from the level."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _fsspec_filesystem
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(training.model, training.optimizer)
    where, kind = (_fsspec_filesystem, "Fsspec") if "://" in job["url"] else (dcp, "FileSystem")
    return {"model": model, "optimizer": optimizer}, lambda how: getattr(where, kind + how)(job["url"])


def _save_dcp(job: Line, training: Training) -> None:
    _give_state(training)
    state, storage = _dcp(job, training)
    dist.checkpoint.save(state, storage_writer=storage("Writer"))


def _load_dcp(job: Line, training: Training) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state, storage = _dcp(job, training)
    dist.checkpoint.load(state, storage_reader=storage("Reader"))
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(training.model, training.optimizer, **parts)


def _with_lightning(job: Line, training: Training) -> None:
    """The same under ``Trainer.fit``; what it loads is timed in its checkpoint connector, whoever provides it."""
    import lightning as L

    is_ours, saves, is_memory = job["method"] != "lightning", job["act"] == "save", job["level"] == "memory"

    class Save(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if not saves:
                _loaded(training, sum(spent))
            elif trainer.global_step == STEP:  # in memory alone: nothing else would end it
                if not callbacks[-1].engine.wait(STEP, until="captured", timeout_s=DEADLINE_S):
                    raise RuntimeError("the capture did not become whole")
                _tell("saved", state=training.fingerprint())
                _die()

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step > STEP:
                _tell("stepped", bytes=training.state_bytes())
                _die()

    callbacks: list[Any] = [Save()]
    if is_ours:
        from lazysnap import LazySnapshotCallback

        callbacks.append(LazySnapshotCallback(config=_config(job)))
    steps = STEP if saves and not is_memory else -1
    trainer = training.trainer(L, max_steps=steps, callbacks=callbacks)
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
    batches = torch.utils.data.DataLoader([training.batch_of(n) for n in range(100)], batch_size=None)
    _tell("built")
    path = f"{job['url']}/stock.ckpt"
    which: Line = {} if saves else {"ckpt_path": "latest" if is_ours else path, "weights_only": False}
    trainer.fit(training.module(L), batches, **which)
    if not is_ours:
        trainer.save_checkpoint(path)
    _tell("saved", state=training.fingerprint())
