"""The slots that a trainer captures into: asked of the keeper, chosen for a capture, returned."""

from collections.abc import Iterable

from lazysnap.capture.captures import Captures
from lazysnap.capture.registration import registrar
from lazysnap.config import SnapshotConfig
from lazysnap.core.messages import MemoryWish
from lazysnap.engine.estimate import growth_bytes, resident_bytes
from lazysnap.engine.job_settings import num_kept, num_slots
from lazysnap.keeper.client import KeeperClient
from lazysnap.memory.slot_choice import choose_slot, fits_image, surplus_slots
from lazysnap.memory.slot_files import spill_dir
from lazysnap.memory.slots import TrainerSlot, slot_bytes
from lazysnap.ranks.world import World
from lazysnap.state.source import StateSource

META_BYTES = 1 << 20
"""Least room for the small state in a slot."""


class Slots:
    """Used on the training thread. The rules are those of ``memory.slot_choice``.

    It has many attributes: what was asked for and what training itself still takes decide together on the next request.
    """

    def __init__(self, config: SnapshotConfig, source: StateSource, client: KeeperClient, world: World) -> None:
        self._config = config
        self._world = world
        self._source = source
        self._client = client
        self.captures = Captures()
        """The captures that are copied into them."""
        self.spill_dir = spill_dir(config.memory, config.levels)
        """Directory in which the keeper makes slots as files if memory does not suffice."""
        self.is_redundant = False
        """True if other nodes read captures to protect them."""
        self._kept = num_kept(config, world)
        self._meta_bytes = META_BYTES
        self._asked: tuple[int, int] | None = None
        """Bytes of metadata and of the image that were asked for."""
        self._expects_first_step = True
        """True while the keeper still leaves room for the memory of the first step."""
        self._peak_before = 0
        """The peak of this process's memory before the first step."""

    # Numbers

    @property
    def needed(self) -> int:
        """Slots of this rank."""
        return num_slots(self._config, self._world, is_redundant=self.is_redundant)

    @property
    def is_asked(self) -> bool:
        """True once slots were asked for."""
        return self._asked is not None

    def bytes_each(self, image_bytes: int) -> int:
        """Return the size of one slot; where none was asked for yet, of one for such an image."""
        meta_bytes = self._meta_bytes
        if self._asked is not None:
            meta_bytes, image_bytes = self._asked
        return slot_bytes(meta_bytes, image_bytes)

    @property
    def are_enough(self) -> bool:
        """True if there are as many as captures need at least, of the size that was asked for."""
        return len(self._fitting(self._client.slots())) > self._kept

    def _fitting(self, slots: Iterable[TrainerSlot]) -> list[int]:
        """Return the ids of slots of the size that was asked for."""
        if self._asked is None:
            return []
        meta_bytes, image_bytes = self._asked
        fitting = []
        for slot in slots:
            if slot.meta_capacity_bytes >= meta_bytes and fits_image(slot.image_capacity_bytes, image_bytes):
                fitting.append(slot.slot_id)
        return fitting

    # Asking and returning

    def ask(self, image_bytes: int) -> None:
        """Ask for slots for images of that size. Does not block."""
        wanted = (self._meta_bytes, image_bytes)
        if self._asked != wanted:
            self._asked = wanted
            self.register()
            self.ask_again()

    def ask_again(self) -> None:
        """Ask for the same slots: their number, or what training still takes, may be another one now.

        Does not block.
        """
        if self._asked is None:
            return
        if not self._peak_before:
            _, self._peak_before = resident_bytes()
        # Several ranks get no fewer: there would be no capture that all of them have.
        least = self.needed
        if self._world.is_alone:
            least = self._kept + 1
        meta_bytes, image_bytes = self._asked
        self._client.ask_memory(
            MemoryWish(
                num_slots=self.needed,
                meta_bytes=meta_bytes,
                image_bytes=image_bytes,
                least=least,
                growth_bytes=growth_bytes(self._source, self._peak_before),
                max_bytes=self._config.memory.max_bytes,
                spill_directory=self.spill_dir,
            )
        )

    def ask_for(self, image_bytes: int, meta_bytes: int) -> None:
        """Ask for slots that a capture fits, if others were asked for. Does not block.

        The first step is over by then: the keeper is asked once more, as training takes less from now on.
        """
        if meta_bytes > self._meta_bytes:
            self._meta_bytes = 2 * meta_bytes
        before = self._asked
        # Decided by what was asked for, not by the slots that fit: one that an earlier start left may fit, too.
        if before is None or before[0] != self._meta_bytes or not fits_image(before[1], image_bytes):
            self.ask(image_bytes)
        if self._expects_first_step and self._asked == before:
            self.ask_again()
        self._expects_first_step = False

    def return_surplus(self) -> None:
        """Return to the keeper slots of another size, and those beyond the number needed, that hold nothing needed.

        The keeper frees no slot by itself, so nothing that a capture writes into is ever freed.
        """
        if self._asked is None:
            return
        slots = {slot.slot_id: slot for slot in self._client.mapped()}
        fitting = self._fitting(slots.values())
        if len(fitting) == len(slots) <= self.needed:
            return  # decided by sizes, which do not change: words are read only where a slot may go
        views = [slot.view() for slot in slots.values()]
        surplus = surplus_slots(views, self._kept, fitting=fitting, count=self.needed, busy=self._busy(slots.values()))
        for view in surplus:
            slot = slots[view.slot_id]
            self.captures.forget(slot)
            self._client.return_slot(slot)

    def register(self) -> None:
        """Have slots registered with CUDA before they count as ready, if the state is on such a device."""
        self._client.make_ready(registrar(self._source.expected().values()))

    # Choosing

    def choose(self, image_bytes: int, meta_bytes: int) -> TrainerSlot | None:
        """Return a slot for the next capture, which must begin before anything else; ``None`` if all are in use."""
        self.return_surplus()
        ready = {slot.slot_id: slot for slot in self._client.slots()}
        # All slots count among the newest whole captures, also those that are not ready for another capture yet.
        slots = self._client.mapped()
        busy = self._busy(slots)
        busy += [slot.slot_id for slot in slots if slot.slot_id not in ready]
        views = [slot.view() for slot in slots]
        view = choose_slot(views, self._kept, image_bytes=image_bytes, meta_bytes=meta_bytes, busy=busy)
        return None if view is None else ready[view.slot_id]

    def _busy(self, slots: Iterable[TrainerSlot]) -> list[int]:
        """Return the ids of slots into which an earlier capture may still be copied."""
        return [slot.slot_id for slot in slots if self.captures.is_writing(slot)]
