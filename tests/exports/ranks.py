"""What the ranks of a world do: train under some strategy with snapshots, or load a directory of DCP and compare."""

import gc
import json
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


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
        self.register_buffer("phase", torch.complex(torch.arange(3.0), torch.ones(3)))
        self.register_buffer("tiny", torch.linspace(-2, 2, 7).to(torch.float8_e4m3fn))

    def forward(self, tokens):
        x = torch.relu(self.first(self.embedding(tokens)))
        x = self.low(self.second(x).bfloat16()).float()
        return self.head(x).square().mean() + self.odd(x).square().mean() + self.fixed(x).mean()


def build(strategy: str, seed: int):
    """Model and optimizer under ``ddp``, ``fsdp``, ``hsdp``, ``tp`` (FSDP2 and TP) or ``plain``."""
    torch.manual_seed(seed)
    model: torch.nn.Module = Net()
    size = dist.get_world_size()
    if strategy == "ddp":
        model = DistributedDataParallel(model, broadcast_buffers=False)
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
        model(torch.randint(0, 11, (4, 3))).backward()
        optimizer.step()
        optimizer.zero_grad()
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inner.seen.add_(1)


def engine_for(url: str, **objects) -> SnapshotEngine:
    level = PersistentLevel(url, every_n_steps=1)
    engine = SnapshotEngine(SnapshotConfig(levels=(level,), job_id=url, memory=MemoryLevel(linger_s=1)), objects)
    assert engine._wait_ready(90)
    return engine


def save(url: str, strategy: str, reference: str) -> dict:
    """Capture one step. Torch itself saves that step: whole to a file, and in parts to a directory of DCP."""
    model, optimizer = build(strategy, seed=1)
    rank = dist.get_rank()
    own = {"number": rank, "noise": torch.full((2,), float(rank))}
    engine = engine_for(url, model=model, optimizer=optimizer, own=own)
    train(model, optimizer, 1)
    assert engine.boundary(1)
    engine.gate()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=f"{reference}.dcp")
    whole = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=FULL), strict=True))
    if rank == 0:
        torch.save(whole, reference)
    train(model, optimizer, 1)
    assert engine.close()
    return {}


def load(directory: str, strategy: str, reference: str) -> dict:
    """Load an exported directory into another model, compare every value, and train on."""
    model, optimizer = build(strategy, seed=2)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    whole = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=FULL), strict=True))
    equal = True
    if dist.get_rank() == 0:
        expected = torch.load(reference, weights_only=False)
        equal = flat(whole) == flat(expected)
    train(model, optimizer, 1)
    return {"equal": equal}


def flat(state, prefix: str = "") -> dict:
    """By key, all values; tensors as their bits."""
    if isinstance(state, (dict, list)) and not (isinstance(state, list) and all(isinstance(n, str) for n in state)):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {key: value for name, item in pairs for key, value in flat(item, f"{prefix}{name}.").items()}
    if isinstance(state, torch.Tensor):
        tensor = state.detach().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return {prefix: (tensor.dtype, tuple(tensor.shape), data)}
    return {prefix: state}


def save_pretrained(url: str, kind: str, reference: str) -> dict:
    """Capture one step of a GPT-2: ``fsdp``, or ``lora`` in DDP. Transformers, or PEFT, save it too."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=33, bos_token_id=1, eos_token_id=2, **sizes))
    inner = model
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True, task_type="CAUSAL_LM"
        )
        inner = get_peft_model(model, config)
        model = DistributedDataParallel(inner)
    else:
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    engine = engine_for(url, model=model, optimizer=optimizer)
    tokens = torch.randint(0, 33, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert engine.boundary(1)
    engine.gate()
    states = inner.state_dict() if kind == "lora" else get_state_dict(model, (), options=FULL)[0]
    if dist.get_rank() == 0:
        inner.save_pretrained(reference, state_dict=states)
    assert engine.close()
    return {}


def main() -> None:
    """One rank of one world, from its beginning to its end."""
    request = json.loads(sys.argv[1])
    rank, folder = request["rank"], request["folder"]
    warnings.simplefilter("ignore")
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
