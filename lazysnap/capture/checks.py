"""What a whole capture still waits for before the keeper commits it to storage (``arena.Check``).

Checks end on different threads, maybe when the slot holds another capture already: every change of the word, and every
begin of a capture by an engine, is made under one lock.
"""

import threading

from lazysnap.arena import Check, Slot, SlotPhase, Word

CHECKS_LOCK = threading.Lock()
"""Held while a slot is begun, so that no check of its last capture ends in this one."""


def demand(slot: Slot, check: Check) -> None:
    """Let the keeper wait for ``check``."""
    with CHECKS_LOCK:
        slot.set_word(Word.UNCHECKED, slot.word(Word.UNCHECKED) | check)


def passed(slot: Slot, check: Check, sequence: int) -> None:
    """``check`` came out well for the capture ``sequence``, if that is still in ``slot``."""
    with CHECKS_LOCK:
        if slot.word(Word.SEQUENCE) == sequence:
            slot.set_word(Word.UNCHECKED, slot.word(Word.UNCHECKED) & ~check)


def discard(slot: Slot, sequence: int) -> bool:
    """Discard the capture ``sequence``, if it is still in ``slot`` and was not discarded before."""
    with CHECKS_LOCK:
        status = slot.status()
        if status.sequence != sequence or status.phase not in (SlotPhase.WHOLE, SlotPhase.CAPTURING):
            return False
        slot.discard()
        return True
