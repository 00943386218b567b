"""The ranks of one training, and the few words they exchange: when planning and when resuming, never per snapshot.

On a gloo group of its own, in host memory, so that nothing of it meets the training's collectives; what is exchanged
is JSON (``torch.distributed``'s object collectives would unpickle what arrives). Every exchange has a deadline.
"""

import datetime
import json
import os
import socket
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from lazysnap.errors import WaitTimeout
from lazysnap.topology import Place, places


def node_name() -> str:
    """Names this machine: ranks with equal names share memory. Containers on one host have names of their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    # Abstract sockets belong to a network namespace: that is what decides who reaches whose keeper.
    try:
        space = os.readlink("/proc/self/ns/net")
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{boot}/{space}"


class World:
    """All ranks of this training, or this process alone if ``torch.distributed`` is not initialised."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        """Collective if there are several ranks: all of them make it at the same point. Blocks."""
        self._timeout = datetime.timedelta(seconds=timeout_s)
        is_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if is_many else 0
        self.size = dist.get_world_size() if is_many else 1
        self._group: Any = dist.new_group(backend="gloo", timeout=self._timeout) if is_many else None
        self.exchanges = 0
        """Collectives so far; a test sees to it that snapshots need none."""

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank only."""
        return self.size == 1

    @cached_property
    def places(self) -> list[Place]:
        """Where every rank runs. Collective at its first use."""
        return places([str(name) for name in self.exchange(node_name())])

    @property
    def place(self) -> Place:
        """Where this rank runs. Collective at the first use of ``places``."""
        return self.places[self.rank]

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain JSON), in the order of the ranks. Collective. Blocks.

        Raises: WaitTimeout, if a rank is missing at the deadline, or died.
        """
        if self._group is None:
            return [value]
        self.exchanges += 1
        data = torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
            longest = int(max(int(size) for size in sizes))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = data
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(texts, padded, group=self._group)
        except RuntimeError as error:
            raise WaitTimeout(
                f"rank {self.rank} of {self.size}: the other ranks did not answer within "
                f"{self._timeout.total_seconds():g} s: {error}; is a rank dead, or do not all of them call this?"
            ) from error
        return [json.loads(bytes(text[: int(size)].numpy().tobytes())) for text, size in zip(texts, sizes, strict=True)]

    def all_agree(self, ok: bool) -> bool:
        """Whether every rank says yes. Collective. Raises: WaitTimeout."""
        return all(self.exchange(bool(ok)))

    def close(self) -> None:
        """Let the group go."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
