"""The methods that ``stall`` compares, each in a worker: it trains, saves its own way, and clocks every step."""

import contextlib
import gc
import os
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.raw import populate_s, slot_bytes, timed
from benchmarks.stall import lost_ms
from benchmarks.training import Training, capture, engine_of
from benchmarks.workers import DEADLINE_S, Line

WARM_UP = 2


class Recorder:
    """Clocks a loop: steps to warm up, steps without snapshots (the base of this process), steps with them."""

    def __init__(self, job: Line) -> None:
        self.is_ours = job["method"].startswith("lazysnap")
        self._every, self._is_cuda = job["every"], job["device"] == "cuda"
        self._base, self._total = job["base"], job["snapshots"] * job["every"]
        self.last = WARM_UP + self._base + self._total
        self.base_s: list[float] = []
        self.steps: list[Counter[str]] = []
        """Seconds: ``boundary`` (the save call), ``waited`` in it for the save before, ``gate``, and the ``step``."""
        self._count, self._mark = -WARM_UP - self._base, self._now()
        self._collected_s = 0.0
        gc.callbacks.append(self._collecting)

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()  # not copies beside it
        return time.perf_counter()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time that belongs to the last save."""
        started, worked, collected_s = time.perf_counter(), time.thread_time(), self._collected_s
        yield
        if self.steps:
            self.steps[-1][name] += time.perf_counter() - started
            self.steps[-1][f"{name} cpu"] += time.thread_time() - worked
            self.steps[-1][f"{name} collected"] += self._collected_s - collected_s

    def _collecting(self, phase: str, info: Line) -> None:
        """Time of Python's garbage collector on the training thread: whoever makes the next object waits for it."""
        if threading.current_thread() is threading.main_thread():
            self._collected_s += time.perf_counter() * (1 if phase == "stop" else -1)

    def step_done(self, save: Callable[[int], bool]) -> None:
        """At the end of each step. ``save`` gets its number and says whether a snapshot was taken.

        Its first call sets up threads, processes and buffers, too: they belong to the start of the run.
        """
        now = self._now()
        if self.steps:
            self.steps[-1]["step"] = now - self._mark
        elif self._count >= -self._base:
            self.base_s.append(now - self._mark)
        self._count += 1
        if 0 <= self._count < self._total:
            self.steps.append(step := Counter())
            if self.is_ours or self._count % self._every == 0:
                with self.span("boundary"):
                    step["taken"] = save(self._count)
                step["boundary"] -= step["waited"]
        self._mark = self._now()

    def report(self, training: Training) -> Line:
        """Of the start of the run, and per snapshot of the later steps."""
        base_s, first, later = statistics.median(self.base_s), self.steps[: self._every], self.steps[self._every :]
        found: Line = {"base_step_ms": 1e3 * base_s, "state_mb": training.state_bytes() / 1e6}
        count = sum(step["taken"] for step in later)
        if not count:
            return found

        def ms(*names: str) -> float:
            return 1e3 * sum(step[name] for step in later for name in names) / count

        parts = ("boundary", "waited", "step")
        steady_s = statistics.fmean(step[name] for step in later for name in parts) * len(parts)
        return found | {
            "boundary_ms": ms("boundary"),
            "longest_boundary_ms": 1e3 * max(step["boundary"] for step in self.steps[1:]),
            "longest_boundary_cpu_ms": 1e3 * max(step["boundary cpu"] for step in self.steps[1:]),
            "longest_boundary_own_ms": 1e3
            * max(step["boundary cpu"] - step["boundary collected"] for step in self.steps[1:]),
            "gate_ms": ms("gate"),
            "blocked_ms": ms("boundary", "gate"),
            "waited_ms": ms("waited"),
            "lost_ms": lost_ms(ms(*parts) * count / 1e3, base_s * len(later), count),
            "start_lost_ms": 1e3 * sum(sum(map(step.__getitem__, parts)) - steady_s for step in first),
        }


# ------------------------------------------------------------------------------------------------ plain loops


class Nothing:
    """No snapshots; what the others have in common."""

    def __init__(self, training: Training, job: Line, recorder: Recorder) -> None:
        self.training, self.recorder, self.directory = training, recorder, Path(job["directory"])

    def state(self) -> Line:
        return {name: one.state_dict() for name, one in self.training.objects().items()}

    def save(self, number: int) -> bool:
        """Whether a snapshot was taken; the time it takes is the boundary."""
        return False

    def gate(self) -> None:
        """Until the weights may change."""

    def end(self) -> Line:
        """Drain and clean up; further figures."""
        return {}


class TorchSave(Nothing):
    """``torch.save`` and fsync, in the training thread."""

    def save(self, number: int) -> bool:
        with Path(self.directory, f"step-{number}.pt").open("wb") as file:
            torch.save(self.state(), file)
            os.fsync(file.fileno())
        return True


class DCPAsync(Nothing):
    """``dcp.async_save`` in a thread or process; tuned: one stager that reuses its buffers, and cached plans."""

    def __init__(self, training: Training, job: Line, recorder: Recorder) -> None:
        super().__init__(training, job, recorder)
        dist.init_process_group("gloo", init_method=f"file://{self.directory}/.meeting", rank=0, world_size=1)
        is_process, self.pending = "process" in job["method"], None
        kind = AsyncCheckpointerType.PROCESS if is_process else AsyncCheckpointerType.THREAD
        self.options: Line = {"async_checkpointer_type": kind}
        if job["method"].endswith("-cached"):
            how = {"use_pinned_memory": False, "use_non_blocking_copy": False, "use_shared_memory": is_process}
            stager = DefaultStager(StagingOptions(**how, use_async_staging=False))
            self.options |= {"async_stager": stager, "planner": DefaultSavePlanner(enable_plan_caching=True)}

    def save(self, number: int) -> bool:
        with self.recorder.span("waited"):  # two saves at once are not supported
            self.wait()
        answer = dcp.async_save(self.state(), checkpoint_id=self.directory / f"step-{number}", **self.options)
        self.pending = answer if isinstance(answer, Future) else answer.upload_completion
        return True

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result(DEADLINE_S)

    def end(self) -> Line:
        self.wait()
        if "async_stager" in self.options:
            self.options["async_stager"].close()
        dist.destroy_process_group()
        return {}


