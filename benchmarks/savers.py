"""The methods compared: each saves the same model and optimizer its own way."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

DEADLINE_S = 600.0


def sync_tree(path: Path) -> None:
    """fsync a file, or every file below a directory."""
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Saver(Protocol):
    """How a plain training loop saves."""

    durable_s: list[float]
    """For each snapshot that became durable: seconds from the save call."""

    def wait(self) -> None:
        """Called before ``save``: blocks until the method can take another snapshot (back-pressure)."""
        ...

    def save(self, step: int) -> bool:
        """Called after the optimizer step; what it takes is the time blocked at the boundary."""
        ...

    def gate(self) -> None:
        """Called before the optimizer step; what it takes is the time blocked at the gate."""
        ...

    def drain(self) -> None:
        """Blocks until all pending work is done."""
        ...

    def close(self) -> None:
        """Lets go of threads, processes and memory."""
        ...


class Nothing:
    """No snapshots."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self.model, self.optimizer, self.directory = model, optimizer, directory
        self.durable_s: list[float] = []

    def state(self) -> dict[str, Any]:
        """What the peers save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def wait(self) -> None:
        pass

    def save(self, step: int) -> bool:
        return False

    def gate(self) -> None:
        pass

    def drain(self) -> None:
        self.wait()

    def close(self) -> None:
        pass


class TorchSave(Nothing):
    """``torch.save`` and fsync, in the training thread."""

    def save(self, step: int) -> bool:
        start = time.perf_counter()
        path = self.directory / f"step-{step}.pt"
        torch.save(self.state(), path)
        sync_tree(path)
        self.durable_s.append(time.perf_counter() - start)
        return True


class DCPAsync(Nothing):
    """``torch.distributed.checkpoint.async_save`` with its defaults, in a thread."""

    kind = AsyncCheckpointerType.THREAD

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        super().__init__(model, optimizer, directory)
        dist.init_process_group("gloo", init_method=f"file://{directory}/.rendezvous", rank=0, world_size=1)
        self.pending: Future[Any] | None = None

    def options(self) -> dict[str, Any]:
        return {}

    def save(self, step: int) -> bool:
        start = time.perf_counter()
        path = self.directory / f"step-{step}"
        answer = dcp.async_save(self.state(), checkpoint_id=path, async_checkpointer_type=self.kind, **self.options())
        self.pending = answer if isinstance(answer, Future) else answer.upload_completion

        def note(future: Future[Any]) -> None:
            if future.exception() is None:  # its files are fsynced by the FileSystemWriter
                self.durable_s.append(time.perf_counter() - start)

        self.pending.add_done_callback(note)
        return True

    def wait(self) -> None:
        if self.pending is not None:  # two saves at once are not supported
            self.pending.result(DEADLINE_S)

    def close(self) -> None:
        dist.destroy_process_group()


class DCPAsyncCached(DCPAsync):
    """The same, tuned: one stager that reuses its buffers, and cached plans."""

    shared = False

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        super().__init__(model, optimizer, directory)
        cuda = next(model.parameters()).is_cuda
        staging = StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=self.shared,
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
        self.stager = DefaultStager(staging)

    def options(self) -> dict[str, Any]:
        return {"async_stager": self.stager, "planner": DefaultSavePlanner(enable_plan_caching=True)}

    def close(self) -> None:
        self.stager.close()
        super().close()


class DCPProcess(DCPAsync):
    """``async_save`` with its defaults, in a process."""

    kind = AsyncCheckpointerType.PROCESS


class DCPProcessCached(DCPAsyncCached):
    """The same, tuned: staged into shared memory that is reused, and cached plans."""

    kind = AsyncCheckpointerType.PROCESS
    shared = True


class Lazysnap(Nothing):
    """lazysnap at every step, in memory only."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        from lazysnap import SnapshotConfig, SnapshotEngine

        super().__init__(model, optimizer, directory)
        config = SnapshotConfig(levels=self.levels(), job_id=f"stall-{os.getpid()}")
        self.engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
        self.engine.prepare()

    def levels(self) -> tuple[Any, ...]:
        return ()

    def save(self, step: int) -> bool:
        return self.engine.boundary(step)

    def gate(self) -> None:
        self.engine.gate()

    def drain(self) -> None:
        self.engine.wait(until="captured", timeout_s=DEADLINE_S)

    def close(self) -> None:
        self.engine.close(drain=True)


class LazysnapDisk(Lazysnap):
    """lazysnap at every step, and to a local directory as often as the peers."""

    every = 1

    def levels(self) -> tuple[Any, ...]:
        from lazysnap import PersistentLevel

        # Nothing is deleted during the run: the bytes written are the bytes that lie there at its end.
        return (PersistentLevel(str(self.directory), every_n_steps=self.every, keep_last=10_000),)

    def drain(self) -> None:
        if not self.engine.flush(DEADLINE_S):
            raise RuntimeError("the last snapshot did not become durable")


class FsyncInBackground:
    """For savers that never fsync: notes when the bytes were really durable, off the training thread."""

    def __init__(self) -> None:
        self.durable_s: list[float] = []
        self._pool = ThreadPoolExecutor(1)
        self._pending: list[Future[None]] = []

    def submit(self, path: Path, start: float) -> None:
        def work() -> None:
            sync_tree(path)
            self.durable_s.append(time.perf_counter() - start)

        self._pending.append(self._pool.submit(work))

    def drain(self) -> None:
        for future in self._pending:
            future.result(DEADLINE_S)
        self._pool.shutdown()


PLAIN: dict[str, type[Nothing]] = {
    "none": Nothing,
    "torch-save": TorchSave,
    "dcp-thread": DCPAsync,
    "dcp-thread-cached": DCPAsyncCached,
    "dcp-process": DCPProcess,
    "dcp-process-cached": DCPProcessCached,
    "lazysnap-memory": Lazysnap,
    "lazysnap-disk": LazysnapDisk,
}
