"""The methods that ``stall`` compares, each in a worker: it trains, saves its own way, and clocks every step."""

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.frame import DEADLINE_S, Line
from benchmarks.raw import populate_s, slot_bytes
from benchmarks.training import Training

# ------------------------------------------------------------------------------------------------ what is noted


@dataclass
class Step:
    """One step, and the save call before it."""

    boundary_s: float = 0.0
    waited_s: float = 0.0
    """Until the save before was done. Not in *blocked*, in the peers' favour."""
    gate_s: float = 0.0
    step_s: float = 0.0
    """Without the save call, with the gate."""
    is_taken: bool = False

    @property
    def total_s(self) -> float:
        return self.boundary_s + self.waited_s + self.step_s


class Recorder:
    """Clocks a loop: warm-up, steps without snapshots (the base of this process), steps with them."""

    def __init__(self, job: Line) -> None:
        self.job, self.base_s, self.steps, self.setup_s = job, [], [], 0.0
        self.total = job["snapshots"] * job["every"]
        self.last = job["warm_up"] + job["base"] + self.total
        self._count = 0
        self._mark = self._now()

    def _now(self) -> float:
        if self.job["device"] == "cuda":
            torch.cuda.current_stream().synchronize()  # not copies beside it
        return time.perf_counter()

    def step_done(self) -> int:
        """The number of the step that follows in the phase of snapshots, less than 0 before it."""
        now = self._now()
        elapsed, self._mark = now - self._mark, now
        if self.steps:
            self.steps[-1].step_s = elapsed
        elif self._count >= self.job["warm_up"]:
            self.base_s.append(elapsed)
        self._count += 1
        return self._count - self.job["warm_up"] - self.job["base"]

    def setup(self, work: Callable[[], Any]) -> Any:
        """Threads, processes, buffers: they belong to the start of the run."""
        self._mark = self._now()
        made = work()
        self.setup_s = self._now() - self._mark
        return made

    def save(self, call: Callable[[], bool], wait: Callable[[], None] = lambda: None) -> None:
        """A save call at the end of a step, and what it waits for one before."""
        started = time.perf_counter()
        wait()
        waited = time.perf_counter()
        is_taken = call()
        self.steps.append(Step(time.perf_counter() - waited, waited - started, is_taken=is_taken))
        self._mark = self._now()

    def gate(self, wait: Callable[[], None]) -> None:
        started = time.perf_counter()
        wait()
        if self.steps:
            self.steps[-1].gate_s = time.perf_counter() - started

    def report(self, training: Training) -> Line:
        """Seconds: of the start of the run, and per snapshot of the later steps."""
        every, base_s = self.job["every"], statistics.median(self.base_s)
        first, later = self.steps[:every], self.steps[every:]
        taken = [step for step in later if step.is_taken]
        found: Line = {"base_step_s": base_s, "state_bytes": training.state_bytes()}
        found |= {"tensors": len(training.tensors()), "snapshots": sum(step.is_taken for step in self.steps)}
        if not taken:
            return found

        def mean(seconds: Callable[[Step], float]) -> float:
            return sum(map(seconds, later)) / len(taken)

        steady_s = statistics.fmean(step.total_s for step in later)
        return found | {
            "start_lost_s": self.setup_s + sum(step.total_s - steady_s for step in first),
            "first_blocked_s": self.setup_s + first[0].boundary_s + first[0].gate_s,
            "boundary_s": mean(lambda step: step.boundary_s),
            "longest_boundary_s": max(step.boundary_s for step in self.steps[1:] if step.is_taken),
            "gate_s": mean(lambda step: step.gate_s),
            "blocked_s": mean(lambda step: step.boundary_s + step.gate_s),
            "longest_blocked_s": max(step.boundary_s + step.gate_s for step in self.steps[1:]),
            "waited_s": mean(lambda step: step.waited_s),
            "lost_s": mean(lambda step: step.total_s - base_s),
        }


# ------------------------------------------------------------------------------------------------ plain loops


class Nothing:
    """No snapshots; what the others have in common."""

    saves_each_step = False

    def __init__(self, training: Training, job: Line) -> None:
        self.training, self.job, self.directory = training, job, Path(job["directory"])

    def state(self) -> Line:
        return {name: one.state_dict() for name, one in self.training.objects().items()}

    def save(self, step: int) -> bool:
        """Whether a snapshot was taken; the time it takes is the boundary."""
        return False

    def wait(self) -> None:
        """Until another snapshot can be taken."""

    def gate(self) -> None:
        """Until the weights may change."""

    def end(self) -> Line:
        """Drain and clean up; further figures."""
        self.wait()
        return {}


