"""Layout of an epoch: ranks, batch size, length, workers. A restart compares it with the layout before.

Positions count samples, so that another batch size or another number of ranks skips no sample and does not begin the
epoch again. A sampler that divides one order among the ranks (torch's ``DistributedSampler``, Accelerate's shards)
gives their number: ``n`` batches of every rank are the beginning of that order, and the new ranks begin after it.
Otherwise the length of the epoch shows it. Without a length, all ranks are assumed to divide the data.

Whole batches are skipped: less than one batch of every rank is trained twice, and nothing is skipped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
import xxhash
from torch.utils.data import Subset

EpochLayout = dict[str, int | None]
"""``ranks``; ``samples`` of a step of all ranks; samples of a ``batch``; ``length`` of the epoch in batches.

Also samples in the ``data``; worker processes (``workers``); a digest of the indices of a ``subset``.
"""


def ranks() -> int:
    """Return the number of ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


def is_first_rank() -> bool:
    """True on rank 0, which logs for all ranks, and without other ranks."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank())


def length_of(value: Any) -> int | None:
    """Return the number of batches of a loader, or of samples of a dataset; ``None`` if unknown."""
    try:
        return len(value)
    except Exception:  # noqa: BLE001  the program's code, which training itself may never call
        return None


def layout_of(parts: Sequence[Mapping[str, Any]], length: int | None, data: int | None) -> EpochLayout:
    """Return the layout of a loader's epoch.

    Args:
        parts: The attributes of the loader and of its samplers and datasets.
        length: Batches of the epoch.
        data: Samples of the dataset.
    """
    return {
        "ranks": ranks(),
        "samples": _samples_of_a_step(parts),
        "batch": _first_integer(parts, "batch_size"),
        "length": length,
        "data": data,
        "workers": _first_integer(parts, "num_workers") or 0,
    }


def _first_integer(parts: Sequence[Mapping[str, Any]], name: str) -> int | None:
    for attributes in parts:
        value = attributes.get(name)
        if type(value) is int:
            return value
    return None


def _samples_of_a_step(parts: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of samples of the common order in one batch of every rank; ``None`` if unknown."""
    size = _first_integer(parts, "batch_size") or 1
    for attributes in parts:
        if attributes.get("split_batches") is True:  # Accelerate: each batch is divided among the ranks
            return int(attributes.get("batch_size") or size)
        replicas = attributes.get("num_replicas", attributes.get("num_processes"))
        if type(replicas) is int:
            return size * replicas
    return size if ranks() == 1 else None


def trained_batches(state: Mapping[str, Any]) -> int:
    """Return the number of batches before the position ``state`` in its epoch."""
    if state["given"] is None:
        return int(state["skip"])
    return int(state["given"])


