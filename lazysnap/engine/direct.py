"""Storing snapshots without a keeper's memory: the training process writes to the levels itself, and waits for it.

One rank alone runs the keeper's own ``NodeStorage`` in this process; only its slot is another one, without memory for
the image (``LiveSlot``). So files, deadlines, names, retention and what is reported are those of the keeper.

Of several ranks each writes its shard of every step that is due, then marks its slot whole. The keeper of the node
sees the words of the slots, and counts the steps that the levels are granted. Where there is no keeper nobody counts
what all ranks have, so nothing is called durable, and nothing is deleted.
"""

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch

from lazysnap.capture.job import CaptureJob, CapturePhase
from lazysnap.capture.plan import CapturePlan
from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.engine.live_slot import LiveSlot
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.node_storage import NodeStorage, StorageContext
from lazysnap.keeper.protocol import LENT, Complete, Keep, Message, Release, Run, SlotsChanged
from lazysnap.levels import open_store
from lazysnap.levels.redaction import shown
from lazysnap.levels.source import RateLimitedSource, RateLimiter
from lazysnap.levels.watchdog import Watchdog
from lazysnap.memory.arena import Slot, Word
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.topology import Team

logger = logging.getLogger("lazysnap.engine")

_META_BYTES = 1 << 20
_LOOK_S = 0.01
_REST_FACTOR = 10
"""After a write that failed training goes on without for so many times as long as it was held up."""


class _OwnMemory:
    """The slots of this process, as ``NodeStorage`` sees the memory of a rank."""

    is_gone = False

    def __init__(self, *, counts: bool) -> None:
        self.is_choosing = not counts
        self.made: list[LiveSlot] = []
        self._start, self._floor = "", 0

    def begin(self, run: Run) -> None:
        self._start, self._floor = run.start, run.floor

    def slots(self) -> list[Slot]:
        return [*self.made]

    def holds(self, slot: Slot, start: str) -> bool:
        return start == self._start and slot.word(Word.SEQUENCE) > self._floor

    def has_begun(self, start: str) -> bool:
        return start == self._start

    def has_left(self, start: str) -> bool:
        return start != self._start


