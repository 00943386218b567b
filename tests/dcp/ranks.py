"""What the ranks of a world do: train under some strategy and write their shards, or load and compare."""

import gc
import itertools
import json
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from saving import Snapshot, bits, write_rank
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lazysnap.dcp import SnapshotLoadPlanner, SnapshotReader


class Net(torch.nn.Module):
    """Tied weights, an odd size (3 rows over 4 ranks), bf16, a frozen weight, buffers of unusual kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.first = torch.nn.Linear(6, 10)
        self.second = torch.nn.Linear(10, 6)
        self.low = torch.nn.Linear(6, 6).bfloat16()
        self.odd = torch.nn.Linear(6, 3)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.fixed = torch.nn.Linear(6, 5, bias=False).requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("table", torch.linspace(0, 1, 5, dtype=torch.float64))
        self.register_buffer("phase", torch.complex(torch.arange(3.0).double(), torch.ones(3).double()))
        self.register_buffer("tiny", torch.linspace(-2, 2, 7).to(torch.float8_e4m3fn))

    def forward(self, tokens):
        x = torch.relu(self.first(self.embedding(tokens)))
        x = self.low(self.second(x).bfloat16()).float()
        return self.head(x).square().mean() + self.odd(x).square().mean() + self.fixed(x).mean()


def build(strategy: str, seed: int):
    """Model and optimizer under ``ddp``, ``fsdp``, ``hsdp``, ``tp`` (FSDP2 and TP), ``compiled`` or ``plain``."""
    torch.manual_seed(seed)
    model: torch.nn.Module = Net()
    size = dist.get_world_size()
    if strategy == "ddp":
        model = DistributedDataParallel(model, broadcast_buffers=False)
    elif strategy == "compiled":
        model = torch.compile(model)
    elif strategy != "plain":
        shape = {"fsdp": (size,), "hsdp": (2, size // 2), "tp": (size // 2, 2)}[strategy]
        names = {"fsdp": ("data",), "hsdp": ("replicas", "data"), "tp": ("data", "tensor")}[strategy]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if strategy == "tp":
            plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
        whole = mesh["data"] if strategy == "tp" else mesh
        for part in (model.low, model.first, model.second):
            fully_shard(part, mesh=whole)
        fully_shard(model, mesh=whole)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    biases = [parameter for name, parameter in trained if name.endswith("bias")]
    others = [parameter for name, parameter in trained if not name.endswith("bias")]
    groups = [{"params": others, "lr": 1e-2 + seed}, {"params": biases, "weight_decay": 0.25}]
    return model, torch.optim.AdamW(groups, lr=1e-3, foreach=False)


def train(model, optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(100 + step)
        # Only the names of a compiled model matter here, and compiling takes seconds.
        getattr(model, "_orig_mod", model)(torch.randint(0, 11, (4, 3))).backward()
        optimizer.step()
        optimizer.zero_grad()
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inner.seen.add_(1)


def names_of(model, optimizer) -> list[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(item)] for group in optimizer.param_groups for item in group["params"]]


def flat(state, prefix=""):
    """Keys and whole values; tensors as their bits. Collective for DTensors."""
    if isinstance(state, dict):
        return dict(itertools.chain.from_iterable(flat(v, f"{prefix}{k}.").items() for k, v in state.items()))
    if isinstance(state, list) and any(isinstance(value, dict) for value in state):
        return dict(itertools.chain.from_iterable(flat(v, f"{prefix}{i}.").items() for i, v in enumerate(state)))
    if isinstance(state, DTensor):
        state = state.full_tensor()
    return {prefix: bits(state) if isinstance(state, torch.Tensor) else state}


def save(url: str, strategy: str, reference: str, named: bool = True) -> dict:
    """Train one step, write every rank's shard, and on rank 0 what a load has to find."""
    model, optimizer = build(strategy, seed=1)
    train(model, optimizer, 1)
    rank = dist.get_rank()
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "own": {"number": rank, "noise": torch.full((2,), float(rank))},
    }
    replicated = set()
    if strategy == "ddp":
        trained = {name for name, _ in model.named_parameters()}
        replicated = {f"model.{name}" for name in trained} | {"model.module.head.weight"}
        replicated |= {
            f"optimizer.state.{number}.{kind}"
            for number in range(len(names_of(model, optimizer)))
            for kind in ("exp_avg", "exp_avg_sq")
        }
    parameters = {"optimizer": names_of(model, optimizer)} if named else None
    write_rank(Snapshot(url, dist.get_world_size(), parameters=parameters), rank, state, replicated)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    expected = flat({"model": model_state, "optimizer": optimizer_state})
    if rank == 0:
        torch.save(expected, reference)
    return {"leaves": len(expected)}


def load(url: str, strategy: str, reference: str, flattened: bool = False, planner: str = "default") -> dict:
    """Load into another model, compare every value bit by bit, before and after ``set_state_dict``."""
    model, optimizer = build(strategy, seed=2)
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state, "own": {"number": -1, "noise": torch.zeros(2)}}
    expected = torch.load(reference, weights_only=False)
    before = flat({"model": model_state})
    assert before["model.first.weight."] != expected["model.first.weight."]
    reader = SnapshotReader(url)

    dcp.load(state, storage_reader=reader, planner=SnapshotLoadPlanner() if planner == "snapshot" else None)

    if not flattened:
        found = flat({"model": state["model"], "optimizer": state["optimizer"]})
        differ = sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))
        assert not differ, differ
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    model_state, optimizer_state = get_state_dict(model, optimizer)
    found = flat({"model": model_state, "optimizer": optimizer_state})
    differ = sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))
    assert not differ, differ
    train(model, optimizer, 1)
    own = state["own"]
    return {"own": [own["number"], own["noise"].tolist()], "bytes": reader.bytes_read, "step": reader.step}


def load_bare(url: str, steps: list, planner: str) -> dict:
    """Each rank asks for a step of its own (as if it had looked at another moment); all must get one."""
    target = {"w": torch.zeros(4)}
    reader = SnapshotReader(url, step=steps[dist.get_rank()])
    dcp.load(target, storage_reader=reader, planner=SnapshotLoadPlanner() if planner == "snapshot" else None)
    return {"step": reader.step, "w": target["w"].tolist()}


class Forgetful(DefaultLoadPlanner):
    """Makes plans of its own, without what readers noted."""

    def create_global_plan(self, global_plan):
        return [LoadPlan(plan.items) for plan in global_plan]


def fail(url: str, own_rows: bool = False, forgetful: bool = False) -> dict:
    """What every rank hears when a load cannot be done."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)]) if own_rows else torch.zeros(4)}
    planner = Forgetful() if forgetful else None
    try:
        dcp.load(target, storage_reader=SnapshotReader(url), planner=planner)
    except CheckpointException as error:
        return {"error": str(error)}
    return {"error": ""}


def load_rows(url: str) -> dict:
    """Each rank its rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = {"w": distribute_tensor(torch.zeros(400, 100), mesh, [Shard(0)])}
    reader = SnapshotReader(url)
    dcp.load(target, storage_reader=reader)
    good = target["w"].full_tensor().equal(torch.arange(40_000.0).view(400, 100))
    return {"good": good, "bytes": reader.bytes_read}


def main() -> None:
    """One rank of one world, from its beginning to its end."""
    request = json.loads(sys.argv[1])
    rank, folder = request["rank"], request["folder"]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=request["size"])
    result = globals()[request["job"]](**request["arguments"])
    # Models die before their group does, or gloo aborts.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