def passed_in(state: Mapping[str, Any], layout: EpochLayout) -> int | None:
    """Return how many current batches contain the trained samples, rounded down.

    ``None`` if the position ``state`` was recorded with the same number of ranks and batch size.
    """
    before: EpochLayout = state["layout"]
    sizes = _sizes(before, layout)
    same_ranks = before["ranks"] == layout["ranks"]
    same_size = sizes is None or sizes[0] == sizes[1]
    if same_ranks and same_size:
        return None
    num_trained = trained_batches(state)
    length = layout["length"]
    if num_trained and num_trained == before["length"] and length is not None:
        return length  # the last batch of an epoch may be short
    if sizes is not None:
        samples_given = num_trained * sizes[0]
        return min(samples_given // sizes[1], length or samples_given)
    if before["length"] and length:
        return num_trained * length // before["length"]
    return num_trained * (before["ranks"] or 1) // (layout["ranks"] or 1)


def _sizes(before: EpochLayout, now: EpochLayout) -> tuple[int, int] | None:
    """Return the samples of a step then and now; those of one rank's batch if only that is known."""
    keys = ["samples"]
    if before["ranks"] == now["ranks"]:
        keys.append("batch")
    for key in keys:
        size_before = before[key]
        size_now = now[key]
        if size_before and size_now:
            return size_before, size_now
    return None


def has_other_workers(state: Mapping[str, Any], layout: EpochLayout) -> bool:
    """True if another number of worker processes read the current epoch of the position ``state``."""
    before: EpochLayout = state["layout"]
    same_ranks = before["ranks"] == layout["ranks"]
    return bool(trained_batches(state)) and same_ranks and before["workers"] != layout["workers"]


def changes_in(state: Mapping[str, Any], layout: EpochLayout, *, is_iterable: bool) -> list[str]:
    """Return sentences about changes of the data since ``state``, and their effect on its epoch.

    They do not mention another number of ranks. ``is_iterable``: the dataset is iterable.
    """
    before: EpochLayout = state["layout"]
    sizes = _sizes(before, layout)
    same_size = sizes is None or sizes[0] == sizes[1]
    changes = []
    if trained_batches(state) and sizes is not None and not same_size and before["ranks"] == layout["ranks"]:
        changes.append(_change_of_batch_size(state, layout, sizes))
    if before["subset"] != layout["subset"]:
        changes.append(
            "its Subset has other indices than in the snapshot, so other samples are trained from here on, maybe some "
            "that were held out before: random_split without a seed draws again at each start; give it "
            "generator=torch.Generator().manual_seed(0)"
        )
    if before["data"] != layout["data"]:
        changes += _change_of_length(state, layout, "data", "samples")
    elif trained_batches(state) and same_size and before["length"] != layout["length"]:
        changes += _change_of_length(state, layout, "length", "batches")
    if has_other_workers(state, layout):
        changes.append(_change_of_workers(before, layout, is_iterable=is_iterable))
    return changes


def _change_of_batch_size(state: Mapping[str, Any], layout: EpochLayout, sizes: tuple[int, int]) -> str:
    num_trained = trained_batches(state)
    passed = passed_in(state, layout) or 0
    again = 0
    if passed != layout["length"]:  # the last batch of an epoch may be short
        again = num_trained * sizes[0] - passed * sizes[1]
    at_most = ""
    if again and layout["length"] is None:
        at_most = "at most "
    return (
        f"a batch has {sizes[1]} samples, in the snapshot {sizes[0]}: of this epoch {num_trained} batches of "
        f"{sizes[0]} were trained, and it continues after {passed} of {sizes[1]}; {at_most}{again} of its samples are "
        "trained twice, none is skipped"
    )


def _change_of_length(state: Mapping[str, Any], layout: EpochLayout, key: str, unit: str) -> list[str]:
    length_before = state["layout"][key]
    length_now = layout[key]
    if length_before is None or length_now is None:
        return []
    text = f"the data has {length_now} {unit}, in the snapshot {length_before}"
    num_trained = trained_batches(state)
    if not num_trained:
        return [f"{text}: from now on the data of the program counts"]
    passed = passed_in(state, layout)
    behind = num_trained
    if passed is not None:
        behind = passed
    return [
        f"{text}: this epoch continues after {behind} batches; if its order is shuffled, it skips some samples and "
        "trains others twice"
    ]


def _change_of_workers(before: EpochLayout, layout: EpochLayout, *, is_iterable: bool) -> str:
    text = f"num_workers is {layout['workers']}, in the snapshot {before['workers']}: "
    if is_iterable:
        return text + (
            "workers divide the data of an iterable dataset among them, so this epoch is read again, divided "
            "otherwise: some samples are trained twice, others not at all; change num_workers between two epochs"
        )
    return text + (
        "the order of the samples is resumed exactly, random numbers drawn in workers (augmentation) are not, until "
        "this epoch ends"
    )


class SubsetDigest:
    """The digest of the indices of a ``Subset``, computed once for each list of indices."""

    def __init__(self) -> None:
        self._indices: list[Any] = []
        self._digest: int | None = None

    def of(self, dataset: Any) -> int | None:
        """Return the digest of the ``Subset`` objects around ``dataset``; ``None`` if there is none."""
        indices: list[Any] = []
        while isinstance(dataset, Subset):
            indices.append(dataset.indices)
            dataset = dataset.dataset
        if not indices:
            return None
        is_known = len(indices) == len(self._indices)
        is_known = is_known and all(old is new for old, new in zip(self._indices, indices, strict=True))
        if not is_known:
            self._indices = indices
            self._digest = _digest_of(indices)
        return self._digest


def _digest_of(indices: Sequence[Any]) -> int:
    digest = xxhash.xxh3_64()
    for numbers in indices:
        if hasattr(numbers, "tolist"):  # a tensor or an array
            numbers = numbers.tolist()
        digest.update(repr(list(numbers)).encode())
    return digest.intdigest() >> 1  # fits a signed integer of 64 bits
