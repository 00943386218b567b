"""Estimates of a shard's size, before the optimizer has made its state, so that memory is prepared from the start."""

import resource
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lazysnap.state.modules import is_uninitialised
from lazysnap.state.sharding import local_of, replicas_of
from lazysnap.state.source import StateSource

_STATE_COPIES = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "Rprop": 2,
    "RMSprop": 1,
    "ASGD": 1,
}
"""Tensors of the size of a parameter that an optimizer keeps for it, whatever its options."""
_OPTIONS_WITH_COPY = ("amsgrad", "momentum", "centered")
"""Options of a group for each of which an optimizer keeps one more."""
_HEADER_BYTES_PER_TENSOR = 160


Bytes = Callable[[torch.Tensor], int]


def bytes_of_share(replicated: Iterable[torch.Tensor], node_ranks: Collection[int]) -> Bytes:
    """Return a rough estimate of the bytes of a tensor that this rank captures.

    ``replicated``: tensors that the ranks of a node (``node_ranks``) share, beside DTensors that several of them hold.
    """
    pointers = {tensor.data_ptr() for tensor in replicated}

    def size(tensor: torch.Tensor) -> int:
        if isinstance(tensor, DTensor):
            num_replicas = len(set(node_ranks).intersection(replicas_of(tensor)))
            return -(-local_of(tensor).nbytes // max(1, num_replicas))
        if tensor.data_ptr() in pointers:
            return -(-tensor.nbytes // len(node_ranks))
        return tensor.nbytes

    return size


def copies_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    """Return how many tensors of the size of a parameter an optimizer keeps for each of a group.

    Too few for unknown optimizers.
    """
    copies = _STATE_COPIES.get(type(optimizer).__name__, 0)
    for option in _OPTIONS_WITH_COPY:
        if group.get(option):
            copies += 1
    return copies


def estimate_image_bytes(source: StateSource, size: Bytes) -> int:
    """Return the bytes of the shard once every optimizer has made its state; too low for unknown optimizers.

    ``size``: how much of a tensor is in it.
    """
    total = 0
    count = 0
    for tensor in _initialised(source):
        total += size(tensor)
        count += 1
    for optimizer in source.optimizers():
        for group in optimizer.param_groups:
            copies = copies_of(optimizer, group)
            for parameter in group["params"]:
                if parameter.requires_grad and not is_uninitialised(parameter):
                    total += size(parameter) * copies
                    count += copies + 1
    return total + count * _HEADER_BYTES_PER_TENSOR + (1 << 20)


def growth_bytes(source: StateSource, peak_before: int) -> int:
    """Estimate the host memory that training is still going to take, beside snapshots.

    ``peak_before``: the peak of this process before the first step (``resident_bytes``). A higher one is of training on
    the CPU, which takes that again in each step. Else the peak was of loading, and what counts are the gradients and
    the optimizer state that are not there. Training on a device takes next to nothing.
    """
    if all(local_of(tensor).device.type != "cpu" for tensor in source.expected().values()):
        return 0
    resident, peak = resident_bytes()
    if peak > peak_before:
        return peak - resident
    total = 0
    for optimizer in source.optimizers():
        for group in optimizer.param_groups:
            copies = copies_of(optimizer, group)
            for parameter in group["params"]:
                if not parameter.requires_grad or is_uninitialised(parameter) or parameter.device.type != "cpu":
                    continue
                num_missing = 0
                if parameter.grad is None:
                    num_missing += 1
                if not optimizer.state.get(parameter):
                    num_missing += copies
                total += local_of(parameter).nbytes * num_missing
    return total


def resident_bytes() -> tuple[int, int]:
    """Return the memory of this process now, and at its peak. Without /proc only the peak is known: it is both."""
    fields = {}
    try:
        with open("/proc/self/status") as file:
            for line in file:
                name, _, value = line.partition(":")
                fields[name] = value
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return peak, peak
    now = int(fields["VmRSS"].split()[0]) * 1024
    peak = int(fields["VmHWM"].split()[0]) * 1024
    return now, max(now, peak)


def _initialised(source: StateSource) -> Iterable[torch.Tensor]:
    """Return the expected tensors that have memory; of those that share it, the first."""
    by_memory: dict[tuple[int, int], torch.Tensor] = {}
    for tensor in source.expected().values():
        if not is_uninitialised(tensor):
            local = local_of(tensor)
            by_memory.setdefault((local.data_ptr(), local.nbytes), tensor)
    return by_memory.values()