class TorchSave(Nothing):
    """``torch.save`` and fsync, in the training thread."""

    def save(self, step: int) -> bool:
        path = self.directory / f"step-{step}.pt"
        torch.save(self.state(), path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return True


class DCPAsync(Nothing):
    """``dcp.async_save`` in a thread or process; tuned: one stager that reuses its buffers, and cached plans."""

    def __init__(self, training: Training, job: Line) -> None:
        super().__init__(training, job)
        dist.init_process_group("gloo", init_method=f"file://{self.directory}/.meeting", rank=0, world_size=1)
        is_process, is_cuda = "process" in job["method"], job["device"] == "cuda"
        self.pending: Future[Any] | None = None
        kind = AsyncCheckpointerType.PROCESS if is_process else AsyncCheckpointerType.THREAD
        self.options: Line = {"async_checkpointer_type": kind}
        self.stager = None
        if job["method"].endswith("-cached"):
            how = {"use_pinned_memory": is_cuda, "use_non_blocking_copy": is_cuda, "use_shared_memory": is_process}
            self.stager = DefaultStager(StagingOptions(**how, use_async_staging=False))
            self.options |= {"async_stager": self.stager, "planner": DefaultSavePlanner(enable_plan_caching=True)}

    def save(self, step: int) -> bool:
        answer = dcp.async_save(self.state(), checkpoint_id=self.directory / f"step-{step}", **self.options)
        self.pending = answer if isinstance(answer, Future) else answer.upload_completion
        return True

    def wait(self) -> None:
        if self.pending is not None:  # two saves at once are not supported
            self.pending.result(DEADLINE_S)

    def end(self) -> Line:
        self.wait()
        if self.stager is not None:
            self.stager.close()
        dist.destroy_process_group()
        return {}


class Lazysnap(Nothing):
    """lazysnap at every step, in memory, or also to a local directory as often as the peers."""

    saves_each_step = True

    def __init__(self, training: Training, job: Line) -> None:
        from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine

        super().__init__(training, job)
        self.has_disk = job["method"].endswith("-disk")
        level = PersistentLevel(job["directory"], every_n_steps=job["every"], keep_last=10_000)
        config = SnapshotConfig(levels=(level,) * self.has_disk, job_id=f"stall-{os.getpid()}")
        self.engine = SnapshotEngine(config, training.objects())
        self.engine.prepare()

    def save(self, step: int) -> bool:
        return self.engine.boundary(step)

    def gate(self) -> None:
        self.engine.gate()

    def end(self) -> Line:
        self.engine.gate()
        until, idle = "durable" if self.has_disk else "captured", []
        found: Line = {"skipped": dict(self.engine.statistics().skipped), "torn": self.engine.statistics().torn}
        if not self.engine.wait(until=until, timeout_s=DEADLINE_S):
            raise RuntimeError(f"the last snapshot did not become {until}: {self.engine.statistics()}")
        found["durable_s"] = durable_s(self.directory)
        for step in range(10_001, 10_004):  # while nothing else runs
            started = time.perf_counter()
            if not self.engine.boundary(step) or not self.engine.wait(step, until=until, timeout_s=DEADLINE_S):
                raise RuntimeError(f"a capture of an idle process did not become {until}: {self.engine.statistics()}")
            idle.append(time.perf_counter() - started)
        found |= {f"{until}_when_idle_s": idle, "slot_bytes": slot_bytes()}
        self.engine.close()
        return {**found, "populate_s": populate_s(max(1, found["slot_bytes"]))}


def durable_s(directory: Path) -> list[float]:
    """Seconds from capture to commit of every snapshot on disk, from the files themselves."""

    def captured_ns(value: Any) -> int:
        return max((value.get("captured_ns", 0), *map(captured_ns, value.values()))) if isinstance(value, dict) else 0

    paths = sorted(directory.glob("step-*/*.json"))
    return [(path.stat().st_mtime_ns - captured_ns(json.loads(path.read_bytes()))) / 1e9 for path in paths]


PLAIN: dict[str, type[Nothing]] = {"none": Nothing, "torch-save": TorchSave}
PLAIN |= dict.fromkeys(("dcp-thread", "dcp-thread-cached", "dcp-process", "dcp-process-cached"), DCPAsync)
PLAIN |= dict.fromkeys(("lazysnap-memory", "lazysnap-disk"), Lazysnap)


def run_plain(training: Training, job: Line) -> Line:
    recorder, saver = Recorder(job), None
    for step in range(1, recorder.last + 1):
        training.backward(step)
        if saver is not None:
            recorder.gate(saver.gate)
        training.update()
        done = recorder.step_done()
        if done == 0:
            saver = recorder.setup(lambda: PLAIN[job["method"]](training, job))
        if saver is not None and done < recorder.total:
            if saver.saves_each_step or done % job["every"] == 0:
                recorder.save(partial(saver.save, step), saver.wait)
            else:
                recorder.save(lambda: False)
    assert saver is not None
    if saver.saves_each_step and not any(step.is_taken for step in recorder.steps):
        raise RuntimeError(f"no capture in {recorder.total} steps: they ended before the slots were ready; take more")
    more = saver.end()
    return {**recorder.report(training), **more}


# ------------------------------------------------------------------------------------------------ other doors


def run_lightning(training: Training, job: Line) -> Line:
    """``trainer.save_checkpoint`` with and without AsyncCheckpointIO; the callback of lazysnap at every step."""
    import lightning as L
    from lightning.pytorch.plugins import AsyncCheckpointIO

    recorder, is_ours = Recorder(job), job["method"].startswith("lazysnap")

    def save(trainer: L.Trainer, done: int) -> bool:
        if not is_ours and done % job["every"] == 0:
            trainer.save_checkpoint(Path(job["directory"], f"step-{done}.ckpt"))
        return is_ours or done % job["every"] == 0

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            done = recorder.step_done()
            if 0 <= done < recorder.total:
                recorder.save(partial(save, trainer, done))

    callbacks: list[L.Callback] = [Save()]
    if is_ours:
        from lazysnap import LazySnapshotCallback

        callbacks.append(LazySnapshotCallback())
    how: Line = {"plugins": [AsyncCheckpointIO()] if job["method"].endswith("-async") else []}
    how |= {"callbacks": callbacks, "default_root_dir": job["directory"], "max_steps": recorder.last}
    batches = [training.batch_of(step) for step in range(recorder.last)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    training.trainer(L, **how).fit(training.module(L), loader)  # its end drains the thread
    found = recorder.report(training)
    if is_ours:  # its captures begin with the first step: there is no base, and no call to clock
        unknown = ("start_lost_s", "lost_s", "first_blocked_s", "longest_blocked_s")
        found |= {**dict.fromkeys(unknown), **counted(callbacks[-1])}
    return found


def run_accelerate(training: Training, job: Line) -> Line:
    """``save_state``: stock to a directory, ours without an argument at every step."""
    is_ours = job["method"].startswith("lazysnap")
    if is_ours:
        from lazysnap import LazyAccelerator as Accelerator
    else:
        from accelerate import Accelerator
    recorder = Recorder(job)
    accelerator = Accelerator(cpu=job["device"] == "cpu", project_dir=job["directory"])
    batches = torch.utils.data.DataLoader([training.batch_of(n) for n in range(recorder.last)], batch_size=None)
    model, optimizer, loader = accelerator.prepare(training.model, training.optimizer, batches)

    def save(done: int) -> bool:
        if is_ours:
            accelerator.save_state()
        elif done % job["every"] == 0:
            accelerator.save_state(str(Path(job["directory"], f"step-{done}")))
        return is_ours or done % job["every"] == 0

    for ids in loader:
        accelerator.backward(model(ids))
        optimizer.step()
        optimizer.zero_grad()
        done = recorder.step_done()
        if 0 <= done < recorder.total:
            recorder.save(lambda done=done: save(done))
    found = recorder.report(training)
    if is_ours:
        found["gate_s"] = counted(accelerator)["gate_s"]
        found["blocked_s"] = found["boundary_s"] + found["gate_s"]
    accelerator.end_training()
    return found


def counted(door: Any) -> Line:
    """What the engine of a door that calls it by itself counted, per capture, the first included."""
    own = door.statistics()
    boundary_s, gate_s = (one.total_s / max(1, one.count) for one in (own.boundary, own.gate))
    found: Line = {"snapshots": own.whole, "boundary_s": boundary_s, "longest_boundary_s": own.boundary.max_s}
    return {**found, "gate_s": gate_s, "blocked_s": boundary_s + gate_s}


def run(job: Line, training: Training | None = None) -> list[Line]:
    """A worker: one method."""
    torch.set_num_threads(job["threads"])
    if job["method"].startswith("lazysnap"):
        import lazysnap.engine  # noqa: F401  no part of the start of the run
    training = training or Training(job["size"], batch=job["batch"], device=job["device"])
    door = "lightning" if "lightning" in job["method"] else "accelerate" if "accelerate" in job["method"] else None
    runner = {None: run_plain, "lightning": run_lightning, "accelerate": run_accelerate}[door]
    return [{"measure": "method", "method": job["method"], **runner(training, job)}]
