"""Each rank's share of the data: how many batches of now hold the samples that were trained.

Positions count samples, so that another batch size or another number of ranks neither skips any nor begins the epoch
anew. A sampler that cuts one order among the ranks (torch's ``DistributedSampler``, Accelerate's shards) says among how
many: what ``n`` batches of every rank took is the beginning of that order, and the new ranks begin behind it. Elsewhere
the length of the epoch shows it, and without a length all ranks are taken to share the data.

Whole batches are passed over: up to one batch of every rank less one sample is trained twice, and nothing is skipped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

Share = dict[str, int | None]
"""What a position says of a loader: ``ranks``, ``samples`` and ``batch`` of one step, ``length`` of the epoch in
batches, samples in the ``data``, worker processes, and a digest of the indices of a ``Subset``.
"""


def ranks() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def length_of(value: Any) -> int | None:
    """Return how many batches a loader gives, or samples a dataset has; ``None``, where that is not known."""
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def share_of(parts: Sequence[Mapping[str, Any]], length: int | None, data: int | None = None) -> Share:
    """Return what a position has to say of a loader, to be compared after a restart.

    ``parts``: the attributes of the loader and of its samplers and datasets; ``length``: of its epoch, in batches;
    ``data``: samples of its dataset.
    """
    return {
        "ranks": ranks(),
        "samples": _samples_of_a_batch(parts),
        "batch": _batch_size(parts),
        "length": length,
        "data": data,
        "workers": next((part["num_workers"] for part in parts if type(part.get("num_workers")) is int), 0),
    }


def has_other_workers(state: Mapping[str, Any], share: Share) -> bool:
    """True if the running epoch of the position ``state`` was read by another number of worker processes."""
    return bool(_given(state)) and state["share"]["workers"] != share["workers"]


def _batch_size(parts: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the size of a rank's batches; ``None``, where the parts do not say."""
    return next((held["batch_size"] for held in parts if type(held.get("batch_size")) is int), None)


def _samples_of_a_batch(parts: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the samples of the common order that one batch of every rank takes; ``None``, where the parts do not
    say."""
    size = _batch_size(parts) or 1
    for held in parts:
        if held.get("split_batches") is True:  # Accelerate: each batch is cut among the ranks
            return int(held.get("batch_size") or size)
        shares = held.get("num_replicas", held.get("num_processes"))
        if type(shares) is int:
            return size * shares
    return size if ranks() == 1 else None


def passed_in(state: Mapping[str, Any], share: Share) -> int | None:
    """Return how many batches to pass over to get behind the samples that were trained, rounded down.

    ``None``, where the position ``state`` is of the same number of ranks and of batches of the same size.
    """
    before: Share = state["share"]
    sizes = _sizes(before, share)
    is_of_these_ranks = before["ranks"] == share["ranks"]
    if is_of_these_ranks and (sizes is None or sizes[0] == sizes[1]):
        return None
    given = _given(state)
    if given and given == before["length"] and share["length"] is not None:
        return share["length"]  # the last batch of an epoch may be short
    if sizes is not None:
        return min(given * sizes[0] // sizes[1], share["length"] or given * sizes[0])
    if before["length"] and share["length"]:
        return given * share["length"] // before["length"]
    return given * (before["ranks"] or 1) // (share["ranks"] or 1)


def _given(state: Mapping[str, Any]) -> int:
    if state["given"] is None:
        return int(state["skip"])
    return int(state["given"])


def _sizes(before: Share, now: Share) -> tuple[int, int] | None:
    """Return the samples of a batch then and now: of all ranks, or of one where ranks are as many as before."""
    for key in ("samples", "batch") if before["ranks"] == now["ranks"] else ("samples",):
        then, here = before.get(key), now.get(key)
        if then and here:
            return then, here
    return None


def changes_in(state: Mapping[str, Any], share: Share, passed: int | None) -> list[str]:
    """Return what has changed in the data since ``state``, and what follows for its epoch, in sentences.

    ``passed``: see ``passed_in``. Another number of ranks is not named.
    """
    before, given, sizes = state["share"], _given(state), _sizes(state["share"], share)
    said = []
    if passed is not None and given and sizes is not None and before["ranks"] == share["ranks"]:
        # The last batch of an epoch may be short.
        again = 0 if passed == share["length"] else given * sizes[0] - passed * sizes[1]
        most = "at most " if again and share["length"] is None else ""
        said.append(
            f"a batch has {sizes[1]} samples, in the snapshot {sizes[0]}: of this epoch {given} batches of {sizes[0]} "
            f"were trained, and it goes on behind {passed} of {sizes[1]}; {most}{again} of its samples are trained "
            "twice, none is skipped"
        )
    if before["subset"] != share["subset"]:
        said.append(
            "its Subset has other indices than in the snapshot, so other samples are trained from here on, maybe some "
            "that were held out before: random_split without a seed draws anew at each start; give it "
            "generator=torch.Generator().manual_seed(0)"
        )
    pairs = [("samples", before["data"], share["data"])]
    if given and (sizes is None or sizes[0] == sizes[1]):
        pairs.append(("batches", before["length"], share["length"]))
    for unit, then, now in pairs:
        if then is not None and now is not None and then != now:
            follows = (
                f"this epoch goes on behind {given if passed is None else passed} batches; where its order is "
                "shuffled, it skips some samples and trains others twice"
                if given
                else "as in the program from here on"
            )
            return [*said, f"the data has {now} {unit}, in the snapshot {then}: {follows}"]
    return said


def is_first_rank() -> bool:
    """True on rank 0, which speaks for all ranks, and where there is one rank alone."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank())
