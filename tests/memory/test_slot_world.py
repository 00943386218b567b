"""Memory holds what it promises, however trainer and keeper are interleaved; and each rule of it is needed."""

import random

import mutants
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slot_world import Broken, World

NUM_ACTS = 6
MAX_SEEDS = 400

RULES = {
    # The order of a trainer's stores.
    "the end of the capture before does not count": ("slots", "        self.store(SlotWord.END, 0)\n", ""),
    "a slot is empty while a capture begins": (
        "slots",
        "        self.store(SlotWord.BEGIN, 0)\n        self.store",
        "        self.store",
    ),
    "SEQUENCE comes before the other words": (
        "slots",
        "        self.store(SlotWord.SEQUENCE, sequence)\n"
        "        self.store(SlotWord.END, 0)\n"
        "        self.store(SlotWord.START, start)\n"
        "        self.store(SlotWord.IMAGE_BYTES, image_bytes)\n",
        "        self.store(SlotWord.END, 0)\n"
        "        self.store(SlotWord.START, start)\n"
        "        self.store(SlotWord.IMAGE_BYTES, image_bytes)\n"
        "        self.store(SlotWord.SEQUENCE, sequence)\n",
    ),
    "the watermark starts again": ("slots", "        self.store(SlotWord.WATERMARK, 0)\n", ""),
    "metadata comes before BEGIN": (
        "slots",
        "        self._meta[: len(meta)] = meta\n        self.store(SlotWord.META_BYTES, len(meta))\n",
        "        self.store(SlotWord.BEGIN, step + 1)\n"
        "        self._meta[: len(meta)] = meta\n        self.store(SlotWord.META_BYTES, len(meta))\n",
    ),
    # The reader.
    "the words are of one capture": ("slots", "if self.load(SlotWord.SEQUENCE) == sequence:", "if True:"),
    "a reader waits for the watermark": ("capture_reader", "view.watermark_bytes >= needed_bytes", "True"),
    "a capture that is not whole ends the read": (
        "capture_reader",
        "(SlotPhase.CAPTURING, SlotPhase.WHOLE)",
        "SlotPhase",
    ),
    "what was read counts only if the capture is whole": ("capture_reader", "view.phase is SlotPhase.WHOLE)", "True)"),
    "what was read counts only if the capture is the same": (
        "capture_reader",
        "view.sequence != self.sequence or ",
        "",
    ),
    "metadata that was written over is not damaged": (
        "capture_reader",
        "            self.check()  # metadata",
        "            pass  # metadata",
    ),
    # The choice of a slot, and holds.
    "held slots are not chosen": ("slot_choice", "not view.is_held and ", ""),
    "the newest whole ones are not chosen": ("slot_choice", "and view not in untouched ", ""),
    "only what is untouchable is held": (
        "slots",
        "view.sequence == sequence and is_untouchable(view, views, kept)",
        "True",
    ),
    "a hold is of what is untouchable, not of what is there": (
        "slots",
        "view.sequence == sequence and is_untouchable(view, views, kept)",
        "view.sequence == sequence",
    ),
    "the held slot is read last": (
        "slots",
        "        views = [slot.view() for slot in rank_slots if slot.slot_id != self.slot_id]\n",
        "        view = self.view()\n"
        "        views = [slot.view() for slot in rank_slots if slot.slot_id != self.slot_id]\n"
        "        if is_untouchable(view, [*views, view], kept):\n"
        "            return True\n",
    ),
}
"""What is left out, and what notices it: see ``World``."""


def run_world(modules, seed):
    world = World(modules, random.Random(seed).randrange)
    try:
        world.run(NUM_ACTS)
    finally:
        world.close()


def run_worlds(modules, seeds):
    for seed in seeds:
        run_world(modules, seed)


@pytest.fixture(scope="module")
def modules():
    return mutants.load()


@given(st.integers(0, 1 << 32))
def test_whole_captures_stay_and_are_read_as_they_were_captured(modules, seed):
    """In any order of stores, deaths of either process and captures of the same step."""
    run_world(modules, seed)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule):
    modules = mutants.load(*RULES[rule])

    with pytest.raises(Broken):
        run_worlds(modules, range(MAX_SEEDS))
