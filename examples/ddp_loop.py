"""The same GPT on several ranks: DistributedDataParallel in a plain loop, started by torchrun.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ddp_loop.py

Kill one of the processes with `kill -9`: torchrun starts all of them again, and they go on from memory.
"""

import argparse
import logging
import os

import torch
import torch.distributed as dist
from gpt import GPT, HAMLET, GPTSize, TextWindows
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from lazysnap import SnapshotEngine


def join() -> torch.device:
    """Meet the other ranks, over NCCL where each has a GPU of its own; the device to train on."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


def batch_of(data: TextWindows, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's batch of one step: a pure function of both, so that there is no position to store."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    picks = torch.randint(len(data), (size,), generator=generator).tolist()
    ids, targets = zip(*(data[i] for i in picks), strict=True)
    return torch.stack(ids), torch.stack(targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--dirpath", default="runs/ddp_loop", help="the same on all ranks of a node")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    device = join()
    rank = dist.get_rank()
    torch.manual_seed(1603 + rank)  # each rank draws its own dropout; DDP takes the weights of rank 0
    data = TextWindows(HAMLET.read_text(encoding="utf-8"), 64)
    gpt = GPT(GPTSize(layers=4, heads=4, width=128, context=64, vocabulary=len(data.characters))).to(device)
    model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop = {"characters": 0}

    # The wrapped model, not `model.module`: it tells that all ranks hold the same, and each captures its share of it.
    state = {"model": model, "optimizer": optimizer, "loop": loop}
    engine = SnapshotEngine(args.dirpath, state)  # this, restore, the first boundary and the end: all ranks together
    snapshot = engine.restore("latest")
    start = f"resumed at step {snapshot.step} from {snapshot.level}" if snapshot else "a fresh start"
    print(f"rank {rank}, process {os.getpid()}: {start}", flush=True)
    with engine:  # after an exception the keeper stays, for the next start
        while engine.step < args.max_steps:
            step = engine.step + 1
            ids, targets = (part.to(device) for part in batch_of(data, step, 16))
            loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # the engine's hook waits here, only if the last copy is not done yet
            loop["characters"] += ids.numel() * dist.get_world_size()
            engine.boundary()  # everything of this step is over: capture it
            if rank == 0 and step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        print(f"finished at step {args.max_steps} after {loop['characters']:,} characters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
