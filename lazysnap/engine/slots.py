"""The slots that a trainer captures into: asked of the keeper, chosen for a capture, returned."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lazysnap.capture.captures import Captures
from lazysnap.capture.registration import registrar
from lazysnap.config import SnapshotConfig
from lazysnap.engine.estimate import growth_bytes, resident_bytes
from lazysnap.engine.statistics import Statistics
from lazysnap.keeper.client import KeeperClient
from lazysnap.memory.arena import Slot, capacity_fits
from lazysnap.memory.slot_files import spill_dir
from lazysnap.memory.slot_pool import fits
from lazysnap.ranks.slots import choose_slot, kept_whole, slots_needed, slots_to_return
from lazysnap.ranks.world import World
from lazysnap.state.source import StateSource

META_BYTES = 1 << 20
"""Least room for the small state in a slot."""


class Slots:
    """Used on the training thread. The rules are those of ``ranks.slots``.

    It has many attributes: what was asked for and what training itself still takes decide together on the next request.
    """

    def __init__(
        self, config: SnapshotConfig, source: StateSource, client: KeeperClient, statistics: Statistics, world: World
    ) -> None:
        self._config, self._world = config, world
        self._source = source
        self._client = client
        self._statistics = statistics
        self.captures = Captures()
        """The captures that are copied into them."""
        self.spill_dir = spill_dir(config.memory, config.levels)
        """Directory in which the keeper makes slots as files if memory does not suffice."""
        self.group = (1, 0)
        """Nodes that protect each other, and how many of them may be lost."""
        self._meta_capacity = META_BYTES
        self._asked: tuple[int, int] | None = None
        """Capacities of metadata and image that were asked for."""
        self._expects_first_step = True
        """True while the keeper still leaves room for the memory of the first step."""
        self._peak_before = 0
        """The peak of this process's memory before the first step."""
        self._waits_for_storage = True
        """True if a capture waits for a slot that storage reads. Not again after such a wait has failed."""

    # ---------------------------------------------------------------- numbers

    @property
    def needed(self) -> int:
        """Slots of this rank."""
        world = self._world
        return slots_needed(self._config, world.size, runs_ahead=world.runs_ahead, is_redundant=self.group[1] > 0)

    @property
    def _least(self) -> int:
        """The least number with which captures are possible: those that are kept and one to write."""
        return self._kept + 1

    @property
    def _kept(self) -> int:
        return kept_whole(self._config, self._world.size, runs_ahead=self._world.runs_ahead)

    @property
    def is_asked(self) -> bool:
        """True once slots were asked for."""
        return self._asked is not None

    def bytes_each(self, image_bytes: int) -> int:
        """Return the size of one slot; where none was asked for yet, of one for such an image."""
        return Slot.bytes_for(*(self._asked or (self._meta_capacity, image_bytes)))

    @property
    def are_enough(self) -> bool:
        """True if there are as many as captures need at least, of the size that was asked for."""
        if self._asked is None:
            return False
        fitting = [slot for slot in self._client.slots() if fits(slot, *self._asked)]
        return len(fitting) >= self._least

    # ---------------------------------------------------------------- asking and returning

    def ask(self, image_bytes: int) -> None:
        """Ask for slots for images of that size. Does not block."""
        wanted = (self._meta_capacity, image_bytes)
        if self._asked != wanted:
            self._asked = wanted
            self.register()
            self.ask_again()

    def ask_again(self) -> None:
        """Ask once more for the same slots: the keeper, the memory or the number may be another one now.

        Does not block.
        """
        if self._asked is None:
            return
        least = self._least if self._world.is_alone else self.needed
        if not self._peak_before:
            self._peak_before = resident_bytes()[1]
        growth = growth_bytes(self._source, self._peak_before)
        # Where memory is short parity goes first: it would take memory, too.
        self._client.reserve(self._asked, self.needed, least, growth, spills=not self.group[1])

    def ask_for(self, image_bytes: int, meta_bytes: int) -> list[Slot]:
        """Return the slots that a capture fits. Asks for others where it does not. Does not block.

        The first step is over by then: the keeper is asked once more, as training takes less from now on.
        """
        if meta_bytes > self._meta_capacity:
            self._meta_capacity = 2 * meta_bytes
        before = self._asked
        # Decided by what was asked for, not by the slots that fit: one that an earlier start left may fit, too.
        if before is None or before[0] != self._meta_capacity or not capacity_fits(before[1], image_bytes):
            self.ask(image_bytes)
        if self._expects_first_step and self._asked == before:
            self.ask_again()
        self._expects_first_step = False
        return self.fitting(image_bytes, meta_bytes)

    def fitting(self, image_bytes: int, meta_bytes: int) -> list[Slot]:
        """Return the slots that a capture fits, without those that are returned here."""
        self.return_unneeded()
        there = [slot for slot in self._client.slots() if capacity_fits(slot.image_capacity, image_bytes)]
        return [slot for slot in there if slot.meta_capacity >= meta_bytes]

    def return_unneeded(self) -> None:
        """Return to the keeper slots of another size, and those beyond the number needed, that hold nothing needed.

        The keeper frees no slot by itself, so nothing that a capture writes into is ever freed.
        """
        if self._asked is None:
            return
        mapped, count = self._client.mapped(), self.needed
        fitting = [fits(slot, *self._asked) for slot in mapped]
        if all(fitting) and len(mapped) <= count:
            return
        statuses = [slot.status() for slot in mapped]
        for index in slots_to_return(statuses, self._idle(mapped), self._kept, fitting, count):
            self._client.return_slot(mapped[index])
            self.captures.forget(mapped[index])

    def register(self) -> None:
        """Have slots registered with CUDA before they count as ready, if the state is on such a device."""
        self._client.make_ready(registrar(self._source.expected().values()))

    # ---------------------------------------------------------------- choosing

    def _idle(self, slots: Sequence[Slot]) -> list[bool]:
        # A copy that still writes its last capture would write into the next one's bytes.
        return [not self.captures.is_writing(slot) for slot in slots]

    def await_one(self, slots: list[Slot], look_again: Callable[[], list[Slot]], *, waits_alone: bool) -> Slot | None:
        """Return a slot for the next capture, taken. Blocks, where storage holds all of them.

        ``waits_alone``: one rank alone waits as several do, instead of leaving the capture out.
        """
        # With several ranks no capture is left out on one of them alone: then no common one might be left.
        waits = not self._world.is_alone or waits_alone
        timeout_s = self._config.io_timeout_s if waits and self._waits_for_storage else 0.0
        started, made, has_waited = time.monotonic(), len(slots), False
        while (slot := self._choose(slots)) is None and time.monotonic() - started < timeout_s:
            if self._client.is_silent:
                break
            has_waited = True
            time.sleep(0.001)
            slots = look_again()  # those of another size may have made room for more
        if has_waited and len(slots) <= made:  # else it waited for memory that was still being made
            self._statistics.slot_waits.add(time.monotonic() - started)
        if slot is not None:
            self._waits_for_storage = self._waits_for_storage or not has_waited
            return slot
        if waits or self._client.is_silent:
            # What reads a slot whose pin is passed over finds another capture there, and commits nothing.
            slot = self._choose(slots, is_pin_passed_over=True)
            self._waits_for_storage = False
        return slot

    def _choose(self, slots: list[Slot], *, is_pin_passed_over: bool = False) -> Slot | None:
        statuses = [slot.status() for slot in slots]
        if is_pin_passed_over:
            statuses = [replace(status, pinned_step=None) for status in statuses]
        index = choose_slot(statuses, self._idle(slots), self._kept)
        # Parity may hold it in this moment: the next look sees that.
        return slots[index] if index is not None and slots[index].take() else None
