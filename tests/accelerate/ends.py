"""Ways in which a training under Accelerate ends, or never begins: ``ends.py DIRECTORY WAY``."""

import signal
import sys
import warnings

warnings.simplefilter("ignore")

import accelerate  # noqa: E402
import torch  # noqa: E402
from accelerated import Augmented, weights  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import lazysnap  # noqa: E402
from lazysnap import LazyAccelerator, MemoryLevel, SnapshotConfig  # noqa: E402
from lazysnap.errors import ConfigError  # noqa: E402


def prepared(accelerator):
    model = torch.nn.Linear(4, 4)
    loader = DataLoader(Augmented(), 4, shuffle=True)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)


def train(accelerator, model, optimizer, loader, way="end"):
    for number, (_, values) in enumerate(loader):
        accelerator.backward((model(values) - values).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if way != "end":  # steps this short are over before there is memory to capture into
            assert accelerator.engine._wait_ready(60)
        if way == "no-end" and number in (1, 3):
            accelerator.save_state()
        if number == 4 and way == "exception":
            raise RuntimeError("in mid-training")
        if number == 4 and way == "ctrl-c":
            # A program that was started in the background inherits that SIGINT is ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)


def run(directory, way):
    """Also with checkpoints under automatic naming; nobody holds the accelerator when the last copies are made."""
    project = accelerate.utils.ProjectConfiguration(directory, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = LazyAccelerator(cpu=True, project_config=project)
    objects = prepared(accelerator)
    found = accelerator.load_state("latest")
    print("resumed", found and found.step, found and found.level.split("/")[0])
    if found is None:
        train(accelerator, *objects, way)


def again(directory):
    """Another training in the same process, after free_memory."""
    accelerator = LazyAccelerator(cpu=True, project_dir=directory)
    objects = prepared(accelerator)
    train(accelerator, *objects)
    objects = accelerator.free_memory(*objects)
    model, optimizer, loader = prepared(accelerator)
    train(accelerator, model, optimizer, loader)
    assert accelerator._lazysnap_integration.step == 7
    assert sorted(accelerator._lazysnap_integration._state._named()) == ["accelerate", "loader", "model", "optimizer"]
    seen = weights(model, optimizer)
    accelerator.free_memory()
    model, optimizer, loader = prepared(accelerator)
    assert accelerator.load_state("latest") is None, "free_memory began another training"
    assert accelerator.load_state(7).step == 7
    assert weights(model, optimizer) == seen
    accelerator.end_training()
    print("done")


def refused(directory):
    """Accelerate runs none of these on a CPU, or not here: their names stand in the state of a real accelerator."""
    stock = accelerate.Accelerator(cpu=True, project_dir=directory)
    shared, kinds = accelerate.PartialState._shared_state, accelerate.DistributedType
    config = SnapshotConfig(memory=MemoryLevel(linger_s=1))

    def becomes(kind):
        shared["distributed_type"] = stock.state.__dict__["distributed_type"] = kind

    for kind in (kinds.DEEPSPEED, kinds.MEGATRON_LM, kinds.XLA):
        becomes(kind)
        try:
            lazysnap.attach(stock, config)
        except ConfigError as error:
            print("refused:", error)
    becomes(kinds.MULTI_GPU)
    accelerate.state.AcceleratorState._shared_state.clear()
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=1, cpu_ram_efficient_loading=False)
    try:
        LazyAccelerator(cpu=True, project_dir=directory, fsdp_plugin=plugin)
    except ConfigError as error:
        print("refused:", error)


if __name__ == "__main__":
    directory, way = sys.argv[1:]
    if way in ("again", "refused"):
        {"again": again, "refused": refused}[way](directory)
    else:
        run(directory, way)
