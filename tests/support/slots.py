"""Slots for tests, without a keeper that makes them."""

import os
from typing import TypeVar

from lazysnap.memory.slots import TrainerSlot, make_slot

Kind = TypeVar("Kind", bound=TrainerSlot)


def trainer_slot(
    meta_bytes: int, image_bytes: int, kind: type[Kind] = TrainerSlot, directory: str | None = None
) -> Kind:
    """Return a new slot, as a trainer has it; ``kind``: its class; ``directory``: where it is a file."""
    keeper_slot = make_slot(meta_bytes, image_bytes, directory)
    descriptor = os.dup(keeper_slot.descriptor)
    keeper_slot.close()
    return kind.attach(descriptor)
