"""Memory, bytes and time that snapshots of a training take, from its number of parameters; part of ``advise``."""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.filesize import decimal

from lazysnap.config import PersistentLevel, Redundancy, SnapshotConfig, redundancy_for
from lazysnap.errors import ConfigError
from lazysnap.parity.groups import Group, groups_of

_MOST = 1e15
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZERS = {"adamw": 2, "adam": 2, "lion": 1, "muon": 1, "adagrad": 1, "momentum": 1, "sgd": 0, "none": 0}
"""Tensors that an optimizer holds per parameter, each of the parameter's size."""


def quantity(expected: str, units: Mapping[str, float], least: float = 1e-9) -> Callable[[str], float]:
    """Return a function that parses a number with one of ``units`` behind it, for an argument of a command."""
    form = re.compile(rf"(\d+(?:\.\d+)?(?:e\d{{1,2}})?)\s*({'|'.join(units)})")

    def parse(text: str) -> float:
        match = form.fullmatch(text.strip().lower())
        value = float(match[1]) * units[match[2]] if match else 0.0
        if not least <= value <= _MOST:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


parse_params = quantity(
    "a number of parameters such as 7b, 350m or 125000000", {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}, least=1
)
parse_time = quantity("a time such as 0.4s, 5min, 3h or 2d", {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0})
_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
parse_rate = quantity(
    "a rate such as 2GB/s or 500MB/s", {f"{unit}{end}": scale for unit, scale in _BYTES.items() for end in ("", "/s")}
)


def groups_for(redundancy: Redundancy, nodes: int) -> tuple[Group, ...]:
    """Return the groups of so many nodes, each of which fails alone."""
    return groups_of(nodes, redundancy.group_size, redundancy.parity)


def estimate(args: argparse.Namespace, nodes: int, ranks: int) -> dict[str, Any]:
    """Return the sizes. Bytes are those of all nodes together, if the name does not say otherwise.

    Raises: ConfigError.
    """
    # Not at the top: it imports torch, which no other command needs.
    from lazysnap.ranks.partition import STORERS
    from lazysnap.ranks.slots import kept_whole, slots_needed

    config = SnapshotConfig(every_n_steps=args.every_n_steps, levels=(PersistentLevel("plan"),), job_id="plan")
    redundancy = None if args.no_redundancy else redundancy_for(config, nodes)
    trainable = args.params if args.trainable is None else args.trainable
    if trainable > args.params:
        raise ConfigError(f"--trainable {trainable:g} is more than --params {args.params:g}")
    weights = trainable * DTYPES[args.dtype]
    captured = weights + trainable * OPTIMIZERS[args.optimizer] * DTYPES[args.state_dtype or args.dtype]
    frozen = (args.params - trainable) * DTYPES[args.dtype]
    slots = slots_needed(config, ranks, runs_ahead=not args.cpu, is_redundant=redundancy is not None)
    sharing = nodes if args.sharding == "fsdp" else 1
    group, parity = 1, 0.0
    if redundancy is not None:
        group = min(len(one.members) for one in groups_for(redundancy, nodes))
        if args.sharding == "fsdp":  # of two steps: the one that is protected, and the next
            parity = 2 * captured / nodes * redundancy.parity / (group - redundancy.parity)
    memory = (slots * captured + frozen) / sharing + parity
    storers = max(sharing, min(nodes, STORERS))  # where all nodes see the level
    return {
        "weights_bytes": round(weights),
        "captured_bytes": round(captured),
        "frozen_bytes": round(frozen),
        "slots_per_rank": slots,
        "slots_kept_whole": kept_whole(config, ranks, runs_ahead=not args.cpu),
        "nodes_per_group": group,
        "parity_nodes": 0 if redundancy is None else redundancy.parity,
        "parity_per_node_bytes": round(parity),
        "memory_per_rank_bytes": round(memory * nodes / ranks),
        "memory_per_node_bytes": round(memory),
        "stored_per_snapshot_bytes": round(captured),
        "seconds_per_snapshot": captured / storers / args.rate if args.rate else None,
    }


def lines(found: dict[str, Any], args: argparse.Namespace, nodes: int, ranks: int) -> Iterator[str]:
    """Return the text of ``estimate``."""
    size = {name: decimal(int(value)) for name, value in found.items() if name.endswith("_bytes")}
    captured, moments = size["captured_bytes"], decimal(found["captured_bytes"] - found["weights_bytes"])
    is_sharded, is_redundant = args.sharding == "fsdp", found["nodes_per_group"] > 1
    parts = f"weights {size['weights_bytes']}, state of {args.optimizer} {moments}"
    yield f"state     {captured} captured at each step: {parts}"
    if found["frozen_bytes"]:
        where = "by all nodes together" if is_sharded else "by each node"
        yield f"          {size['frozen_bytes']} not trained: captured once, held {where}"
    holds = ", 2 that other nodes protect" if is_redundant else ""
    kept = f"the {found['slots_kept_whole']} newest whole, 1 being written"
    yield f"slots     {found['slots_per_rank']} per rank: {kept}, 1 that storage reads{holds}"
    if is_redundant:
        lost = f"of each {found['nodes_per_group']} nodes any {found['parity_nodes']} may be lost"
        yield f"parity    {size['parity_per_node_bytes']} per node for others: {lost}"
    each = f"{ranks // nodes} rank{'s' * (ranks > nodes)}"
    disk = "where it has less, slots are files on the disk of its first local level"
    yield f"memory    {size['memory_per_node_bytes']} per node of {each}, beside what training takes; {disk}"
    copies = ", where all nodes see the level; as much on each node's own disk"
    yield f"storage   {captured} per snapshot{copies * (not is_sharded and nodes > 1)}"
    if found["seconds_per_snapshot"] is not None:
        yield f"time      {found['seconds_per_snapshot']:.1f} s per snapshot at {decimal(int(args.rate))}/s per node"
    yield "          estimates from the numbers given; buffers, and what else the state holds, come on top"
