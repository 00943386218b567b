"""The workers of ``restore``: every method saves once at a level, and loads again and again."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.raw import KEEP_HEAP, timed
from benchmarks.training import Training, capture, config, engine_of, ready
from benchmarks.workers import Line, call_ranks, tell

PHASES = ("imports_s", "build_s", "load_s", "step_s", "total_s")
PARTS = ("model_state_dict", "optim_state_dict")
STEP = 1


def rounds(job: Line) -> Iterator[Line]:
    """A worker at one level; who comes first turns."""
    ranks, level = job["ranks"], job["level"]
    methods = [method for method in job["methods"] if ranks == 1 or "lightning" not in method]
    methods = [method for method in methods if level != "memory" or method.startswith("lazysnap")]
    saved = {method: [by["saved"]["state"] for by in _run("save", method, job)] for method in methods}
    os.sync()
    taken: dict[str, list[Line]] = {method: [] for method in methods}
    is_exact = dict.fromkeys(methods, True)
    for number in range(job["rounds"]):
        for method in methods[number % len(methods) :] + methods[: number % len(methods)]:
            for directory in (job["directory"], job["url"]):
                _forget(Path(directory))
            events = _run("load", method, job)
            taken[method].append({"state_mb": sum(by["stepped"]["bytes"] for by in events) / 1e6, **_phases(events)})
            is_exact[method] &= saved[method] == [by["loaded"]["state"] for by in events]
    for method, found in taken.items():
        facts = {"measure": "restore", "level": level, "ranks": ranks, "method": method}
        facts |= {"state_mb": found[0]["state_mb"], "exact": "yes" if is_exact[method] else "NO"}
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


def _run(act: str, method: str, job: Line) -> list[dict[str, Line]]:
    """One job on all its ranks: the events of each by name."""
    name = f"{method}-{job['ranks']}"
    job = {**job, "act": act, "method": method, "url": f"{job['url']}/{name}", "job_id": f"{name}-{os.getpid()}"}
    said = call_ranks("restarts.rank", job, job["ranks"], **KEEP_HEAP)
    events = [{line["event"]: line for line in lines} for lines in said]
    if any(("saved" if act == "save" else "stepped") not in by for by in events):
        raise RuntimeError(f"{act} {method}: no more than {list(map(list, events))}")
    return events


def _phases(ranks: list[dict[str, Line]]) -> Line:
    """Seconds of the slowest rank in each phase; ``total`` is from the start of a process to the end of its step."""
    found = []
    for by in ranks:
        imported_s, built_s, load_s = by["imported"]["at"], by["built"]["at"], by["loaded"]["seconds"]
        total_s = by["stepped"]["at"] - by["loaded"]["aside_s"]
        # The step with what a trainer does besides.
        found.append((imported_s, built_s - imported_s, load_s, total_s - built_s - load_s, total_s))
    return dict(zip(PHASES, map(max, zip(*found, strict=True)), strict=True))


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
    is_ours = job["method"] == "lazysnap"
    if job["act"] == "save":
        (_save_lazysnap if is_ours else _save_dcp)(job, training)
        _saved(job, training)
    _touch(job)
    _barrier()  # nobody waits for the others while the clock runs

    def load() -> None:
        (_load_lazysnap if is_ours else _load_dcp)(job, training)
        if job["device"] == "cuda":
            torch.cuda.synchronize()

    _loaded(job, training, timed(load))
    training.backward(STEP)
    training.update()
    _stepped(job, training)


def _saved(job: Line, training: Training) -> None:
    tell(job, "saved", state=training.fingerprint())
    _die()


def _loaded(job: Line, training: Training, seconds: float) -> None:
    """And what was loaded; the time for that is not counted."""
    started, state = time.monotonic(), training.fingerprint()
    tell(job, "loaded", seconds=seconds, state=state, aside_s=time.monotonic() - started)


def _stepped(job: Line, training: Training) -> None:
    tell(job, "stepped", bytes=training.state_bytes())
    _die()


def _die() -> None:
    """As a crash: a keeper that is there stays."""
    _barrier()
    os._exit(0)


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


def _save_lazysnap(job: Line, training: Training) -> None:
    engine = engine_of(job, training.objects())
    _give_state(training)
    engine.boundary(STEP)  # with several ranks the size of each one's part is known from here on
    ready(engine)
    _barrier()
    capture(engine, STEP + 1)
    _barrier()
    if job["level"] != "memory" and not engine.close():
        raise RuntimeError("the snapshot did not become durable")


def _load_lazysnap(job: Line, training: Training) -> None:
    found = engine_of(job, training.objects()).restore("latest")
    if found is None or found.level != (job["url"] if job["level"] != "memory" else "memory"):
        raise RuntimeError(f"restored {found}")


def _save_dcp(job: Line, training: Training) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    _give_state(training)
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

    is_ours, saves, is_memory = job["method"] != "lightning", job["act"] == "save", job["level"] == "memory"
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
    trainer = training.trainer(max_steps=STEP if saves and not is_memory else -1, callbacks=callbacks)
    connector = trainer._checkpoint_connector

    def clocked(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: spent.append(timed(lambda: original(*args, **kwargs)))

    for name in ("_restore_modules_and_callbacks", "restore_training_state", "resume_end"):
        setattr(connector, name, clocked(getattr(connector, name)))
    _touch(job)
    tell(job, "built")
    path = f"{job['url']}/stock.ckpt"
    training.fit(trainer, 100, **({} if saves else {"ckpt_path": "latest" if is_ours else path, "weights_only": False}))
    if not is_ours:
        trainer.save_checkpoint(path)
    _saved(job, training)
