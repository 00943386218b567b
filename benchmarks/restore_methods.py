"""The workers of ``restore``: every method saves once at a level, and loads again and again."""

import functools
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.raw import KEEP_HEAP, timed
from benchmarks.training import Training, capture, config, die, engine_of, ready
from benchmarks.workers import Line, by_event, call_ranks, columns, tell

PARTS = ("model_state_dict", "optim_state_dict")
STEP = 1


def rounds(job: Line) -> Iterator[Line]:
    """A worker at one level; who comes first turns."""
    ranks = job["ranks"]
    level = job["level"]
    saved = {}
    for method in job["methods"]:
        if ranks > 1 and "lightning" in method:
            continue
        if level != "memory" or method.startswith("lazysnap"):
            saved[method] = columns(_run("save", method, job)["saved"])["state"]
    os.sync()
    methods = list(saved)
    loads: dict[str, list[Line]] = defaultdict(list)
    state_mb = {}
    exact = dict.fromkeys(methods, "yes")
    for number in range(job["rounds"]):
        for method in methods[number % len(methods) :] + methods[: number % len(methods)]:
            for directory in (job["directory"], job["url"]):
                _forget(Path(directory))
            events = _run("load", method, job)
            loads[method].append(_phases(events))
            state_mb.setdefault(method, sum(columns(events["stepped"])["bytes"]) / 1e6)
            if columns(events["loaded"])["state"] != saved[method]:
                exact[method] = "NO"
    for method in methods:
        facts = {"measure": "restore", "level": level, "ranks": ranks, "method": method}
        yield {**facts, "state_mb": state_mb[method], "exact": exact[method], **columns(loads[method])}


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


def _run(act: str, method: str, job: Line) -> Line:
    """One job on all its ranks: the lines of all ranks, by event."""
    name = f"{method}-{job['ranks']}"
    job = {**job, "act": act, "method": method, "url": f"{job['url']}/{name}", "job_id": f"{name}-{os.getpid()}"}
    last_event = "stepped"
    if act == "save":
        last_event = "saved"
    ranks = list(map(by_event, call_ranks("restore_methods.rank", job, job["ranks"], **KEEP_HEAP)))
    for events in ranks:
        if last_event not in events:
            raise RuntimeError(f"{act} {method}: no more than {list(map(list, ranks))}")
    return columns(ranks)


def _phases(events: Line) -> Line:
    """Seconds of the slowest rank in each phase; ``total`` is from the start of a process to the end of its step."""
    phases: dict[str, float] = {}
    for imported, built, loaded, stepped in zip(
        events["imported"], events["built"], events["loaded"], events["stepped"], strict=True
    ):
        total_s = stepped["at"] - loaded["aside_s"]
        seconds = {
            "imports_s": imported["at"],
            "build_s": built["at"] - imported["at"],
            "load_s": loaded["seconds"],
            "step_s": total_s - built["at"] - loaded["seconds"],  # with what a trainer does besides
            "total_s": total_s,
        }
        for name in seconds:
            phases[name] = max(phases.get(name, -math.inf), seconds[name])
    return phases


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
    tell(job, "imported")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job["ranks"]))
    training = Training(job)
    if "lightning" in job["method"]:
        _with_lightning(job, training)
        return
    tell(job, "built")
    save_state = _save_dcp
    load_state = _load_dcp
    if job["method"] == "lazysnap":
        save_state = _save_lazysnap
        load_state = _load_lazysnap
    if job["act"] == "save":
        save_state(job, training)
        _saved(job, training)
    _touch(job)
    _barrier()  # nobody waits for the others while the clock runs

    def load() -> None:
        load_state(job, training)
        if job["device"] == "cuda":
            torch.cuda.synchronize()

    _loaded(job, training, timed(load))
    training.backward(STEP)
    training.update()
    _stepped(job, training)


def _saved(job: Line, training: Training) -> None:
    tell(job, "saved", state=training.fingerprint())
    die()


def _loaded(job: Line, training: Training, seconds: float) -> None:
    """And what was loaded; the time for that is not counted."""
    started = time.monotonic()
    state = training.fingerprint()
    tell(job, "loaded", seconds=seconds, state=state, aside_s=time.monotonic() - started)


def _stepped(job: Line, training: Training) -> None:
    tell(job, "stepped", bytes=training.state_bytes())
    die()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _touch(job: Line) -> None:
    """Use memory once and give it back to the heap, which keeps it (``KEEP_HEAP``), for whichever method comes."""
    torch.ones(job["touched"], dtype=torch.uint8)


def _save_lazysnap(job: Line, training: Training) -> None:
    engine = engine_of(job, training.objects())
    training.step_of_ones()
    engine.boundary(STEP)  # with several ranks the size of each one's part is known from here on
    ready(engine)
    _barrier()
    capture(engine, STEP + 1)
    _barrier()
    if job["level"] != "memory" and not engine.close():
        raise RuntimeError("the snapshot did not become durable")


def _load_lazysnap(job: Line, training: Training) -> None:
    expected = job["url"]
    if job["level"] == "memory":
        expected = "memory"
    snapshot = engine_of(job, training.objects()).restore("latest")
    if snapshot is None or snapshot.level != expected:
        raise RuntimeError(f"restored {snapshot}")


def _save_dcp(job: Line, training: Training) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    training.step_of_ones()
    dcp.save(
        dict(zip(PARTS, get_state_dict(training.model, training.optimizer), strict=True)), checkpoint_id=job["url"]
    )


def _load_dcp(job: Line, training: Training) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    # This gives the optimizer a state to load into.
    state = dict(zip(PARTS, get_state_dict(training.model, training.optimizer), strict=True))
    dcp.load(state, checkpoint_id=job["url"])
    set_state_dict(training.model, training.optimizer, **state)


def _with_lightning(job: Line, training: Training) -> None:
    """The same under ``Trainer.fit``; what it loads is timed in its checkpoint connector, whoever provides it."""
    import lightning as L

    is_ours = job["method"] != "lightning"
    saves = job["act"] == "save"
    path = f"{job['url']}/stock.ckpt"
    max_steps = -1
    if saves and job["level"] != "memory":
        max_steps = STEP
    spent: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if not saves:
                _loaded(job, training, sum(spent))
            elif trainer.global_step == STEP:  # in memory alone: nothing else would end it
                if not callbacks[-1].engine.wait(STEP, until="captured", timeout_s=60.0):
                    raise RuntimeError("the capture did not become whole")
                _saved(job, training)

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step > STEP:
                _stepped(job, training)

    callbacks: list[Any] = [Watch()]
    if is_ours:
        from lazysnap import LazySnapshotCallback

        callbacks.append(LazySnapshotCallback(config=config(job)))
    trainer = training.trainer(max_steps=max_steps, callbacks=callbacks)
    connector = trainer._checkpoint_connector

    def clocked(original: Callable[..., Any]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            spent.append(timed(functools.partial(original, *args, **kwargs)))

        return call

    for name in ("_restore_modules_and_callbacks", "restore_training_state", "resume_end"):
        setattr(connector, name, clocked(getattr(connector, name)))
    _touch(job)
    tell(job, "built")
    checkpoint: Line = {}
    if not saves:
        checkpoint = {"ckpt_path": path, "weights_only": False}
        if is_ours:
            checkpoint["ckpt_path"] = "latest"
    training.fit(trainer, 100, **checkpoint)
    if not is_ours:
        trainer.save_checkpoint(path)
    _saved(job, training)
