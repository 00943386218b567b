"""The methods that ``stall`` compares, each in a worker: it trains, saves its own way, and clocks every step."""

import contextlib
import functools
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
from benchmarks.training import Training, capture, engine_of
from benchmarks.workers import DEADLINE_S, Line

WARM_UP = 2


class Recorder:
    """Clocks a loop: steps to warm up, steps without snapshots (plain), steps with them."""

    def __init__(self, job: Line) -> None:
        self.is_ours = job["method"].startswith("lazysnap")
        self._is_cuda = job["device"] == "cuda"
        self._every = job["every"]
        self._plain = job["plain"]
        self._total = job["snapshots"] * job["every"]
        self.last = WARM_UP + self._plain + self._total
        self.plain_s: list[float] = []
        self.steps: list[Counter[str]] = []
        """Seconds: ``boundary`` (the save call), ``waited`` in it for the save before, ``gate``, and the ``step``."""
        self._count = -WARM_UP - self._plain
        self._mark = self._now()
        self._collected_s = 0.0
        gc.callbacks.append(self._collecting)

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()  # not copies beside it
        return time.perf_counter()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time that belongs to the last save."""
        started = time.perf_counter()
        worked = time.thread_time()
        collected_s = self._collected_s
        yield
        if self.steps:
            self.steps[-1][name] += time.perf_counter() - started
            self.steps[-1][f"{name} cpu"] += time.thread_time() - worked
            self.steps[-1][f"{name} collected"] += self._collected_s - collected_s

    def _collecting(self, phase: str, info: Line) -> None:
        """Time of Python's garbage collector on the training thread: whoever makes the next object waits for it."""
        if threading.current_thread() is not threading.main_thread():
            return
        if phase == "stop":
            self._collected_s += time.perf_counter()
        else:
            self._collected_s -= time.perf_counter()

    def step_done(self, save: Callable[[int], bool]) -> None:
        """At the end of each step. ``save`` gets its number and says whether a snapshot was taken.

        Its first call sets up threads, processes and buffers, too: they belong to the start of the run.
        """
        now = self._now()
        if self.steps:
            self.steps[-1]["step"] = now - self._mark
        elif self._count >= -self._plain:
            self.plain_s.append(now - self._mark)
        self._count += 1
        if 0 <= self._count < self._total:
            step: Counter[str] = Counter()
            self.steps.append(step)
            if self.is_ours or self._count % self._every == 0:
                with self.span("boundary"):
                    step["taken"] = save(self._count)
                step["boundary"] -= step["waited"]
        self._mark = self._now()

    def report(self, training: Training) -> Line:
        """Of the start of the run, and per snapshot of the later steps."""
        plain_s = statistics.median(self.plain_s)
        first = self.steps[: self._every]
        later = self.steps[self._every :]
        line: Line = {"plain_step_ms": 1e3 * plain_s, "state_mb": training.state_bytes() / 1e6}
        sums: Counter[str] = Counter()
        """Seconds of the later steps."""
        for step in later:
            for name in step:
                sums[name] += step[name]
        count = sums["taken"]
        if not count:
            return line
        took_s = sums["boundary"] + sums["waited"] + sums["step"]
        start_s = 0.0
        for step in first:
            start_s += step["boundary"] + step["waited"] + step["step"]
        longest_s = 0.0
        longest_cpu_s = 0.0
        longest_own_s = 0.0
        for step in self.steps[1:]:
            longest_s = max(longest_s, step["boundary"])
            longest_cpu_s = max(longest_cpu_s, step["boundary cpu"])
            longest_own_s = max(longest_own_s, step["boundary cpu"] - step["boundary collected"])
        return line | {
            "boundary_ms": 1e3 * sums["boundary"] / count,
            "longest_boundary_ms": 1e3 * longest_s,
            "longest_boundary_cpu_ms": 1e3 * longest_cpu_s,
            "longest_boundary_own_ms": 1e3 * longest_own_s,
            "gate_ms": 1e3 * sums["gate"] / count,
            "blocked_ms": 1e3 * (sums["boundary"] + sums["gate"]) / count,
            "waited_ms": 1e3 * sums["waited"] / count,
            "lost_ms": 1e3 * (took_s - plain_s * len(later)) / count,
            "start_lost_ms": 1e3 * (start_s - len(first) * took_s / len(later)),
        }


# ------------------------------------------------------------------------------------------------ plain loops


