"""A trainer that makes two captures in one slot: ``slot_writer.py DESCRIPTOR``."""

import sys

from lazysnap.memory.slots import TrainerSlot
from lazysnap.shard.manifest import CaptureMeta

START = "1" * 16
PIECE_BYTES = 1 << 16
NUM_PIECES = 2


def write(slot: TrainerSlot, sequence: int) -> None:
    """Capture the step of that number, piece by piece."""
    meta = CaptureMeta("0" * 16, START, sequence, 0, 1, captured_ns=sequence).to_bytes()
    size_bytes = NUM_PIECES * PIECE_BYTES
    slot.begin(int(START, 16), sequence, sequence=sequence, image_bytes=size_bytes, meta=meta)
    for stop in range(PIECE_BYTES, size_bytes + 1, PIECE_BYTES):
        slot.image[stop - PIECE_BYTES : stop] = bytes([sequence]) * PIECE_BYTES
        slot.advance(stop)
    slot.commit(copied_ns=1)


if __name__ == "__main__":
    shared = TrainerSlot.attach(int(sys.argv[1]))
    write(shared, 1)
    write(shared, 2)
