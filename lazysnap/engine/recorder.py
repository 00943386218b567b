"""What happens at a boundary: the state is walked, planned, given a slot, and its capture begun."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lazysnap import faults
from lazysnap.arena import Check, Slot, SlotPhase, Word, capacity_fits
from lazysnap.capture.checks import CHECKS_LOCK
from lazysnap.capture.job import CaptureJob, CapturePhase
from lazysnap.capture.plan import CapturePlan, Key, check_walk, lazy_keys, make_plan, optimizer_signature
from lazysnap.config import SnapshotConfig
from lazysnap.engine.agreement import Agreement
from lazysnap.engine.alike import check_alike, common_settings
from lazysnap.engine.ballot import NONE
from lazysnap.engine.captures import Captures
from lazysnap.engine.estimate import bytes_of_one, bytes_of_share, estimate_image_bytes
from lazysnap.engine.events import EventLog
from lazysnap.engine.frozen import FrozenTensors
from lazysnap.engine.marks import hold_newest
from lazysnap.engine.meta import MetaWriter
from lazysnap.engine.names import Names
from lazysnap.engine.parameters import names_of_parameters
from lazysnap.engine.partition import Partition, replicated_keys
from lazysnap.engine.slots import choose_slot, kept_instead, kept_whole, slots_needed, wants_agreement
from lazysnap.engine.world import World
from lazysnap.keeper.client import KeeperClient
from lazysnap.policy import is_due, is_wanted
from lazysnap.state.rewalk import StateWalker
from lazysnap.state.sharding import local_of
from lazysnap.state.source import StateSource
from lazysnap.state.walk import Walk

_REMEMBERED = 64
META_BYTES = 1 << 20
"""Least room for the small state in a slot."""


@dataclass(frozen=True)
class _Begun:
    """The last capture that was begun."""

    step: int
    slot: Slot
    sequence: int


class Recorder:
    """Begins captures; all on the training thread, and under the engine's lock."""

    def __init__(
        self, config: SnapshotConfig, source: StateSource, client: KeeperClient, captures: Captures, log: EventLog
    ) -> None:
        self._config = config
        self._source = source
        self._client = client
        self._captures = captures
        self._log = log
        self.meta = MetaWriter.fresh()
        self.names = Names(client)
        self.frozen = FrozenTensors(source, client, log, self.meta, self._lost)
        self._walker = StateWalker()
        self._world: World | None = None
        self._partition: Partition | None = None
        self._lazy: set[Key] = set()
        self._asked: tuple[list[str], bool] = ([], False)
        """Whether there are DTensors among the tensors of these names."""
        self._plan: CapturePlan | None = None
        self._meta_capacity = META_BYTES
        self._reserved: tuple[int, int] | None = None
        self._sequence = 0
        self._begun: _Begun | None = None
        self._whole: dict[int, int] = {}
        """Steps of the last captures that are whole, by sequence number."""
        self.last_step: int | None = None
        """Of the last capture, or of the snapshot that was resumed from."""
        self._seen_step: int | None = None
        self._last_pinned: int | None = None
        self.has_lost_last = False
        """Whether the last capture that began was dropped."""
        self._keepers_lost = 0
        self.encoded_once = False
        self.is_promised = False
        """Whether somebody waited until captures can begin, and none began yet."""
        self._agrees = False
        """Whether all ranks agree on what they have, in words."""
        self._resumed = NONE
        """The step of the snapshot that was resumed."""
        self.agreement: Agreement | None = None

    def join(self, world: World) -> None:
        """Record one of several ranks' part from now on. Collective."""
        self._world = world
        wants = wants_agreement(self._config, world.size)
        mine = [f"{time.time_ns():016x}", self.meta.run_id, self.meta.run_started_ns, wants and world.has_board()]
        told = world.exchange("making the engine", [common_settings(self._config), *mine])
        check_alike([settings for settings, *_ in told])
        self.meta.rank, self.meta.world_size = world.rank, world.size
        _, self.meta.generation, self.meta.run_id, self.meta.run_started_ns, _ = told[0]
        # One rank that cannot be asked would leave the others waiting for it.
        self._agrees = all(agrees for *_, agrees in told)
        if wants and not self._agrees:
            self._log.note_once(
                "agreement",
                "the process group's store cannot be asked by all ranks, so they agree on no snapshot in memory: %s",
                kept_instead(self._config, world.size),
            )

    # ---------------------------------------------------------------- getting ready

    def prepare(self) -> None:
        """Ask for memory before the first boundary. Does not block."""
        if self._plan is None:
            self.frozen.prepare()
        if self._reserved is None:
            size = bytes_of_one if self._world is None else bytes_of_share(self._replicated(), self._world.crew)
            self._reserve(estimate_image_bytes(self._source, self.frozen.names, size))

    def is_ready(self) -> bool:
        """Whether every slot is there, and what every capture refers to."""
        return len(self._client.slots()) >= self._slots_needed() and not self.frozen.is_awaited()

    def _slots_needed(self) -> int:
        return slots_needed(self._config, self.meta.world_size, agrees=self._agrees)

    def resume(self, step: int) -> None:
        """The state of ``step`` is being loaded."""
        self.last_step = self._seen_step = step
        self.frozen.reset()
        self._whole, self.has_lost_last = {}, False
        self._log.statistics.last_whole_step = None  # from here on
        self._resumed = step
        self._end_agreement()

    # ---------------------------------------------------------------- at a boundary

    def is_due(self, step: int, *, force: bool) -> bool:
        """Whether the boundary after ``step`` is to be captured."""
        self._seen_step = step
        last = self.last_step
        if self._world is not None and step != last and step % self._config.every_n_steps == 0:
            return True  # of the step alone: on all ranks alike
        if self._world is not None:
            return step != last and (force or bool(self.names.wanted))
        if last is None or step < last or step - last >= self._config.every_n_steps:
            return True
        return step != last and (force or bool(self.names.wanted))

    def begin(self, step: int) -> bool:
        """Begin the capture; ``False``, and the reason counted, if it cannot be.

        Raises: UnsupportedState; whatever a capture meets.
        """
        if self._captures.is_stuck():
            return self.skip("an earlier copy hangs")
        if self._plan is not None and not self._client.slots():
            self._client.start()
            return self.skip("no slots yet")
        holds = self.frozen.look()
        if holds and self._plan is not None and not self.frozen.is_whole():
            return self._skip_frozen()
        everything = self._walker.walk(self._source.collect())
        walked = self._mine(everything)
        plan = self._planned(walked, everything, holds=holds)
        self.encoded_once = True
        is_whole = self.frozen.is_whole()
        meta = self.meta.write(step, plan, walked, self.frozen.reference())
        self._hold()
        slots = self._usable(plan, len(meta))
        if not is_whole:
            return self._skip_frozen()
        if not slots:
            return self.skip("no slots yet")
        slot = self._free(slots, lambda: self._fitting(plan, len(meta)))
        if slot is None:
            return self.skip("all slots are in use")
        self._start(CaptureJob(plan, slot, step, walked.tensors), meta, pin=self._wants_persistence(step, slots))
        return True

    def _mine(self, walked: Walk) -> Walk:
        """What this rank captures of the state; worked out anew when its structure changed."""
        if self._world is None:
            return self._plain(walked)
        if self._partition is None or not self._partition.holds_for(walked):
            check_walk(walked)
            self._partition = self._world.settle(walked, replicated_keys(self._replicated(), self._source.optimizers()))
            self._lazy = self._partition.lazy_keys(walked, lazy_keys(self._source))
        return self._partition.apply(walked)

    def _replicated(self) -> list[Parameter]:
        # Between two averagings of local SGD no rank's parameters are those of another, in whatever wrapper.
        return [] if self._config.averaging_period is not None else list(self._source.replicated_parameters())

    def _plain(self, walked: Walk) -> Walk:
        """One rank alone holds all of every DTensor (a mesh of one)."""
        if walked.names is not self._asked[0]:
            self._asked = walked.names, any(isinstance(tensor, DTensor) for tensor in walked.tensors)
        return replace(walked, tensors=list(map(local_of, walked.tensors))) if self._asked[1] else walked

    def _start(self, job: CaptureJob, meta: bytes, *, pin: bool) -> None:
        slot, step, size = job.slot, job.step, job.plan.layout.size_bytes
        self._sequence = job.sequence = max(self._sequence, self._client.newest_sequence()) + 1
        faults.point("engine.begin")
        with CHECKS_LOCK:
            slot.begin(step, sequence=job.sequence, image_bytes=size, meta=meta, pin=pin)
            if job.plan.frozen is not None:
                slot.set_word(Word.UNCHECKED, Check.FROZEN)
        if pin:
            self._client.begun(slot, step)
        self._captures.begin(job)
        faults.point("engine.begun")
        self._begun = _Begun(step, slot, job.sequence)
        self.last_step, self.has_lost_last = step, False
        self._last_pinned = step if pin else self._last_pinned
        self._log.statistics.began += 1
        self._log.statistics.shard_bytes = size
        if job.plan.frozen is not None:
            self.frozen.began(slot, job.sequence, job.released)
        self._name(step, job.sequence)

    def skip(self, reason: str) -> bool:
        """Count a boundary that began no capture."""
        self._log.statistics.skipped[reason] += 1
        return False

    def _skip_frozen(self) -> bool:
        return self.skip("immutable tensors are being captured")

    def _planned(self, walked: Walk, everything: Walk, *, holds: bool) -> CapturePlan:
        if self._plan is not None:
            cause = self._plan.mismatch(walked, optimizer_signature(self._source))
            if holds and cause is None:
                return self._plan
            cause = cause or "tensors taken for immutable are not"
            self._log.statistics.replans += 1
            self._log.note_once(f"plan: {cause}", "the capture plan is made anew: %s", cause)
        check_walk(everything)
        self.meta.parameters = names_of_parameters(self._source, everything, self._log)
        frozen = self.frozen.settle(walked)
        if self._partition is None:
            self._plan = make_plan(walked, self._source, frozen)
            return self._plan
        plan = self._plan = make_plan(walked, self._source, frozen, self._lazy, self._partition.aliases)
        for name, facts in self._partition.facts.items():
            plan.logical[name] = {**plan.logical.get(name, {}), **facts}
        return plan

    def _usable(self, plan: CapturePlan, meta_bytes: int) -> list[Slot]:
        """Slots that the capture fits; asks for others where it does not."""
        if meta_bytes > self._meta_capacity:
            self._meta_capacity = 2 * meta_bytes
        slots, needed = self._fitting(plan, meta_bytes), plan.layout.size_bytes
        if not slots or self._reserved is None or not capacity_fits(self._reserved[1], needed):
            # Also where some fit that an earlier start left: those asked for so far would not be enough.
            self._reserve(needed)
            # Their size was estimated; who waited for them is not to lose the first capture over that.
            deadline = time.monotonic() + (self._config.gate_timeout_s if self.is_promised else 0.0)
            while not slots and time.monotonic() < deadline and not self._log.is_open("memory"):
                time.sleep(0.001)
                self._log.drain(self._client.poll_events())
                slots = self._fitting(plan, meta_bytes)
        plan.forget(slots)
        return slots

    def _fitting(self, plan: CapturePlan, meta_bytes: int) -> list[Slot]:
        there, needed = self._client.slots(), plan.layout.size_bytes
        fits = [slot for slot in there if capacity_fits(slot.image_capacity, needed)]
        return [slot for slot in fits if slot.meta_capacity >= meta_bytes]

    def _hold(self) -> None:
        """Mark what the slots may not lose to a change of their size: what other ranks may go back to, too."""
        if self.agreement is not None:
            self.agreement.marks.hold(self._client.slots())
        else:
            hold_newest(self._client.slots(), kept_whole(self._config, self.meta.world_size))

    def _reserve(self, image_bytes: int) -> None:
        wanted = (self._meta_capacity, image_bytes)
        if self._reserved is None or self._reserved != wanted:
            self._reserved = wanted
            self._client.reserve(self._meta_capacity, image_bytes, self._slots_needed())

    def _free(self, slots: list[Slot], look_again: Callable[[], list[Slot]]) -> Slot | None:
        # With several ranks no capture is left out on one of them alone: then no common one might be left.
        waits = self._config.on_busy == "wait" or self._world is not None or self.is_promised
        self.is_promised = False
        deadline = time.monotonic() + (self._config.gate_timeout_s if waits else 0.0)
        kept, agreement = kept_whole(self._config, self.meta.world_size), self._agreed()
        while True:
            # A device that still writes its last capture would write into the next one's bytes and watermark.
            idle = [not self._captures.is_writing(slot) for slot in slots]
            statuses = [slot.status() for slot in slots]
            index = agreement.marks.choose(statuses, idle) if agreement else choose_slot(statuses, idle, kept)
            if index is not None:
                return slots[index]
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.001)
            slots = look_again()  # those of another size may have made room for more

    def _agreed(self) -> Agreement | None:
        if self.agreement is None and self._agrees and self._world is not None:
            # Not before: what others left in memory is known now. Every resume begins another generation.
            key, every = f"lazysnap/{self.meta.generation}", self._config.every_n_steps
            self.agreement = Agreement(self._world, self._client, key, every, self._resumed)
        return self.agreement

    def _wants_persistence(self, step: int, slots: list[Slot]) -> bool:
        if self.names.wanted:
            return True
        levels, world_size = self._config.levels, self.meta.world_size
        if any(is_wanted(level, step) for level in levels):
            return True  # retention asks for this very step, whatever is being written
        # Never of what is idle here, with several ranks: all persist the same steps.
        if world_size == 1 and any(slot.status().pinned for slot in slots):
            return False
        return any(is_due(level, step, self._last_pinned, world_size) for level in levels)

    # ---------------------------------------------------------------- what became of it

    def passed(self, step: int) -> None:
        """The boundary after ``step`` is over, with a capture or without."""
        if self.agreement is not None:
            self.agreement.passed(step)

    def account(self, job: CaptureJob) -> None:
        """A capture is over: count it."""
        statistics = self._log.statistics
        if self.agreement is not None:
            self.agreement.wake()
        if job.phase is CapturePhase.WHOLE:
            statistics.whole += 1
            statistics.last_whole_step = self._whole[job.sequence] = job.step
            self._whole = dict([*self._whole.items()][-_REMEMBERED:])
            statistics.bytes_captured += job.plan.layout.size_bytes
            statistics.copy.add(job.copy_s)
            return
        if job.phase is CapturePhase.TORN:
            statistics.torn += 1
        else:
            statistics.failed += 1
        self._lost(job.sequence)
        self._log.note_once("dropped", "the snapshot of step %d is dropped: %s", job.step, job.reason)

    def _lost(self, sequence: int) -> None:
        """A capture that was whole turned out to be worth nothing."""
        self.names.lost(sequence)
        self._whole.pop(sequence, None)
        self._log.statistics.last_whole_step = max(self._whole.items(), default=(0, None))[1]
        self.has_lost_last |= sequence == self._sequence

    # ---------------------------------------------------------------- names

    def keep(self, name: str) -> int:
        """Name the capture of the last boundary, or else that of the next; its step (of the next: the least)."""
        begun = self._begun
        if begun is not None and begun.step == self._seen_step and self._is_there(begun):
            self.frozen.demand(begun.slot, begun.sequence)
            # Before the keeper hears of it: from now on the slot is not used for another capture.
            begun.slot.set_word(Word.PIN, 1)
            self.names.give(begun.step, self.meta.run_id, begun.sequence, [name])
            return begun.step
        self.names.wanted.append(name)
        return (self._seen_step or 0) + 1

    @staticmethod
    def _is_there(begun: _Begun) -> bool:
        status = begun.slot.status()
        return status.sequence == begun.sequence and status.phase in (SlotPhase.CAPTURING, SlotPhase.WHOLE)

    def _name(self, step: int, sequence: int) -> None:
        if self.names.wanted:
            wanted, self.names.wanted = self.names.wanted, []
            self.names.give(step, self.meta.run_id, sequence, wanted)

    def tell_new_keeper(self) -> None:
        """After a keeper's death: the next one does not know what was asked of the last."""
        lost = self._log.statistics.keepers_lost
        if lost != self._keepers_lost and self._client.slots():
            self._keepers_lost = lost
            durable = self._log.durable_at_loss
            self.names.say_again(
                self.meta.run_id, min((durable.get(level.url, -1) for level in self._config.levels), default=-1)
            )

    # ---------------------------------------------------------------- ending

    def close(self) -> None:
        """Let go of the state and of the slots. Blocks: at most some seconds."""
        self.frozen.close()
        self._plan = None
        self._end_agreement()

    def _end_agreement(self) -> None:
        if self.agreement is not None:
            self.agreement.close()
            self.agreement = None
