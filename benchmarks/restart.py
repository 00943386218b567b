"""One rank of the restore benchmark, in a process of its own: saves a state once, or loads it and does a step.

Says on standard output, one JSON line each, when it is through with each phase; see restore.py.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0
_TOUCHED = 4 << 30
"""Bytes; more than any method needs to load the largest state."""
STEP = 1
ALONE = ("lightning", "lazysnap-lightning")


def say(event: str, **facts: Any) -> None:
    """One line; the clock is the same in all processes of a machine."""
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


@dataclasses.dataclass(frozen=True)
class Job:
    """What to do."""

    act: str
    """``save`` or ``load``."""
    method: str
    level: str
    url: str
    options: dict[str, Any] | None
    size: dict[str, int]
    job_id: str
    rank: int
    world_size: int
    port: int
    threads: int


def touch(size: int) -> None:
    """Use memory once and give it back to the heap, which keeps it (``WARM_HEAP``), for whichever method comes.

    A virtual machine gets each page from its host at the first touch, which may take ten times as long as to copy it.
    """
    import torch

    torch.ones(size, dtype=torch.uint8)


def torn_down() -> None:
    """As a crash: a keeper that is there stays."""
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


class Training:
    """Model, optimizer, one step; with several ranks sharded by FSDP2."""

    def __init__(self, job: Job) -> None:
        import torch

        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
        from gpt import GPT, GPTSize

        torch.set_num_threads(job.threads)
        torch.manual_seed(job.rank)
        self.size = GPTSize(**job.size, dropout=0.0)
        self.model = GPT(self.size)
        if job.world_size > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (job.world_size,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> None:
        """Forward, backward, update."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self) -> Any:
        """Of a batch of one sequence."""
        import torch

        ids = torch.randint(self.size.vocabulary, (1, self.size.context + 1))
        return self.model(ids[:, :-1]).logsumexp(-1).mean()

    def step_without_gradients(self) -> None:
        """Gives the optimizer its state."""
        import torch

        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_bytes(self) -> int:
        """Of this rank's part."""
        import torch

        def own(tensor: torch.Tensor) -> int:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
            return int(local.numel() * local.element_size())

        held = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *(value for value in held if isinstance(value, torch.Tensor))]
        return sum(map(own, tensors))


# ------------------------------------------------------------------------------------------------ plain loops


def engine_of(job: Job, training: Training) -> Any:
    """lazysnap over one level, or memory alone."""
    from lazysnap import SnapshotEngine

    return SnapshotEngine(_config(job), {"model": training.model, "optimizer": training.optimizer})


def save_lazysnap(job: Job, training: Training) -> None:
    engine = engine_of(job, training)
    training.step_without_gradients()
    engine.boundary(STEP)  # with several ranks the size of each one's part is known from here on
    if not engine.wait_ready(DEADLINE_S):
        raise RuntimeError("the keeper made no slots")
    _barrier(job)
    engine.boundary(STEP + 1)
    if not engine.wait(until="captured", timeout_s=DEADLINE_S):
        raise RuntimeError(f"the capture did not become whole: {engine.statistics()}")
    if job.level == "memory":
        _barrier(job)
        say("saved", bytes=training.state_bytes())
        torn_down()
    if not engine.close():
        raise RuntimeError("the snapshot did not become durable")


def load_lazysnap(job: Job, training: Training) -> None:
    snapshot = engine_of(job, training).restore("latest")
    found = None if snapshot is None else snapshot.level
    if found != (job.url if job.level != "memory" else "memory"):
        raise RuntimeError(f"restored from {found}: {snapshot and snapshot.skipped}")


def _dcp_state(training: Training) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def _dcp_storage(job: Job, kind: str) -> Any:
    import torch.distributed.checkpoint as dcp

    if "://" not in job.url:
        return getattr(dcp, f"FileSystem{kind}")(job.url)
    from torch.distributed.checkpoint import _fsspec_filesystem

    return getattr(_fsspec_filesystem, f"Fsspec{kind}")(job.url)


def save_dcp(job: Job, training: Training) -> None:
    import torch.distributed.checkpoint as dcp

    training.step_without_gradients()
    dcp.save(_dcp_state(training), storage_writer=_dcp_storage(job, "Writer"))


