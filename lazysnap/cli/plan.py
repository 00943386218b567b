"""``lazysnap plan``: memory, bytes and time that snapshots of a training take, before it is started."""

import argparse
import re

from rich.filesize import decimal

from lazysnap.cli.output import Output
from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZERS = {"adamw": 2, "adam": 2, "lion": 1, "muon": 1, "adagrad": 1, "momentum": 1, "sgd": 0, "none": 0}
"""Tensors that an optimizer holds per parameter, each of the parameter's size."""


def parse_params(text: str) -> float:
    """``"7b"``, ``"350m"``, ``"1.5e9"``: how many. Raises: argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)([kmbt]?)", text.strip().lower())
    count = float(match[1]) * _SCALES[match[2]] if match else 0.0
    if not 1 <= count <= 1e15:
        raise argparse.ArgumentTypeError(f"expected a number of parameters such as 7b, 350m or 125000000, got {text!r}")
    return count


def parse_rate(text: str) -> float:
    """``"2GB/s"``: bytes per second. Raises: argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])b(?:/s)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a rate such as 2GB/s or 500MB/s, got {text!r}")
    return float(match[1]) * _SCALES[match[2]]


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Those of this command."""
    plan.add_argument("--params", type=parse_params, required=True, metavar="N", help="parameters: 7b, 350m, 125000000")
    plan.add_argument("--trainable", type=parse_params, metavar="N", help="how many are trained (LoRA); default: all")
    plan.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw")
    plan.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the weights (fp32)")
    plan.add_argument("--state-dtype", choices=sorted(DTYPES), help="of the optimizer's state (as the weights)")
    plan.add_argument("--ranks", type=int, default=1, help="processes of the training (1)")
    plan.add_argument("--nodes", type=int, default=1, help="machines they run on (1)")
    plan.add_argument("--sharding", choices=("ddp", "fsdp"), default="ddp", help="each rank has all, or a part (ddp)")
    plan.add_argument("--every-n-steps", type=int, default=1, help="steps between captures in memory (1)")
    plan.add_argument("--no-level", action="store_true", help="memory only")
    plan.add_argument("--rate", type=parse_rate, metavar="RATE", help="bytes that storage takes from one node: 2GB/s")


def run(args: argparse.Namespace, output: Output) -> int:
    """Estimate. Does not block. Raises: ConfigError."""
    # Not at the top: it imports torch, which the other commands do without.
    from lazysnap.engine.partition import STORERS
    from lazysnap.engine.slots import kept_whole, slots_needed

    if args.ranks < 1 or args.nodes < 1 or args.ranks % args.nodes:
        raise ConfigError(
            f"--ranks {args.ranks} --nodes {args.nodes}: expected at least one rank, and as many on every node"
        )
    trainable = args.params if args.trainable is None else args.trainable
    if trainable > args.params:
        raise ConfigError(f"--trainable {trainable:g} is more than --params {args.params:g}")
    levels = () if args.no_level else (PersistentLevel("plan"),)
    config = SnapshotConfig(every_n_steps=args.every_n_steps, levels=levels, job_id="plan")
    weight = DTYPES[args.dtype]
    moments = trainable * OPTIMIZERS[args.optimizer] * DTYPES[args.state_dtype or args.dtype]
    is_sharded = args.sharding == "fsdp"
    weights = trainable * weight
    captured = weights + moments
    frozen = (args.params - trainable) * weight
    ranks_per_node = args.ranks // args.nodes
    slots, kept = slots_needed(config, args.ranks), kept_whole(config, args.ranks)
    held_by = args.nodes if is_sharded else 1
    memory = (slots * captured + frozen) / held_by
    # Where all nodes see the level.
    seconds = captured / (args.nodes if is_sharded else min(args.nodes, STORERS)) / args.rate if args.rate else None
    size = decimal
    output.line(
        f"state     {size(int(captured))} captured at each step: weights {size(int(weights))}, "
        f"state of {args.optimizer} {size(int(moments))}"
    )
    if frozen:
        where = "by all nodes together" if is_sharded else "by each node"
        output.line(f"          {size(int(frozen))} not trained: captured once, held {where}")
    reader = ", 1 that storage reads" if levels else ""
    output.line(f"slots     {slots} per rank: the {kept} newest whole, 1 being written{reader}")
    each = f"{ranks_per_node} rank{'s' * (ranks_per_node > 1)}"
    output.line(f"memory    {size(int(memory))} per node of {each}, beside what training takes")
    if levels:
        copies = ", where all nodes see the level; as much on each node's own disk"
        output.line(f"storage   {size(int(captured))} per snapshot{copies * (not is_sharded and args.nodes > 1)}")
    if levels and seconds is not None:
        output.line(f"time      {seconds:.1f} s per snapshot at {size(int(args.rate))}/s per node: let a level's")
        output.line("          every_n_steps be at least so many seconds of training")
    output.line("These are estimates from the numbers given; buffers, and what else the state holds, come on top.")
    return output.result(
        captured_bytes=round(captured),
        frozen_bytes=round(frozen),
        slots_per_rank=slots,
        memory_per_rank_bytes=round(memory / ranks_per_node),
        memory_per_node_bytes=round(memory),
        stored_per_snapshot_bytes=round(captured),
        seconds_per_snapshot=seconds,
    )
