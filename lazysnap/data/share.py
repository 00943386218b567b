"""Each rank's share of the data: how many batches of another number of ranks hold the samples that were trained.

A sampler that cuts one order among the ranks (torch's ``DistributedSampler``, Accelerate's shards) says among how many:
what ``n`` batches of every rank took is the beginning of that order, and the new ranks begin behind it. Elsewhere the
length of the epoch tells, and without a length all ranks are taken to share the data.

Whole batches are passed over: up to one batch of every rank less one sample is trained twice, and nothing is skipped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

Share = dict[str, int | None]


def ranks() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def share_of(parts: Sequence[Mapping[str, Any]], length: int | None) -> Share:
    """``parts``: the attributes of a loader and of its samplers and datasets; ``length``: of its epoch, in batches."""
    return {"ranks": ranks(), "samples": _samples_of_a_batch(parts), "length": length}


def _samples_of_a_batch(parts: Sequence[Mapping[str, Any]]) -> int | None:
    """How many samples of the common order one batch of every rank takes; ``None``, where the parts do not say."""
    size = next((held["batch_size"] for held in parts if type(held.get("batch_size")) is int), 1)
    for held in parts:
        if held.get("split_batches") is True:  # Accelerate: each batch is cut among the ranks
            return int(held.get("batch_size") or size)
        shares = held.get("num_replicas", held.get("num_processes"))
        if type(shares) is int:
            return size * shares
    return size if ranks() == 1 else None


def passed_in(state: Mapping[str, Any], share: Share) -> int | None:
    """How many batches to pass over to get behind the samples that were trained, rounded down.

    ``None``, where the position ``state`` is of the same number of ranks.
    """
    before: Share = state["share"]
    if before["ranks"] == share["ranks"]:
        return None
    given = int(state.get("skip", 0) if state["given"] is None else state["given"])
    if given and given == before["length"] and share["length"] is not None:
        return share["length"]  # the last batch of an epoch may be short
    if before["samples"] and share["samples"]:
        return given * before["samples"] // share["samples"]
    if before["length"] and share["length"]:
        return given * share["length"] // before["length"]
    return given * (before["ranks"] or 1) // (share["ranks"] or 1)