def load_dcp(job: Job, training: Training) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = _dcp_state(training)  # gives the optimizer a state to load into
    dcp.load(state, storage_reader=_dcp_storage(job, "Reader"))
    set_state_dict(
        training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


SAVERS: dict[str, Callable[[Job, Training], None]] = {"lazysnap": save_lazysnap, "dcp": save_dcp}
LOADERS: dict[str, Callable[[Job, Training], None]] = {"lazysnap": load_lazysnap, "dcp": load_dcp}


def plain(job: Job) -> None:
    """A loop of one's own."""
    training = Training(job)
    say("built")
    if job.act == "save":
        SAVERS[job.method](job, training)
        say("saved", bytes=training.state_bytes())
        return
    touch(_TOUCHED // job.world_size)
    _barrier(job)  # nobody waits for the others while the clock runs
    start = time.monotonic()
    LOADERS[job.method](job, training)
    say("loaded", seconds=time.monotonic() - start)
    training.step()
    say("stepped", bytes=training.state_bytes())
    _barrier(job)
    torn_down()


def _barrier(job: Job) -> None:
    if job.world_size > 1:
        import torch.distributed as dist

        dist.barrier()


# ------------------------------------------------------------------------------------------------ Lightning


def with_lightning(job: Job) -> None:
    """The same under ``Trainer.fit``; what it loads is timed in its checkpoint connector, whoever provides it."""
    import lightning as L
    import torch

    training = Training(job)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = training.model

        def training_step(self, batch: Any, index: int) -> Any:
            return training.loss()

        def configure_optimizers(self) -> Any:
            return training.optimizer

    class End(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if job.act == "save" and trainer.global_step == STEP:  # in memory alone: nothing else would end it
                assert ours is not None
                assert ours.engine is not None
                if not ours.engine.wait(STEP, until="captured", timeout_s=DEADLINE_S):
                    raise RuntimeError("the capture did not become whole")
                say("saved", bytes=training.state_bytes())
                torn_down()

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step > STEP:
                say("loaded", seconds=sum(spent))
                say("stepped", bytes=training.state_bytes())
                torn_down()

    ours = _callback(job) if job.method == "lazysnap-lightning" else None
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_steps=STEP if job.act == "save" and job.level != "memory" else -1,
        accelerator="cpu",
        devices=1,
        callbacks=[End(), *([] if ours is None else [ours])],
        **quiet,
    )
    connector = trainer._checkpoint_connector
    spent: list[float] = []
    for name in ("_restore_modules_and_callbacks", "restore_training_state", "resume_end"):
        setattr(connector, name, _timed(getattr(connector, name), spent))
    restore = connector._restore_modules_and_callbacks

    def touched_before(*args: Any, **kwargs: Any) -> None:
        touch(_TOUCHED)
        restore(*args, **kwargs)

    connector._restore_modules_and_callbacks = touched_before
    batches = torch.utils.data.DataLoader(torch.zeros(1000, 1), num_workers=0)
    say("built")
    path = f"{job.url}/stock.ckpt"
    if job.act == "save":
        trainer.fit(Module(), batches)
        if job.method == "lightning":
            trainer.save_checkpoint(path)
        say("saved", bytes=training.state_bytes())
        return
    trainer.fit(Module(), batches, ckpt_path=path if job.method == "lightning" else "latest", weights_only=False)


def _config(job: Job) -> Any:
    from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig

    levels: tuple[PersistentLevel, ...] = ()
    if job.level != "memory":
        levels = (PersistentLevel(job.url, every_n_steps=1, storage_options=job.options),)
    return SnapshotConfig(levels=levels, memory=MemoryLevel(linger_s=DEADLINE_S), job_id=job.job_id)


def _callback(job: Job) -> Any:
    from lazysnap.integrations.lightning import LazySnapshotCallback

    return LazySnapshotCallback(config=_config(job))


def _timed(original: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            spent.append(time.monotonic() - start)

    return timed


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    import torch

    # The import of what a method needs is a phase of its own.
    if job.method in ALONE:
        import lightning  # noqa: F401
    if job.method.startswith("lazysnap"):
        import lazysnap.engine  # noqa: F401
    if job.method == "dcp":
        import torch.distributed.checkpoint.state_dict
    if job.options is not None:
        import fsspec

        fsspec.config.conf["s3"] = job.options  # for all methods the same, as users set it
    if job.world_size > 1:
        os.environ |= {"LOCAL_RANK": str(job.rank), "LOCAL_WORLD_SIZE": str(job.world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
        torch.distributed.init_process_group("gloo", rank=job.rank, world_size=job.world_size)
    say("imported")
    with contextlib.suppress(BrokenPipeError):
        with_lightning(job) if job.method in ALONE else plain(job)


if __name__ == "__main__":
    main()