class Nothing:
    """No snapshots; what the others have in common."""

    def __init__(self, training: Training, job: Line, recorder: Recorder) -> None:
        self.training = training
        self.recorder = recorder
        self.directory = Path(job["directory"])

    def state(self) -> Line:
        return {name: live.state_dict() for name, live in self.training.objects().items()}

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
        self.pending: Any = None
        is_process = "process" in job["method"]
        kind = AsyncCheckpointerType.THREAD
        if is_process:
            kind = AsyncCheckpointerType.PROCESS
        self.options: Line = {"async_checkpointer_type": kind}
        if job["method"].endswith("-cached"):
            staging = StagingOptions(
                use_pinned_memory=False,
                use_non_blocking_copy=False,
                use_shared_memory=is_process,
                use_async_staging=False,
            )
            stager = DefaultStager(staging)
            self.options |= {"async_stager": stager, "planner": DefaultSavePlanner(enable_plan_caching=True)}

    def save(self, number: int) -> bool:
        with self.recorder.span("waited"):  # two saves at once are not supported
            self.wait()
        answer = dcp.async_save(self.state(), checkpoint_id=self.directory / f"step-{number}", **self.options)
        self.pending = answer
        if not isinstance(answer, Future):
            self.pending = answer.upload_completion
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
        self.until = "captured"
        if level == "disk":
            self.until = "durable"
        job = {**job, "level": level, "url": job["directory"]}
        self.engine = engine_of(job, training.objects(), every_n_steps=job["every"], keep_last=10_000)
        self.engine._prepare()

    def save(self, number: int) -> bool:
        return self.engine.boundary(number + 1)

    def gate(self) -> None:
        self.engine.gate()

    def end(self) -> Line:
        self.engine.gate()
        counted = self.engine.statistics()
        last = len(self.recorder.steps)
        if not any(step["taken"] for step in self.recorder.steps):
            raise RuntimeError(f"no capture in {last} steps: they ended before the slots were ready; take more")
        if not self.engine.wait(until=self.until, timeout_s=DEADLINE_S):
            raise RuntimeError(f"the last snapshot did not become {self.until}: {self.engine.statistics()}")
        durable_before_s = durable_s(self.directory)[1:]
        idle_s = []
        for step in range(last + 10_000, last + 10_003):  # while nothing else runs
            idle_s.append(timed(functools.partial(capture, self.engine, step, self.until)))
        size = slot_bytes()
        self.engine.close()
        return {
            "skipped": sum(counted.skipped.values()),
            "torn": counted.torn,
            "durable_s": durable_before_s,
            "idle_s": idle_s,
            "slots_mb": size / 1e6,
            "raw_populate_ms": 1e3 * populate_s(max(1, size)),
        }


def durable_s(directory: Path) -> list[float]:
    """Seconds from capture to commit of every snapshot on disk, from the files themselves."""
    seconds = []
    for path in sorted(directory.glob("step-*/*.json")):
        captured_ns = max(map(int, re.findall(r'"captured_ns": ?(\d+)', path.read_text())))
        seconds.append((path.stat().st_mtime_ns - captured_ns) / 1e9)
    return seconds


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

    callbacks = [Save()]
    if recorder.is_ours:
        callbacks.append(LazySnapshotCallback())
    plugins = []
    if job["method"].endswith("-async"):
        plugins.append(AsyncCheckpointIO())
    settings = {"callbacks": callbacks, "plugins": plugins, "max_steps": recorder.last}
    trainer = training.trainer(default_root_dir=job["directory"], **settings)
    training.fit(trainer, recorder.last)  # its end drains the thread
    line = recorder.report(training)
    if recorder.is_ours:  # its captures begin with the first step: there are no plain steps, and no call to clock
        return {"state_mb": line["state_mb"], **counted(callbacks[-1])}
    return line


def counted(callback: Any) -> Line:
    """What the engine of the callback counted, per capture, the first included."""
    of_engine = callback.statistics()
    boundary_ms = 1e3 * of_engine.boundary.total_s / max(1, of_engine.boundary.count)
    gate_ms = 1e3 * of_engine.gate.total_s / max(1, of_engine.gate.count)
    return {
        "boundary_ms": boundary_ms,
        "longest_boundary_ms": 1e3 * of_engine.boundary.max_s,
        "gate_ms": gate_ms,
        "blocked_ms": boundary_ms + gate_ms,
    }


def run(job: Line, training: Training | None = None) -> list[Line]:
    """A worker: one method."""
    torch.set_num_threads(job["threads"])
    if job["method"].startswith("lazysnap"):
        import lazysnap.engine  # noqa: F401  no part of the start of the run
    train = train_plainly
    if "lightning" in job["method"]:
        train = train_with_lightning
    return [{"measure": "stall", "method": job["method"], **train(training or Training(job), job, Recorder(job))}]
