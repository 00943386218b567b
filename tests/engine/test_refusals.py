"""What other packages have cut is refused in a plain loop, with one process as with several, before it is captured."""

import pytest
import torch
from small_training import TIMEOUT_S
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lazysnap import SnapshotEngine
from lazysnap.errors import StateError


@pytest.fixture
def make_engine(job):
    engines = []

    def make(objects, *levels):
        engines.append(SnapshotEngine(job.config(*levels), objects))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close(drain=False)


def linear():
    return torch.nn.Linear(4, 4)


def fsdp1(module, **settings):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **settings)


def like(base, *names):
    """A class of these names in DeepSpeed, which is not installed here: the first, of the second, and so on."""
    cls = base
    for name in reversed(names):
        cls = type(name, (cls,), {"__module__": "deepspeed.runtime"})
    return cls


class Engine(like(torch.nn.Module, "DeepSpeedEngine")):
    """As PipelineEngine is one."""

    def __init__(self):
        super().__init__()
        self.module = linear()


class Optimizer(like(object, "DeepSpeedZeroOptimizer", "ZeROOptimizer", "DeepSpeedOptimizer")):
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        raise AssertionError("asked for its state")

    def load_state_dict(self, state):
        raise AssertionError("given a state")


def adam(module):
    return torch.optim.AdamW(module.parameters())


def of_zero3():
    module = linear()
    for parameter in module.parameters():
        parameter.ds_tensor = parameter.detach().clone()
        parameter.data = torch.empty(0)
    return module


CASES = {
    "FSDP 1": (lambda: {"model": fsdp1(linear())}, "model: FullyShardedDataParallel"),
    "FSDP 1, compiled": (lambda: {"model": torch.compile(fsdp1(linear()))}, "model.*: FullyShardedDataParallel"),
    "FSDP 1 inside": (
        lambda: {"model": torch.nn.Sequential(linear(), fsdp1(linear()))},
        r"model\.1: FullyShardedDataParallel",
    ),
    "the module that FSDP 1 wraps": (lambda: {"model": fsdp1(linear(), use_orig_params=True).module}, "FSDP 1"),
    "an optimizer of FSDP 1": (lambda: {"optimizer": adam(fsdp1(linear()))}, "optimizer, parameter 0: .*FSDP 1"),
    "an optimizer that shards": (
        lambda: {"optimizer": ZeroRedundancyOptimizer(linear().parameters(), torch.optim.AdamW)},
        "optimizer: ZeroRedundancyOptimizer",
    ),
    "DeepSpeed": (lambda: {"model": Engine()}, "model: Engine .DeepSpeed"),
    "an optimizer of DeepSpeed": (lambda: {"optimizer": Optimizer(adam(linear()))}, "optimizer: Optimizer .DeepSpeed"),
    "the module that ZeRO 3 cut": (lambda: {"model": of_zero3()}, r"model\.weight: Parameter .DeepSpeed"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_what_another_package_has_cut_is_refused(case, group, make_engine):
    make, message = CASES[case]
    engine = make_engine({"seen": {"n": 1}, **make()})

    for call in (engine.restore, engine._prepare, engine.boundary, engine.boundary):  # it is no better the second time
        with pytest.raises(StateError, match=f"{message}.*cannot be captured.*fully_shard"):
            call()

    assert not engine.statistics().began


def local_by_hook():
    model = DistributedDataParallel(linear())
    model.register_comm_hook(PostLocalSGDState(None, None, start_localSGD_iter=5), post_localSGD_hook)
    return {"model": model}


def local_by_optimizer():
    return {"optimizer": PostLocalSGDOptimizer(adam(linear()), PeriodicModelAverager(4))}


@pytest.mark.parametrize("make", [local_by_hook, local_by_optimizer])
def test_local_sgd_is_refused(make, group, make_engine):
    engine = make_engine(make())

    for _ in range(2):
        with pytest.raises(StateError, match=r"local SGD\) cannot be captured.*Average the gradients at every"):
            engine._prepare()


@pytest.mark.slow
def test_optimizer_steps_within_no_sync_are_refused_and_accumulation_is_not(group, make_engine):
    model = DistributedDataParallel(linear())
    engine = make_engine({"model": torch.compile(model)})
    assert engine._wait_ready(TIMEOUT_S)

    with model.no_sync(), pytest.raises(StateError, match=r"model: .*local SGD\) cannot be captured"):
        engine.boundary(1)

    assert not engine.statistics().began
    assert engine.boundary(2)


@pytest.mark.slow
def test_fsdp2_and_a_plain_optimizer_in_a_group_of_one_are_captured(group, make_engine, tmp_path):
    model = torch.nn.Sequential(linear(), linear())
    fully_shard(model[0])
    fully_shard(model)
    engine = make_engine({"model": model, "optimizer": adam(model)}, tmp_path / "level")
    assert engine._wait_ready(TIMEOUT_S)

    assert engine.boundary(1)
    assert engine.close()
