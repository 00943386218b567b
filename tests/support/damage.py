"""Damage to files and to memory."""

import os
import pathlib

from lazysnap.memory.slots import Slot


def flip(path: pathlib.Path, offset: int = -1) -> None:
    """Change a bit of one byte, by default of the last one."""
    with path.open("r+b") as file:
        place = file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def flip_memory(slot: Slot, offset: int) -> None:
    """Change a bit of one byte of the image in a keeper's slot that this process was given for reading."""
    at = slot.size_bytes - slot.image_capacity_bytes + offset
    # A descriptor of its own: to whoever has the secret, reading alone is a matter of care.
    fd = os.open(f"/proc/self/fd/{slot.descriptor}", os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    finally:
        os.close(fd)
