"""Damage to files."""

import pathlib


def flip(path: pathlib.Path, offset: int = -1) -> None:
    """Change a bit of one byte, by default of the last one."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