class DirectStorage:
    """Of one engine; used on the training thread. Threads start with the first write, and end in ``close``."""

    def __init__(self, config: SnapshotConfig, client: KeeperClient, team: Team) -> None:
        self._config = config
        self.client = client
        self._team = team
        self._is_alone = team.world_size == 1
        self._memory = _OwnMemory(counts=self._is_alone)
        self._storage: NodeStorage | None = None
        self._run: Run | None = None
        self._steps: dict[int, int] = {}
        self._newest_step = 0
        self._rests_until = 0.0
        self.has_newest = False
        """Whether the newest capture is one that was written by this process, or tried to be."""
        client.note_listener = self._note

    # ---------------------------------------------------------------- writing

    def is_due(self, step: int) -> bool:
        """Whether this process is to store that step."""
        return any(step % math.lcm(one.every_n_steps, self._config.every_n_steps) == 0 for one in self._config.levels)

    @property
    def _is_counted(self) -> bool:
        """Whether the keeper counts what this rank stores."""
        return not self._is_alone and self.client.is_attached

    def write(self, plan: CapturePlan, tensors: list[torch.Tensor], meta: bytes, place: tuple[int, int]) -> CaptureJob:
        """Write the state to storage. ``place``: step and sequence number.

        Blocks: until the fastest level that works has it, but no longer than ``gate_timeout_s`` without a byte moved.
        The job that is returned is whole if a level has it.
        """
        step, sequence = place
        slot = self._free_slot(len(meta))
        job = CaptureJob(plan, slot, step, tensors)
        job.sequence = sequence
        started = time.perf_counter()
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        is_stored = False
        slot.hold(job)
        self._newest_step, self.has_newest = step, True
        try:
            pin = not self._is_counted or slot.is_granted(step)
            slot.begin(step, sequence=sequence, image_bytes=plan.layout.size_bytes, meta=meta, pin=pin)
            is_stored = self._write_counted(slot, step) if self._is_counted else self._write_alone(slot, step)
        finally:
            slot.end() if not is_stored or not self._is_counted else slot.let_go()
        job.copy_s = time.perf_counter() - started
        if is_stored:
            job.phase = CapturePhase.WHOLE
            self._steps = {sequence: step}
        else:
            job.phase = CapturePhase.FAILED
            self._rests_until = time.monotonic() + _REST_FACTOR * job.copy_s
            job.reason = "no level took it"
        return job

    def _write_alone(self, slot: LiveSlot, step: int) -> bool:
        slot.commit()
        storage = self._opened()
        wait = storage.wait_for(step)
        storage.slots_changed()
        moved, seen = time.monotonic(), (0, 0)
        while not wait.is_anywhere() and wait.result() is None and not storage.fails_everywhere():
            if (now := wait.progress()) != seen:
                seen, moved = now, time.monotonic()
            if time.monotonic() - moved > self._config.gate_timeout_s:
                return False
            time.sleep(_LOOK_S)
        return wait.is_anywhere()

    def _write_counted(self, slot: LiveSlot, step: int) -> bool:
        """One shard of several, at the first level that takes it; the keeper looks for it there."""
        for level in self._config.levels:
            what = f"{shown(level.url)}: writing step {step}"
            try:
                Watchdog(functools.partial(_store, slot, level), what).result(
                    min(level.timeout_s, self._config.gate_timeout_s)
                )
            except Exception as error:  # noqa: BLE001  storage packages may raise anything
                logger.info("%s: %s", what, error)
                continue
            slot.commit()  # only now: the keeper looks for the file
            self.client.tell(SlotsChanged())
            return True
        return False

    def is_resting(self) -> bool:
        """Whether the last write failed, and took so long that the next one should wait."""
        return time.monotonic() < self._rests_until

    def has(self, sequence: int) -> bool:
        """Whether that is the last snapshot that this process wrote to storage."""
        return sequence in self._steps

    def has_step(self, step: int) -> bool:
        """Whether the newest snapshot was written by this process, and is of that step."""
        return self.has_newest and step in self._steps.values()

    def _free_slot(self, meta_bytes: int) -> LiveSlot:
        slots = self._memory.made
        if not slots or slots[0].meta_capacity < meta_bytes:
            # Those that are too small go with their last reader.
            count = 1 if self._is_alone else LENT
            slots = self._memory.made = [LiveSlot.make(max(_META_BYTES, 2 * meta_bytes)) for _ in range(count)]
            if not self._is_alone:
                self.client.lend(slots)
        return min(slots, key=lambda slot: (slot.status().pinned, slot.word(Word.SEQUENCE)))

    def _opened(self) -> NodeStorage:
        run = self._run
        assert run is not None, "a capture begins behind the first boundary, and that names the run"
        if self._storage is None or self._storage.run.start != run.start:
            own = replace(self._team, node=0, nodes=1, node_ranks=(self._team.rank,))
            context = StorageContext(lambda: [self._memory], lambda digest: None, self._emit)
            run = msgspec.structs.replace(run, peers=None)
            self._storage = NodeStorage(self._config.levels, run, own, context, self._storage)
        return self._storage

    def _emit(self, message: Message) -> None:
        if self._is_alone or not isinstance(message, Complete):
            self.client.receive_local(message)

    def _note(self, message: Message) -> None:
        """What a keeper is told, the storage of this process has to know as well."""
        if isinstance(message, Run):
            self._run = message
            self._memory.begin(message)
        storage = self._storage
        if storage is None:
            return
        if isinstance(message, Keep):
            storage.keep(message.name, message.step)
        elif isinstance(message, Release):
            storage.release(message.name)

    # ---------------------------------------------------------------- ending

    def drain(self, timeout_s: float) -> bool:
        """Block until the last snapshot that was written is durable at every level; ``False`` if it is not."""
        if self._is_counted:
            return self.client.drain(self._newest_step, timeout_s)
        if self._storage is None or not self._is_alone:
            return False
        deadline = time.monotonic() + timeout_s
        wait = self._storage.wait_for(self._newest_step)
        while (wait.result() is None or not self._storage.is_idle()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return wait.result() is True

    def retire(self) -> None:
        """Captures are in memory again: end what runs here as soon as slower levels have their copies."""
        self.has_newest = False
        if self._storage is not None and not self._storage.is_at_work():
            self.close()

    def close(self) -> None:
        """End after what is being done. Does not block for long."""
        if self._storage is not None:
            self._storage.close()
        self._storage, self._memory.made = None, []


class _LiveSource:
    """The tensors of a capture while training waits (``BlockSource``)."""

    def __init__(self, slot: LiveSlot) -> None:
        self._slot, self.size_bytes = slot, slot.status().image_bytes

    def view(self, offset: int, length: int) -> memoryview:
        return self._slot.read(offset, length)

    def finish(self) -> None:
        """Each look compared them already."""


def _store(slot: LiveSlot, level: PersistentLevel, beat: Callable[[], None]) -> None:
    meta = CaptureMeta.from_bytes(slot.read_meta())
    source = RateLimitedSource(_LiveSource(slot), RateLimiter(level.max_bytes_per_s), beat)
    open_store(level.url, options=level.storage_options).write(meta, source, beat)
