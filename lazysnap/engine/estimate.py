"""Estimates the size of a shard before the optimizer has made its state, so that memory is prepared early."""

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
"""Number of tensors of the size of a parameter that an optimizer always keeps for it."""
_OPTIONS_WITH_COPY = ("amsgrad", "momentum", "centered")
"""Options of a parameter group, each of which adds one such tensor."""
_HEADER_BYTES_PER_TENSOR = 160


Bytes = Callable[[torch.Tensor], int]


def bytes_of_share(replicated: Iterable[torch.Tensor], node_ranks: Collection[int]) -> Bytes:
    """Return a rough estimate of the bytes of a tensor that this rank captures.

    ``replicated``: tensors that the ranks of a node (``node_ranks``) share, besides replicated DTensors.
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
    """Return how many tensors of the size of a parameter the optimizer keeps for each parameter of a group.

    The result is too small for unknown optimizers.
    """
    copies = _STATE_COPIES.get(type(optimizer).__name__, 0)
    for option in _OPTIONS_WITH_COPY:
        if group.get(option):
            copies += 1
    return copies


def estimate_image_bytes(source: StateSource, size: Bytes) -> int:
    """Return the bytes of the shard once every optimizer has made its state; too low for unknown optimizers.

    ``size``: returns the bytes of a tensor that the shard contains.
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
    """Estimate the host memory that training will still take, besides snapshots.

    ``peak_before``: the peak of this process before the first step (``resident_bytes``). A later, higher peak comes
    from training on the CPU, which takes that memory again in each step. Otherwise gradients and optimizer state are
    still to come. Training on a device takes almost no host memory.
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
    """Return the current and the peak memory of this process. Without /proc both are the peak."""
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
    """Return the expected tensors that have memory; of tied tensors only the first."""
    by_memory: dict[tuple[int, int], torch.Tensor] = {}
    for tensor in source.expected().values():
        if not is_uninitialised(tensor):
            local = local_of(tensor)
            by_memory.setdefault((local.data_ptr(), local.nbytes), tensor)
    return by_memory.values()
