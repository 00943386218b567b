"""Storing snapshots without a keeper's memory: the training process writes to the levels itself, and waits for it.

What writes is the keeper's own ``Persister``, run in this process; only its slot is another one, without memory for
the image (``LiveSlot``). So files, deadlines, names, retention and what is reported are those of the keeper.
"""

import logging
import time

import torch

from lazysnap.capture.job import CaptureJob, CapturePhase
from lazysnap.capture.plan import CapturePlan
from lazysnap.config import SnapshotConfig
from lazysnap.engine.live_slot import LiveSlot
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.persist import Persister
from lazysnap.keeper.protocol import CompleteThere, Keep, Message, Release, Run
from lazysnap.keeper.team import Team

logger = logging.getLogger("lazysnap.engine")

_META_BYTES = 1 << 20
_LOOK_S = 0.05
_REST_FACTOR = 10
"""After a write that failed training goes on without for so many times as long as it was held up."""


class DirectStorage:
    """Of one engine; used on the training thread. Threads start with the first write, and end in ``close``."""

    def __init__(self, config: SnapshotConfig, client: KeeperClient, team: Team | None) -> None:
        self._config = config
        self.client = client
        self._team = team or Team()
        self._persister: Persister | None = None
        self._slot: LiveSlot | None = None
        self._newest: int | None = None
        self._steps: dict[int, int] = {}
        self._rests_until = 0.0
        self.has_newest = False
        """Whether the newest capture is one that was written by this process, or tried to be."""
        client.note_listener = self._note

    # ---------------------------------------------------------------- writing

    def write(self, plan: CapturePlan, tensors: list[torch.Tensor], meta: bytes, place: tuple[int, int]) -> CaptureJob:
        """Write the state to every level that is due. ``place``: step and sequence number.

        Blocks: until the fastest level that works has it, but no longer than ``gate_timeout_s`` without a byte moved.
        The job that is returned is whole if a level has it.
        """
        step, sequence = place
        persister, slot = self._opened(len(meta))
        job = CaptureJob(plan, slot, step, tensors)
        job.sequence = sequence
        started = time.perf_counter()
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        slot.hold(job)
        self._newest, self.has_newest = sequence, True
        try:
            slot.begin(step, sequence=sequence, image_bytes=plan.layout.size_bytes, meta=meta, pin=True)
            slot.commit()
            persister.wake()
            is_over = persister.wait_written(slot, self._config.gate_timeout_s)
        finally:
            slot.end()
        job.copy_s = time.perf_counter() - started
        if persister.has(sequence):
            job.phase = CapturePhase.WHOLE
            self._steps = {sequence: step}
        else:
            job.phase = CapturePhase.FAILED
            self._rests_until = time.monotonic() + _REST_FACTOR * job.copy_s
            limit = f"nothing moved at any level for {self._config.gate_timeout_s:g} s"
            job.reason = "no level took it" if is_over else limit
        return job

    def is_resting(self) -> bool:
        """Whether the last write failed, and took so long that the next one should wait."""
        return time.monotonic() < self._rests_until

    def has(self, sequence: int) -> bool:
        """Whether that is the last snapshot that this process wrote to storage."""
        return sequence in self._steps

    def has_step(self, step: int) -> bool:
        """Whether the newest snapshot was written by this process, and is of that step."""
        return self.has_newest and step in self._steps.values()

    def _opened(self, meta_bytes: int) -> tuple[Persister, LiveSlot]:
        if self._slot is None or self._slot.meta_capacity < meta_bytes:
            # One that is too small goes with its last reader.
            self._slot = LiveSlot.make(max(_META_BYTES, 2 * meta_bytes))
        if self._persister is None:
            self._persister = Persister(self._config.levels, self._slots, self._emit, team=self._team)
        return self._persister, self._slot

    def _slots(self) -> list[LiveSlot]:
        return [] if self._slot is None else [self._slot]

    def _emit(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        self.client.receive_local(message)

    def _note(self, message: Message) -> None:
        """What a keeper is told, the persister of this process has to know as well."""
        persister = self._persister
        if persister is None:
            return
        if isinstance(message, Keep):
            persister.keep(message.name, message.run_id, message.sequence)
        elif isinstance(message, Run):
            persister.run_id = message.run_id
        elif isinstance(message, Release):
            persister.release(message.name, message.run_id)
        elif isinstance(message, CompleteThere):
            persister.tell(message.level, message.told)

    # ---------------------------------------------------------------- ending

    def drain(self, timeout_s: float) -> bool:
        """Block until the last snapshot that was written is durable at every level; ``False`` if it is not."""
        persister, newest = self._persister, self._newest
        if persister is None or newest is None:
            return False
        deadline = time.monotonic() + timeout_s
        persister.try_again()
        persister.set_force(1)
        while not persister.is_drained() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        persister.set_force(0)
        return persister.is_sound_everywhere(newest)

    def retire(self) -> None:
        """Captures are in memory again: end what runs here as soon as slower levels have their copies."""
        self.has_newest = False
        if self._persister is not None and self._persister.is_drained():
            self.close()

    def close(self) -> None:
        """End after what is being done. Does not block."""
        if self._persister is not None:
            self._persister.stop()
            self._persister = self._slot = None
