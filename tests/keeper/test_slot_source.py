"""A capture as storage reads it, whatever its trainer does meanwhile."""

from support.names import START
from support.node_rig import RUN

from lazysnap.errors import FormatError
from lazysnap.memory.arena import Slot
from lazysnap.memory.failures import CaptureAborted
from lazysnap.memory.slot_source import SlotSource
from lazysnap.shard.manifest import CaptureMeta


class Words:
    """The words of a slot; ``stored`` is called after each store."""

    def __init__(self, words, stored):
        self.words, self.stored = words, stored

    def __getitem__(self, word):
        return self.words[word]

    def __setitem__(self, word, value):
        self.words[word] = value
        self.stored()


def test_number_size_and_metadata_are_of_one_capture_at_every_moment_of_a_begin():
    """Of the same step, as after going back, so that the step alone tells nothing."""
    slot, seen, found = Slot.create(1 << 16, 1 << 16), [], set()

    def begin(number):
        meta = CaptureMeta(RUN, START, 7, 0, 1, captured_ns=number)
        slot.begin(7, sequence=number, image_bytes=100 * number, meta=meta.to_bytes(), pin=False)

    def look():
        seen.append(slot.status())
        for status in seen:
            try:
                source = SlotSource(slot, status, lambda: None)
            except (CaptureAborted, FormatError):
                continue
            found.add((source.sequence, source.size_bytes, source.meta.captured_ns))

    begin(1)
    slot.commit()
    look()
    slot._words = Words(slot._words, look)
    begin(2)

    assert found == {(1, 100, 1), (2, 200, 2)}
