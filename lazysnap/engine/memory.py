"""The slots that a trainer captures into: requested from the keeper, awaited, chosen and returned."""

import sys
import time
from collections.abc import Iterable

from rich.filesize import decimal

from lazysnap.capture.captures import Captures
from lazysnap.capture.registration import registrar
from lazysnap.config import SnapshotConfig
from lazysnap.core.messages import MemoryWish
from lazysnap.engine import report
from lazysnap.engine.estimate import bytes_of_share, estimate_image_bytes, growth_bytes, resident_bytes
from lazysnap.engine.keeper_events import KeeperEvents
from lazysnap.engine.messages import MessageKind, Messages
from lazysnap.engine.restart_check import RestartCheck
from lazysnap.engine.statistics import ALL_IN_USE, NO_MEMORY, NO_SLOTS
from lazysnap.errors import JobBusy, KeeperError
from lazysnap.keeper.client import KeeperClient
from lazysnap.memory.budget import NODE, MemoryBoundExceeded
from lazysnap.memory.slot_choice import (
    SlotPhase,
    choose_slot,
    fits_image,
    kept_whole,
    slots_needed,
    surplus_slots,
)
from lazysnap.memory.slot_files import spill_dir
from lazysnap.memory.slots import TrainerSlot, slot_bytes
from lazysnap.ranks.world import World
from lazysnap.state.source import StateSource

META_BYTES = 1 << 20
"""Minimum space for the small state in a slot."""


