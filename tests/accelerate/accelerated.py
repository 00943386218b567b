"""A training under Accelerate in a process of its own: ``accelerated.py DIRECTORY CASE DIES_AFTER SEED``.

It appends what it does to DIRECTORY/trace, one line per batch: where it stood, what it saw, what it computed. After
DIES_AFTER optimizer steps of its own (0: never) it kills itself in the middle of the next one.

With RANK and WORLD_SIZE in its environment it is one of several processes, and its trace is DIRECTORY/trace.RANK.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import accelerate  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402
from support.bits import digest  # noqa: E402
from support.traced import Augmented, Progress, SavingStream, Stream, network  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import lazysnap  # noqa: E402
from lazysnap import LazyAccelerator, MemoryLevel, PersistentLevel, SnapshotConfig  # noqa: E402

BATCH, EPOCHS = 4, 3
STEPS_AT_MOST = 17
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Plain:
    """What every case does; others change a part of it."""

    accumulation = 1
    settings = {}
    asks = False
    evaluates = True
    lazy_from_the_start = True

    def loader(self):
        return DataLoader(Augmented(), BATCH, shuffle=True)

    def accelerator(self, directory):
        level = PersistentLevel(str(directory / "level"), every_n_steps=5)
        config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=200))
        made = {
            **self.plugins(),
            "cpu": True,
            "gradient_accumulation_steps": self.accumulation,
            "dataloader_config": accelerate.DataLoaderConfiguration(**self.settings),
            "project_dir": str(directory),
        }
        if self.lazy_from_the_start:
            return LazyAccelerator(**made, snapshots=config)
        return lazysnap.attach(accelerate.Accelerator(**made), config)

    def plugins(self):
        return {}

    def around(self, accelerator, model):
        return contextlib.nullcontext()

    def after_epoch(self, accelerator, progress):
        pass

    def batches(self, accelerator, loader, found, epoch):
        return loader


class Accumulated(Plain):
    accumulation = 3


class Asking(Plain):
    """The script made its accelerator itself, and calls save_state() itself, also within an accumulation."""

    asks = True
    accumulation = 2
    lazy_from_the_start = False


class SeedableSampler(Plain):
    settings = {"use_seedable_sampler": True}


class Stateful(Plain):
    settings = {"use_stateful_dataloader": True}


class Workers(Plain):
    def loader(self):
        return DataLoader(Augmented(), BATCH, shuffle=True, num_workers=1)


class Iterable(Plain):
    def loader(self):
        return DataLoader(Stream(), BATCH)


class SavingIterable(Plain):
    """Accelerate lets one process read it for all, and ahead of what it gives."""

    def loader(self):
        return DataLoader(SavingStream(), BATCH)


class SavingAlone(SavingIterable):
    """It begins at the position that the dataset saves."""

    settings = {"dispatch_batches": False}


class Uneven(Plain):
    settings = {"even_batches": False}

    def loader(self):
        return DataLoader(Augmented(), BATCH, shuffle=True, drop_last=True)


class Guided(Plain):
    """As Accelerate's guide tells: epoch and batch by arithmetic, and skip_first_batches.

    What follows an epoch's last batch is lost then, if the training dies in between.
    """

    evaluates = False

    def batches(self, accelerator, loader, found, epoch):
        if found is not None and epoch == found.step // len(loader):
            return accelerator.skip_first_batches(loader, found.step % len(loader))
        return loader


class Split(Plain):
    settings = {"split_batches": True}


class Sharded(Iterable):
    """Each process reads the whole stream, and takes its part."""

    settings = {"dispatch_batches": False}


class Dispatching(Plain):
    settings = {"use_stateful_dataloader": True, "dispatch_batches": True}


class TakenForGpus(Plain):
    """What Accelerate does on several GPUs only, done here by several processes that it takes for GPUs."""

    def plugins(self):
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        accelerate.PartialState(cpu=True)._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
        return {}


class Joined(TakenForGpus):
    """One process has a batch more than the other, and nothing is captured but between epochs."""

    settings = {"even_batches": False}
    evaluates = False

    def around(self, accelerator, model):
        return accelerator.join_uneven_inputs([model])

    def after_epoch(self, accelerator, progress):
        progress["epoch"] += 1
        accelerator.save_state()


class Fsdp2(TakenForGpus):
    def plugins(self):
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        return {**super().plugins(), "fsdp_plugin": plugin}


CASES = {
    case.__name__: case for case in (Plain, Accumulated, Asking, Stateful, Workers, Guided, SavingIterable, SavingAlone)
}
"""Other loaders of one process are cut in tests/data."""
OF_RANKS = {case.__name__: case for case in (SeedableSampler, Uneven, Split, Sharded, Dispatching, Fsdp2, Joined)}
"""What makes a difference, or is possible, with several processes only."""


def weights(model, optimizer):
    """Of all parameters and the state of the optimizer, what this process has of them."""
    tensors = [
        *model.parameters(),
        *(one for state in optimizer.state_dict()["state"].values() for one in state.values()),
    ]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update((tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().numpy().tobytes())
    return found.hexdigest()


def main():
    directory, name, dies_after, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    accelerate.utils.set_seed(seed)
    case = {**CASES, **OF_RANKS}[name]()
    accelerator = case.accelerator(directory)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    progress = Progress(epoch=0, steps=0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, case.loader(), scheduler)
    accelerator.register_for_checkpointing(progress)
    # Until here all processes draw the same, as samplers must be seeded alike; from here on each its own.
    accelerate.utils.set_seed(seed + 1000 * RANK)
    found = accelerator.load_state("latest")
    begins = progress["steps"]
    trace = (directory / ("trace" if WORLD == 1 else f"trace.{RANK}")).open("a")
    head = {"resumed": found and found.step, "level": found and found.level, "weights": weights(model, optimizer)}
    head |= {"kind": accelerator.distributed_type.name, "steps": begins, "iteration": loader.iteration}
    trace.write(json.dumps(head) + "\n")

    first = progress["epoch"] if name != "Guided" or found is None else found.step // len(loader)
    epoch = first
    while epoch < EPOCHS:
        progress["epoch"] = epoch
        with case.around(accelerator, model):
            for numbers, values in case.batches(accelerator, loader, found, epoch):
                with accelerator.accumulate(model):
                    loss = (model(values) - values).square().mean()
                    accelerator.backward(loss)
                    if dies_after and accelerator.sync_gradients:
                        # The steps are over before there is memory to capture into.
                        assert accelerator.engine._wait_ready(60)
                        if progress["steps"] - begins == dies_after:
                            assert accelerator.engine.wait(until="captured", timeout_s=60)
                            os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                progress["steps"] += accelerator.sync_gradients
                belongs_to = progress["steps"] + (not accelerator.sync_gradients)
                line = {
                    "epoch": progress["epoch"],
                    "step": belongs_to,
                    "ids": numbers.tolist(),
                    "loss": loss.item().hex(),
                }
                line["weights"] = weights(model, optimizer)
                trace.write(json.dumps({**line, "rate": scheduler.get_last_lr(), "draw": random.random()}) + "\n")
                trace.flush()
                if case.asks:
                    accelerator.save_state()
        epoch = progress["epoch"]  # a rollback may have gone into the epoch before
        case.after_epoch(accelerator, progress)
        if case.evaluates:
            line = {"evaluated": epoch, "draw": torch.rand(()).item(), "iteration": loader.iteration}
            trace.write(json.dumps(line) + "\n")
        epoch += 1

    facts = {
        "model": accelerator.unwrap_model(model).state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "scheduler": scheduler.scheduler.last_epoch,
        "draws": [torch.rand(2), random.random(), float(numpy.random.rand())],
    }
    trace.write(json.dumps({"end": digest(facts)}) + "\n")
    trace.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