class Lazysnap(Nothing):
    """lazysnap at every step, in memory, or also to a local directory as often as the peers."""

    def __init__(self, training: Training, job: Line, recorder: Recorder) -> None:
        super().__init__(training, job, recorder)
        level = job["method"].partition("-")[2]
        self.until = "durable" if level == "disk" else "captured"
        job = {**job, "level": level, "url": job["directory"]}
        self.engine = engine_of(job, training.objects(), every_n_steps=job["every"], keep_last=10_000)
        self.engine._prepare()

    def save(self, number: int) -> bool:
        return self.engine.boundary(number + 1)

    def gate(self) -> None:
        self.engine.gate()

    def end(self) -> Line:
        self.engine.gate()
        counted, last = self.engine.statistics(), len(self.recorder.steps)
        if not any(step["taken"] for step in self.recorder.steps):
            raise RuntimeError(f"no capture in {last} steps: they ended before the slots were ready; take more")
        if not self.engine.wait(until=self.until, timeout_s=DEADLINE_S):
            raise RuntimeError(f"the last snapshot did not become {self.until}: {self.engine.statistics()}")
        found: Line = {"skipped": sum(counted.skipped.values()), "torn": counted.torn}
        found["durable_s"] = durable_s(self.directory)[1:]
        steps = range(last + 10_000, last + 10_003)  # while nothing else runs
        found["idle_s"] = [timed(lambda step=step: capture(self.engine, step, self.until)) for step in steps]
        size = slot_bytes()
        self.engine.close()
        return {**found, "slots_mb": size / 1e6, "raw_populate_ms": 1e3 * populate_s(max(1, size))}


def durable_s(directory: Path) -> list[float]:
    """Seconds from capture to commit of every snapshot on disk, from the files themselves."""
    paths = sorted(directory.glob("step-*/*.json"))
    captured = [max(map(int, re.findall(r'"captured_ns": ?(\d+)', path.read_text()))) for path in paths]
    return [(path.stat().st_mtime_ns - ns) / 1e9 for path, ns in zip(paths, captured, strict=True)]


PLAIN: dict[str, type[Nothing]] = {
    "none": Nothing,
    "torch": TorchSave,
    "dcp": DCPAsync,
    "lazysnap": Lazysnap,
}


def train_plainly(training: Training, job: Line, recorder: Recorder) -> Line:
    saver: Nothing | None = None

    def save(number: int) -> bool:
        nonlocal saver
        saver = saver or PLAIN[job["method"].partition("-")[0]](training, job, recorder)
        return saver.save(number)

    for step in range(1, recorder.last + 1):
        training.backward(step)
        if saver is not None:
            with recorder.span("gate"):
                saver.gate()
        training.update()
        recorder.step_done(save)
    assert saver is not None
    return {**recorder.report(training), **saver.end()}


# ------------------------------------------------------------------------------------------------ Lightning


def train_with_lightning(training: Training, job: Line, recorder: Recorder) -> Line:
    """``trainer.save_checkpoint`` with and without AsyncCheckpointIO; the callback of lazysnap at every step."""
    import lightning as L
    from lightning.pytorch.plugins import AsyncCheckpointIO

    from lazysnap import LazySnapshotCallback

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            def save(number: int) -> bool:
                if not recorder.is_ours:
                    trainer.save_checkpoint(Path(job["directory"], f"step-{number}.ckpt"))
                return True

            recorder.step_done(save)

    callbacks = [Save(), *[LazySnapshotCallback()] * recorder.is_ours]
    plugins = [AsyncCheckpointIO()] if job["method"].endswith("-async") else []
    how = {"callbacks": callbacks, "plugins": plugins, "max_steps": recorder.last}
    training.fit(training.trainer(default_root_dir=job["directory"], **how), recorder.last)  # its end drains the thread
    found = recorder.report(training)
    if recorder.is_ours:  # its captures begin with the first step: there is no base, and no call to clock
        found = {"state_mb": found["state_mb"], **counted(callbacks[-1])}
    return found


def counted(callback: Any) -> Line:
    """What the engine of the callback counted, per capture, the first included."""
    own = callback.statistics()
    boundary_ms, gate_ms = (1e3 * one.total_s / max(1, one.count) for one in (own.boundary, own.gate))
    found = {"boundary_ms": boundary_ms, "longest_boundary_ms": 1e3 * own.boundary.max_s}
    return {**found, "gate_ms": gate_ms, "blocked_ms": boundary_ms + gate_ms}


def run(job: Line, training: Training | None = None) -> list[Line]:
    """A worker: one method."""
    torch.set_num_threads(job["threads"])
    if job["method"].startswith("lazysnap"):
        import lazysnap.engine  # noqa: F401  no part of the start of the run
    train = train_with_lightning if "lightning" in job["method"] else train_plainly
    return [{"measure": "stall", "method": job["method"], **train(training or Training(job), job, Recorder(job))}]