class Memory:
    """The slots of this rank, and the reason if there are none. Used on the training thread.

    ``memory.slot_choice`` has the rules. The next request depends on what was requested and refused before, and on the
    memory that training will still take.

    PROTECTED (``unprotected`` is ``None``) -> UNPROTECTED (``follow_keeper``) -> PROTECTED (``become_protected``).
    """

    def __init__(
        self, config: SnapshotConfig, source: StateSource, client: KeeperClient, world: World, messages: Messages
    ) -> None:
        self._config = config
        self._source = source
        self.client = client
        self._world = world
        self._messages = messages
        self._statistics = messages.statistics
        self.captures = Captures()
        """The captures that use the slots."""
        self.check = RestartCheck(client, messages, source.clocks, is_alone=world.is_alone)
        """Compares two slots after a restart."""
        self.events = KeeperEvents(config, messages, world.rank)
        self.unprotected: str | None = None
        """The reason why captures have no memory that outlives this process; ``None`` if they have, or it is not known
        yet. Stays until the next capture begins.
        """
        self._last_cause = ""
        """The last such reason, for the message at the end."""
        self.group = (1, 0)
        """Number of nodes that protect each other, and of nodes that may be lost."""
        self._spill_dir = spill_dir(config.memory, config.levels)
        """Directory for slots as files, if memory does not suffice."""
        self.kept = kept_whole(config.every_n_steps, world.size, runs_ahead=world.runs_ahead)
        """K, the number of newest whole captures that are never overwritten: see ``memory.slot_choice``."""
        self._meta_bytes = META_BYTES
        self._asked: tuple[int, int] | None = None
        """Requested bytes of metadata and image."""
        self._expects_first_step = True
        """True while the keeper must leave room for the memory of the first step."""
        self._peak_before = 0
        """The peak memory of this process before the first step."""
        self.is_awaited = True
        """True if the next capture waits for its slot: the first one of a start, or after ``wait_ready``."""
        self._ignored_refusal = ""
        """Text of a refusal of memory after which fewer slots were requested."""
        self._next_retry_s = 0.0
        """Time after which a keeper may be started again, if none could be reached."""

    # Numbers

    @property
    def is_redundant(self) -> bool:
        """True if other nodes read captures to protect them."""
        _, num_lost = self.group
        return num_lost > 0

    @property
    def needed(self) -> int:
        """Return the slots of this rank."""
        return slots_needed(self.kept, is_read=bool(self._config.levels) or self.is_redundant)

    @property
    def is_ready(self) -> bool:
        """True if every slot exists."""
        return len(self.client.slots()) >= self.needed

    @property
    def are_enough(self) -> bool:
        """True if there are enough slots of the requested size for captures."""
        return len(self._fitting(self.client.slots())) > self.kept

    def _fitting(self, slots: Iterable[TrainerSlot]) -> list[int]:
        """Return the ids of slots of the requested size."""
        if self._asked is None:
            return []
        meta_bytes, image_bytes = self._asked
        fitting = []
        for slot in slots:
            if slot.meta_capacity_bytes >= meta_bytes and fits_image(slot.image_capacity_bytes, image_bytes):
                fitting.append(slot.slot_id)
        return fitting

    # Requesting and returning

    def start(self) -> None:
        """Connect to the keeper, or start one, in the background.

        Slots are registered with CUDA before they count as ready, also those of an earlier start.
        """
        self._register()
        self.client.start()

    def _register(self) -> None:
        self.client.make_ready(registrar(self._source.expected().values()))

    def prepare(self) -> None:
        """Request memory before the first boundary. Does not block."""
        if self._asked is None:
            size = bytes_of_share(self._source.replicated_parameters(), self._world.node_ranks)
            self._ask(estimate_image_bytes(self._source, size))

    def _ask(self, image_bytes: int) -> None:
        sizes = (self._meta_bytes, image_bytes)
        if self._asked != sizes:
            self._asked = sizes
            self._register()
            self.ask_again()

    def ask_again(self) -> None:
        """Request slots again: their number, or the memory that training will take, may have changed. Does not
        block.
        """
        if self._asked is None:
            return
        if not self._peak_before:
            _, self._peak_before = resident_bytes()
        meta_bytes, image_bytes = self._asked
        self.client.ask_memory(
            MemoryWish(
                num_slots=self.needed,
                meta_bytes=meta_bytes,
                image_bytes=image_bytes,
                growth_bytes=growth_bytes(self._source, self._peak_before),
                max_bytes=self._config.memory.max_bytes,
                spill_directory=self._spill_dir,
            )
        )

    def _ask_for(self, image_bytes: int, meta_bytes: int) -> None:
        """Request slots that a capture fits, if others were requested. Does not block.

        The first step is over by then, so training takes less memory from now on.
        """
        if meta_bytes > self._meta_bytes:
            self._meta_bytes = 2 * meta_bytes
        before = self._asked
        # Compare with the request, not with the existing slots: a slot of an earlier start may fit, too.
        if before is None or before[0] != self._meta_bytes or not fits_image(before[1], image_bytes):
            self._ask(image_bytes)
        if self._expects_first_step and self._asked == before:
            self.ask_again()
        self._expects_first_step = False

    def return_surplus(self) -> None:
        """Return to the keeper slots of another size, and surplus slots, if their captures are not needed.

        The keeper frees no slot by itself, so a slot is never freed during a capture.
        """
        if self._asked is None:
            return
        slots = {slot.slot_id: slot for slot in self.client.mapped()}
        fitting = self._fitting(slots.values())
        if len(fitting) == len(slots) <= self.needed:
            return  # sizes do not change; words are only read for slots that may be returned
        views = [slot.view() for slot in slots.values()]
        surplus = surplus_slots(views, self.kept, fitting=fitting, count=self.needed, busy=self._busy(slots.values()))
        for view in surplus:
            slot = slots[view.slot_id]
            self.captures.forget(slot)
            self.client.return_slot(slot)

    # Choosing

    def slot_for(self, image_bytes: int, meta_bytes: int) -> TrainerSlot | None:
        """Return a slot for the next capture, which must begin immediately; ``None`` if there is none.

        Blocks, while ``is_awaited``: until there is a slot, or the request is refused, at most ``io_timeout_s``.
        """
        self._ask_for(image_bytes, meta_bytes)
        if self.is_awaited and not self._has_slots_for(image_bytes, meta_bytes):
            self._await_slots_for(image_bytes, meta_bytes)
        slot = self._choose(image_bytes, meta_bytes)
        if slot is None and self.check.give_up():
            slot = self._choose(image_bytes, meta_bytes)
        return slot

    def _await_slots_for(self, image_bytes: int, meta_bytes: int) -> None:
        started_s = time.monotonic()
        while time.monotonic() < started_s + self._config.io_timeout_s:
            if self.unprotected is not None or self.client.is_silent:
                break
            time.sleep(0.001)
            self.follow_keeper()
            if self._has_slots_for(image_bytes, meta_bytes):
                break
        self._statistics.memory_wait_s += time.monotonic() - started_s

    def _has_slots_for(self, image_bytes: int, meta_bytes: int) -> bool:
        """True if a capture finds a slot; with several ranks, if each later one will, too.

        A rank that alone skips a step while its slots are made would have no capture in common with the others.
        """
        if not self._world.is_alone and not self.are_enough:
            return False
        return self._choose(image_bytes, meta_bytes) is not None

    def _choose(self, image_bytes: int, meta_bytes: int) -> TrainerSlot | None:
        self.return_surplus()
        ready = {slot.slot_id: slot for slot in self.client.slots()}
        # Count the newest whole captures in all slots, also in those that are not ready yet.
        slots = self.client.mapped()
        busy = self._busy(slots)
        views = []
        for slot in slots:
            views.append(slot.view())
            if slot.slot_id not in ready:
                busy.append(slot.slot_id)
        view = choose_slot(views, self.kept, image_bytes=image_bytes, meta_bytes=meta_bytes, busy=busy)
        if view is None:
            return None
        return ready[view.slot_id]

    def _busy(self, slots: Iterable[TrainerSlot]) -> list[int]:
        """Return the ids of slots that an earlier capture may still write, or that are being compared."""
        return [slot.slot_id for slot in slots if self.captures.is_writing(slot) or self.check.uses(slot)]

    def why_no_slot(self) -> str:
        """Return why ``slot_for`` returned None. Raises: JobBusy."""
        if self.is_missing:
            self.retry()
            refusal = self.client.refusal()
            if refusal is not None:
                raise refusal
            self.remind()
            return NO_MEMORY
        if self.is_ready:
            return ALL_IN_USE
        return NO_SLOTS

    # The keeper

    def follow_keeper(self) -> None:
        """Count and report changes of the keeper, of levels and of memory since the last call."""
        pid = None
        if self.client.is_connected:
            pid = self.client.keeper_pid
        self.events.compare(self.client.state, pid, is_silent=self.client.is_silent)
        for named in self.client.take_lost_names():
            step = named.key.step
            text = f"the snapshot of step {step} was dropped, or overwritten in memory, before it was stored"
            self.events.lose_name(named.name, text)
        refusal = self._refusal()
        if refusal and self._ask_for_less(refusal):
            return
        error = self.error()
        if error is None:
            return
        cause = str(error)
        if cause != self.unprotected:
            self._next_retry_s = time.monotonic() + self._config.io_timeout_s
        self._become_unprotected(cause)

    def _refusal(self) -> str:
        """Return why the keeper makes no further slot; empty if it does, or after a smaller request. Hot."""
        text = self.client.memory_refusal
        if not self.client.is_connected or text == self._ignored_refusal:
            return ""
        return text

    def error(self) -> KeeperError | JobBusy | None:
        """Return why there is no memory for captures; ``None`` if there is, or it may still come. Hot."""
        if self.client.is_connected:
            text = self._refusal()
            if not text or self.are_enough:
                return None
            return MemoryBoundExceeded(text)
        return self.client.error

    def _ask_for_less(self, refusal: str) -> bool:
        """Give up the slot that only serves the protection by other nodes; ``False`` if there is none."""
        if not self.is_redundant or self._config.levels:  # levels need that slot, too
            return False
        self.group = (1, 0)
        self._ignored_refusal = refusal
        self._messages.tell(MessageKind.NO_PARITY, text=refusal)
        self.ask_again()
        return True

    @property
    def is_missing(self) -> bool:
        """True if captures are impossible, because there is no memory of a keeper. Hot."""
        return self.unprotected is not None and not self.are_enough

    def retry(self) -> None:
        """Connect to a keeper again and request memory, once in ``io_timeout_s``. Does not block."""
        now_s = time.monotonic()
        if now_s >= self._next_retry_s:
            self._next_retry_s = now_s + self._config.io_timeout_s
            self.client.start()
            self.prepare()  # the keeper may have failed before the first request
            self.ask_again()

    def await_all(self, timeout_s: float) -> bool:
        """Block until all slots exist; ``False`` after the deadline, or once memory is refused."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_ready:
            self.follow_keeper()
            self.return_surplus()
            if self.error() is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(0.005)
        return True

    # Contents

    def phase_of(self, step: int) -> SlotPhase:
        """Return the phase of the last capture of ``step`` in its slot; EMPTY if no slot has it."""
        capture = self.captures.of_step(step)
        if capture is not None:
            return capture.slot_phase
        for slot in self.client.mapped():  # the resumed capture
            view = slot.view()
            if view.is_whole and view.step == step:
                return SlotPhase.WHOLE
        return SlotPhase.EMPTY

    def newest_held_step(self) -> int | None:
        """Return the step of the newest capture that is whole in the memory of a live keeper."""
        if not self.client.is_connected:
            return None
        return self.captures.newest_whole_step()

    # Messages

    def become_protected(self, slot: TrainerSlot) -> None:
        """Record that a capture began in that slot. Reports whether it is a file."""
        self.unprotected = None
        self._messages.tell_over(MessageKind.NO_MEMORY)
        if slot.is_file:
            self._messages.tell(MessageKind.FILES, directory=self._spill_dir)

    def _become_unprotected(self, cause: str) -> None:
        """Record why there is no memory. Warns, unless training ends with an error that contains the cause."""
        is_new = self.unprotected is None
        self.unprotected = cause
        self._last_cause = cause
        if is_new and self.client.refusal() is None:
            self._messages.tell(MessageKind.NO_MEMORY, text=cause, lost=self.what_is_lost())

    def remind(self) -> None:
        """Repeat the warning, rarely, while training continues without memory. Called at a boundary."""
        self._messages.tell_again(MessageKind.NO_MEMORY, text=self.unprotected, lost=self.what_is_lost())

    def sum_up(self) -> None:
        """Report the steps that were not protected, if any. Called at the end."""
        count = self._statistics.skipped[NO_MEMORY]
        if not count:
            return
        durable = [f"{url}: step {step}" for url, step in self._statistics.last_durable_step.items()]
        stored = ", ".join(durable) or "none"
        plural = "s" * (count != 1)
        self._messages.tell(
            MessageKind.STEPS_WITHOUT_MEMORY, count=count, s=plural, text=self._last_cause, stored=stored
        )

    def what_is_lost(self) -> str:
        """Return, for a message, what a crash loses while memory is unavailable."""
        newest = max(self._statistics.last_durable_step.values(), default=None)
        since = "the beginning of this training"
        if newest is not None:
            since = f"step {newest}, the newest one on storage"
        return f"nothing is captured, so nothing is stored: a crash loses every step since {since}"

    def report_sizes(self, image_bytes: int) -> None:
        """Print the memory that captures of that size take, and where and how often they are stored.

        Raises: OSError or ValueError, if the machine does not report its memory.
        """
        slots = self.client.slots()
        memory_of_slots = sum(slot.memory_bytes for slot in slots)
        available_bytes = min(NODE.free_bytes() + memory_of_slots, self._config.memory.max_bytes or sys.maxsize)
        per_rank = ""
        if not self._world.is_alone:
            per_rank = " per rank"
        taken = decimal(self.needed * self._bytes_each(image_bytes))
        available = decimal(available_bytes)
        if self.unprotected is not None:
            use = f"no memory: {self.needed} copies would take {taken}{per_rank}"
        elif any(slot.is_file for slot in slots):
            use = f"uses {taken} in files in {self._spill_dir}{per_rank} ({self.needed} copies)"
            available += " of memory"
        else:
            use = f"uses {taken} of memory{per_rank} ({self.needed} copies)"
        self._messages.tell(
            MessageKind.SIZES,
            state=f"{decimal(image_bytes)}{per_rank}",
            use=use,
            available=available,
            stored=report.intervals(self._config, self.group),
        )

    def _bytes_each(self, image_bytes: int) -> int:
        """Return the size of one slot; before the first request, of one for such an image."""
        meta_bytes = self._meta_bytes
        if self._asked is not None:
            meta_bytes, image_bytes = self._asked
        return slot_bytes(meta_bytes, image_bytes)
