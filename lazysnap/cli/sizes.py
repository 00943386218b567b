"""Memory, bytes and time that snapshots of a training take, from its number of parameters; part of ``advise``."""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.output import count_of
from lazysnap.config import PersistentLevel, SnapshotConfig, redundancy_for
from lazysnap.memory.slot_choice import kept_whole, slots_needed
from lazysnap.parity.groups import groups_of

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


def estimate(args: argparse.Namespace, nodes: int, ranks: int) -> dict[str, Any]:
    """Return the sizes. Bytes are those of all nodes together, if the name does not say otherwise."""
    config = SnapshotConfig(levels=(PersistentLevel("plan"),), job_id="plan")
    redundancy = redundancy_for(config, nodes)
    weights = args.params * DTYPES[args.dtype]
    captured = weights * (1 + OPTIMIZERS[args.optimizer])
    kept = kept_whole(config.every_n_steps, ranks, runs_ahead=True)
    slots = slots_needed(kept, is_read=True)
    is_sharded = args.sharding == "fsdp"
    group = 1
    parity = 0.0
    if redundancy is not None:
        groups = groups_of(nodes, redundancy.group_size, redundancy.parity)
        group = min(len(each.members) for each in groups)
        if is_sharded:  # of two steps: the one that is protected, and the next
            parity = 2 * captured / nodes * redundancy.parity / (group - redundancy.parity)
    memory = slots * captured / (nodes if is_sharded else 1) + parity
    return {
        "weights_bytes": round(weights),
        "captured_bytes": round(captured),
        "slots_per_rank": slots,
        "slots_kept_whole": kept,
        "nodes_per_group": group,
        "parity_nodes": 0 if redundancy is None else redundancy.parity,
        "parity_per_node_bytes": round(parity),
        "memory_per_rank_bytes": round(memory * nodes / ranks),
        "memory_per_node_bytes": round(memory),
        "stored_per_snapshot_bytes": round(captured),
    }


def lines(advice: dict[str, Any], args: argparse.Namespace, nodes: int, ranks: int) -> Iterator[str]:
    """Return the text of ``estimate``."""
    size = {name: decimal(int(value)) for name, value in advice.items() if name.endswith("_bytes")}
    moments = decimal(advice["captured_bytes"] - advice["weights_bytes"])
    yield f"state     {size['captured_bytes']}: weights {size['weights_bytes']}, state of {args.optimizer} {moments}"
    others = ""
    if advice["nodes_per_group"] > 1:
        others = " and other nodes"
    kept = f"{advice['slots_kept_whole']} newest whole, 1 being written"
    yield f"slots     {advice['slots_per_rank']} per rank: {kept}, 1 read by storage{others}"
    if advice["nodes_per_group"] > 1:
        lost = f"of each {advice['nodes_per_group']} nodes any {advice['parity_nodes']} may be lost"
        yield f"parity    {size['parity_per_node_bytes']} per node for others: {lost}"
    node = f"node of {count_of(ranks // nodes, 'rank')}"
    yield f"memory    {size['memory_per_node_bytes']} per {node}, beside the training"
    yield f"storage   {size['captured_bytes']} per snapshot"
    yield "          estimates; buffers, and what else the state holds, come on top"
