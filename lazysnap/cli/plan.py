"""``lazysnap plan``: memory, bytes and time that snapshots of a training take, before it is started."""

import argparse
import re
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.output import Output
from lazysnap.config import PersistentLevel, Redundancy, SnapshotConfig, redundancy_for
from lazysnap.errors import ConfigError
from lazysnap.parity.groups import Group, groups_of

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZERS = {"adamw": 2, "adam": 2, "lion": 1, "muon": 1, "adagrad": 1, "momentum": 1, "sgd": 0, "none": 0}
"""Tensors that an optimizer holds per parameter, each of the parameter's size."""


def parse_params(text: str) -> float:
    """Return the number in ``"7b"``, ``"350m"`` or ``"1.5e9"``. Raises: argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)([kmbt]?)", text.strip().lower())
    count = float(match[1]) * _SCALES[match[2]] if match else 0.0
    if not 1 <= count <= 1e15:
        raise argparse.ArgumentTypeError(f"expected a number of parameters such as 7b, 350m or 125000000, got {text!r}")
    return count


def parse_rate(text: str) -> float:
    """Return the bytes per second in ``"2GB/s"``. Raises: argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])b(?:/s)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a rate such as 2GB/s or 500MB/s, got {text!r}")
    return float(match[1]) * _SCALES[match[2]]


def _groups(redundancy: Redundancy, nodes: int) -> tuple[Group, ...]:
    return groups_of([*map(str, range(nodes))], redundancy.group_size, redundancy.parity)


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    plan.add_argument("--params", type=parse_params, required=True, metavar="N", help="parameters: 7b, 350m, 125000000")
    plan.add_argument("--trainable", type=parse_params, metavar="N", help="how many are trained (LoRA); default: all")
    plan.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw")
    plan.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the weights (fp32)")
    plan.add_argument("--state-dtype", choices=sorted(DTYPES), help="of the optimizer's state (as the weights)")
    plan.add_argument("--ranks", type=int, default=1, help="processes of the training (1)")
    plan.add_argument("--nodes", type=int, default=1, help="machines they run on (1)")
    plan.add_argument("--sharding", choices=("ddp", "fsdp"), default="ddp", help="each rank has all, or a part (ddp)")
    plan.add_argument("--every-n-steps", type=int, default=1, help="steps between captures in memory (1)")
    plan.add_argument("--cpu", action="store_true", help="ranks train on CPUs, not on GPUs")
    plan.add_argument("--no-redundancy", action="store_true", help="nodes do not protect each other")
    plan.add_argument("--no-level", action="store_true", help="memory only")
    plan.add_argument("--rate", type=parse_rate, metavar="RATE", help="bytes that storage takes from one node: 2GB/s")


def _estimate(args: argparse.Namespace, config: SnapshotConfig, redundancy: Redundancy | None) -> dict[str, Any]:
    """Return the result of the command. Bytes are those of all nodes together, if the name does not say otherwise."""
    # Not at the top: it imports torch, which no other command needs.
    from lazysnap.ranks.partition import STORERS
    from lazysnap.ranks.slots import kept_whole, slots_needed

    trainable = args.params if args.trainable is None else args.trainable
    if trainable > args.params:
        raise ConfigError(f"--trainable {trainable:g} is more than --params {args.params:g}")
    weights = trainable * DTYPES[args.dtype]
    captured = weights + trainable * OPTIMIZERS[args.optimizer] * DTYPES[args.state_dtype or args.dtype]
    frozen = (args.params - trainable) * DTYPES[args.dtype]
    slots = slots_needed(config, args.ranks, runs_ahead=not args.cpu, is_redundant=redundancy is not None)
    sharing = args.nodes if args.sharding == "fsdp" else 1
    group, parity = 1, 0.0
    if redundancy is not None:
        group = min(len(one.members) for one in _groups(redundancy, args.nodes))
        if args.sharding == "fsdp":  # of two steps: the one that is protected, and the next
            parity = 2 * captured / args.nodes * redundancy.parity / (group - redundancy.parity)
    memory = (slots * captured + frozen) / sharing + parity
    storers = max(sharing, min(args.nodes, STORERS))  # where all nodes see the level
    return {
        "weights_bytes": round(weights),
        "captured_bytes": round(captured),
        "frozen_bytes": round(frozen),
        "slots_per_rank": slots,
        "slots_kept_whole": kept_whole(config, args.ranks, runs_ahead=not args.cpu),
        "nodes_per_group": group,
        "parity_per_node_bytes": round(parity),
        "memory_per_rank_bytes": round(memory * args.nodes / args.ranks),
        "memory_per_node_bytes": round(memory),
        "stored_per_snapshot_bytes": round(captured),
        "seconds_per_snapshot": captured / storers / args.rate if args.rate else None,
    }


def run(args: argparse.Namespace, output: Output) -> int:
    """Estimate. Does not block. Raises: ConfigError."""
    if args.ranks < 1 or args.nodes < 1 or args.ranks % args.nodes:
        raise ConfigError(
            f"--ranks {args.ranks} --nodes {args.nodes}: expected at least one rank, and as many on every node"
        )
    levels = () if args.no_level else (PersistentLevel("plan"),)
    config = SnapshotConfig(every_n_steps=args.every_n_steps, levels=levels, job_id="plan")
    redundancy = None if args.no_redundancy else redundancy_for(config, args.nodes)
    found, is_sharded = _estimate(args, config, redundancy), args.sharding == "fsdp"
    size = {name: decimal(int(value)) for name, value in found.items() if name.endswith("_bytes")}
    captured, moments = size["captured_bytes"], decimal(found["captured_bytes"] - found["weights_bytes"])
    output.line(
        f"state     {captured} captured at each step: weights {size['weights_bytes']}, "
        f"state of {args.optimizer} {moments}"
    )
    if found["frozen_bytes"]:
        where = "by all nodes together" if is_sharded else "by each node"
        output.line(f"          {size['frozen_bytes']} not trained: captured once, held {where}")
    reader = ", 1 that storage reads" if levels else ""
    holds = ", 2 that other nodes protect" if redundancy is not None else ""
    kept = f"the {found['slots_kept_whole']} newest whole, 1 being written"
    output.line(f"slots     {found['slots_per_rank']} per rank: {kept}{reader}{holds}")
    if redundancy is not None:
        lost = f"of each {found['nodes_per_group']} nodes any {redundancy.parity} may be lost"
        output.line(f"parity    {size['parity_per_node_bytes']} per node for others: {lost}")
    ranks_per_node = args.ranks // args.nodes
    each = f"{ranks_per_node} rank{'s' * (ranks_per_node > 1)}"
    output.line(f"memory    {size['memory_per_node_bytes']} per node of {each}, beside what training takes")
    if levels:
        output.line("          where a node has less, slots are files on the disk of its first local level")
        copies = ", where all nodes see the level; as much on each node's own disk"
        output.line(f"storage   {captured} per snapshot{copies * (not is_sharded and args.nodes > 1)}")
    if levels and args.rate:
        rate = f"{found['seconds_per_snapshot']:.1f} s per snapshot at {decimal(int(args.rate))}/s per node"
        output.line(f"time      {rate}: let a level's")
        output.line("          every_n_steps be at least so many seconds of training")
    output.line("These are estimates from the numbers given; buffers, and what else the state holds, come on top.")
    return output.result(**found)
