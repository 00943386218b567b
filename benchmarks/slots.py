"""The memory level: captures into a keeper's slot and restores out of it, beside plain warm copies into and out of one.

Ours is the engine as a training uses it. The copy thread is one on both sides: on a CPU the others belong to training.
Start the process with ``places.WARM_HEAP`` in its environment, else each restore pays for fresh pages (1 GB/s), which
is what a real one does once: that is part of the seconds to resume, not of this.
"""

import contextlib
import os
import time
from collections.abc import Iterator

import torch
from media import BLOCK
from rates import OURS, Samples, Side, alternate

from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine
from lazysnap.arena import Slot
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity

SLOTS = 2
_DEADLINE_S = 120.0


class Copies:
    """``memcpy`` with one thread between warm tensors and populated slots: two by turns, as the engine has them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._slots = [self._views(sum(tensor.nbytes for tensor in tensors)) for _ in range(SLOTS)]

    def _views(self, size: int) -> list[torch.Tensor]:
        slot = Slot.create(1 << 20, size)
        slot.populate()
        views, offset = [], slot.image_offset
        for tensor in self._tensors:
            count, dtype = tensor.numel(), tensor.dtype
            views.append(torch.frombuffer(slot.buffer, dtype=dtype, count=count, offset=offset))
            offset += tensor.nbytes
        return views

    def write(self, number: int) -> None:
        """Into a slot."""
        for view, tensor in zip(self._slots[number % SLOTS], self._tensors, strict=True):
            view.copy_(tensor)

    def read(self, number: int) -> None:
        """Out of a slot."""
        for view, tensor in zip(self._slots[number % SLOTS], self._tensors, strict=True):
            tensor.copy_(view)

    def delete(self, number: int) -> None:
        """Nothing to do."""


class Capturing:
    """A boundary, its copy, and the gate behind it."""

    def __init__(self, engine: SnapshotEngine) -> None:
        self._engine = engine

    def write(self, number: int) -> None:
        """Until the capture is whole."""
        if not self._engine.boundary(number + 1):
            raise RuntimeError(f"no capture began: {self._engine.statistics()}")
        self._engine.gate()
        if self._engine.statistics().last_whole_step != number + 1:
            raise RuntimeError(f"the capture was dropped: {self._engine.statistics()}")

    def read(self, number: int) -> None:
        raise NotImplementedError

    def delete(self, number: int) -> None:
        """Nothing to do."""


class Restoring:
    """What ``restore`` does before it loads: ask the keeper, compare every block, copy every tensor out."""

    def __init__(self, engine: SnapshotEngine, step: int) -> None:
        self._engine, self._step = engine, step

    def write(self, number: int) -> None:
        raise NotImplementedError

    def read(self, number: int) -> None:
        """Until all tensors are the caller's."""
        snapshot = self._engine.fetch()
        if snapshot is None or snapshot.step != self._step or snapshot.skipped:
            raise RuntimeError(f"expected step {self._step} from memory, got {snapshot}")

    def delete(self, number: int) -> None:
        """Nothing to do."""


def _await_checksums(config: SnapshotConfig, step: int) -> None:
    """Until the keeper computed them, in its rest after the trainer left: only then does a restore compare them."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        client = KeeperClient(JobIdentity.from_config(config), config)
        client.connect(_DEADLINE_S)
        entries = client.inventory(_DEADLINE_S).entries
        client.abandon()
        if any(entry.step == step and entry.checksums is not None for entry in entries):
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the keeper did not compute the checksums of the capture in its memory")
        time.sleep(0.2)


@contextlib.contextmanager
def _no_keeper_left(config: SnapshotConfig, state: dict[str, object]) -> Iterator[SnapshotEngine]:
    engine = SnapshotEngine(config, state)
    try:
        yield engine
    finally:
        engine.close(drain=False)


def measure(size: int, rounds: int) -> dict[tuple[str, str], Samples]:
    """Writes, then reads; both with one thread."""
    torch.set_num_threads(1)
    count = max(1, size // (4 * BLOCK))
    model = torch.nn.ParameterList(torch.randn(size // count // 4) for _ in range(count))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3)}
    config = SnapshotConfig(memory=MemoryLevel(slots=SLOTS, linger_s=60.0), job_id=f"slots-{os.getpid()}")
    copies = Copies([parameter.detach() for parameter in model])
    engine = SnapshotEngine(config, state)
    if not engine.wait_ready(_DEADLINE_S):
        raise RuntimeError("the keeper made no slots")
    sides: dict[str, Side] = {"memcpy": copies, OURS: Capturing(engine)}
    taken = alternate(sides, ("write",), rounds)
    engine.abandon()
    _await_checksums(config, rounds + 1)
    with _no_keeper_left(config, state) as engine:
        sides = {"memcpy": copies, OURS: Restoring(engine, rounds + 1)}
        taken.update(alternate(sides, ("read",), rounds))
    return taken
