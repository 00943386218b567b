"""A plain loop in a process of its own: ``looped.py DIRECTORY CASE DIES_AT SEED``.

It writes DIRECTORY/trace, one line for each thing it does: where it stood, what it saw, what it computed. In step
DIES_AT (0: never) it kills itself when the weights have changed and the boundary is still to come. Under Fabric with
several ranks each has a trace of its own, ``trace.1`` and so on.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import torch  # noqa: E402
from support.bits import digest  # noqa: E402
from support.traced import LENGTH, Augmented, Stream, draws, network, seed_all  # noqa: E402
from support.waiting import TIMEOUT_S  # noqa: E402
from torch.utils.data import DataLoader, Dataset, DistributedSampler  # noqa: E402

from lazysnap import MemoryLevel, PersistentLevel, ResumableLoader, SnapshotConfig, SnapshotEngine  # noqa: E402

BATCH = 7 if "RANK" not in os.environ else 5  # no batch of one sample, which BatchNorm refuses


class Other(Dataset):
    """Data of a second loader."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return 100 + index, torch.full((4,), float(index)) + torch.rand(())


class Shuffled:
    """What every case does; others change a part of it. Without ranks an epoch has four batches."""

    epochs = 2
    accumulation = 1

    def loaders(self):
        """What is given to the engine, by name."""
        return {"loader": ResumableLoader(self.loader())}

    def loader(self, **settings):
        return DataLoader(Augmented(), BATCH, shuffle=True, **settings)

    def prepared(self, model, optimizer, loaders):
        return model, optimizer, loaders

    def backward(self, loss):
        loss.backward()

    def batches(self, loaders, epoch):
        return loaders["loader"]

    def evaluate(self, loaders, model):
        """What is computed between two batches, for the trace."""


class IterableInWorkers(Shuffled):
    def loader(self):
        return DataLoader(Stream(), BATCH, num_workers=2)


class Zipped(Shuffled):
    """The second loader is longer, so it is left in mid-epoch each time."""

    def loaders(self):
        return {**super().loaders(), "other": ResumableLoader(DataLoader(Other(), 4, shuffle=True))}

    def batches(self, loaders, epoch):
        for (numbers, values), (others, more) in zip(loaders["loader"], loaders["other"], strict=False):
            yield torch.cat([numbers, others]), torch.cat([values, more])


class Accumulated(Shuffled):
    """An accumulation may go over the end of an epoch."""

    epochs = 4
    accumulation = 3


class Evaluated(Shuffled):
    """In mid-epoch and at its end, over a loader with random numbers."""

    def loaders(self):
        return {**super().loaders(), "other": ResumableLoader(DataLoader(Other(), 9, shuffle=True))}

    def evaluate(self, loaders, model):
        model.eval()
        with torch.no_grad():
            found = [[numbers.tolist(), model(values).sum().item().hex()] for numbers, values in loaders["other"]]
        model.train()
        return found


class Distributed(Shuffled):
    """One of two ranks, as far as its sampler knows."""

    def loader(self):
        sampler = DistributedSampler(Augmented(), num_replicas=2, rank=1, seed=3)
        return DataLoader(Augmented(), 4, sampler=sampler)

    def batches(self, loaders, epoch):
        loaders["loader"].sampler.set_epoch(epoch)
        return loaders["loader"]


class UnderFabric(Shuffled):
    """As in a process that Fabric's launcher or torchrun started, if there are several."""

    def prepared(self, model, optimizer, loaders):
        from lightning.fabric import Fabric

        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
        self.fabric.launch()
        model, optimizer = self.fabric.setup(model, optimizer)
        loader = self.fabric.setup_dataloaders(loaders["loader"].loader)
        return model, optimizer, {"loader": ResumableLoader(loader)}

    def backward(self, loss):
        self.fabric.backward(loss)


class UnderFabricWithWorkers(UnderFabric):
    def loader(self):
        return super().loader(num_workers=1)


FABRIC = {case.__name__: case for case in (UnderFabric, UnderFabricWithWorkers)}
CASES = {
    case.__name__: case
    for case in (
        Shuffled,
        IterableInWorkers,
        Zipped,
        Accumulated,
        Evaluated,
        Distributed,
    )
}


class Trace:
    """Written line by line, so that nothing is lost when the process is killed."""

    def __init__(self, directory):
        rank = os.environ.get("RANK", "0")
        self.file = (directory / ("trace" if rank == "0" else f"trace.{rank}")).open("a")

    def add(self, **line):
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def main():
    directory, name, dies_at, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    seed_all(seed)
    case = {**CASES, **FABRIC}[name]()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loaders = case.prepared(model, optimizer, case.loaders())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    level = PersistentLevel(str(directory / "level"), every_n_steps=5)
    config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=60))
    trace = Trace(directory)

    def die(*_):
        if engine.step + 1 == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.register_step_post_hook(die)
    progress = {"epoch": 0, "batches": 0}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress, **loaders}
    with SnapshotEngine(config, state) as engine:
        found = engine.restore("latest")
        trace.add(resumed=None if found is None else found.step, level=None if found is None else found.level)
        assert engine._wait_ready(60)  # no step is left out while memory is being prepared
        while progress["epoch"] < case.epochs:
            for numbers, values in case.batches(loaders, progress["epoch"]):
                loss = (model(values) - values).square().mean()
                case.backward(loss)
                progress["batches"] += 1
                line = {"epoch": progress["epoch"], "step": engine.step + 1, "ids": numbers.tolist(), "draw": draws()}
                if progress["batches"] % case.accumulation == 0:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    found = case.evaluate(loaders, model) if engine.step % 3 == 0 else None
                    # Steps this short are over before there is memory for the second one.
                    assert engine._wait_ready(TIMEOUT_S)
                    engine.boundary()
                    line |= {"rate": scheduler.get_last_lr(), "found": found}
                trace.add(**line, loss=loss.item().hex())
            trace.add(evaluated=progress["epoch"], found=case.evaluate(loaders, model), draw=draws())
            progress["epoch"] += 1

    facts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"], "progress": progress}
    trace.add(end=digest({**facts, "scheduler": scheduler.last_epoch, "draws": draws()}))


if __name__ == "__main__":
    main()
