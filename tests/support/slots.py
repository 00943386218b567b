"""Slots for tests, without a keeper that makes them."""

import os
from typing import TypeVar
from unittest import mock

from lazysnap.memory import slots
from lazysnap.memory.slots import TrainerSlot, make_slot

Kind = TypeVar("Kind", bound=TrainerSlot)


def trainer_slot(meta_bytes: int, image_bytes: int, kind: type[Kind] = TrainerSlot) -> Kind:
    """Return a new slot, as a trainer has it; ``kind``: its class."""
    keeper_slot = make_slot(meta_bytes, image_bytes)
    descriptor = os.dup(keeper_slot.descriptor)
    keeper_slot.close()
    return kind.attach(descriptor)


def sparse_slot(meta_bytes: int, image_bytes: int) -> TrainerSlot:
    """Return a new slot in which only those pages take memory that are written to."""

    def set_size(descriptor: int, size_bytes: int, progress: object) -> None:
        os.ftruncate(descriptor, size_bytes)

    with mock.patch.object(slots, "_allocate", set_size):
        return trainer_slot(meta_bytes, image_bytes)
