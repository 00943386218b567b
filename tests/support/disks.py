"""A small disk, where this machine lets us mount one."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(place, size_bytes):
    """Mount an ext4 file system of that size at ``place``, a directory that is made. Skips where that is impossible."""
    image = place.with_suffix(".ext4")
    place.mkdir()
    with open(image, "wb") as file:
        os.truncate(file.fileno(), size_bytes)
    try:
        for command in (["mkfs.ext4", "-q", "-m0", image], ["mount", "-o", "loop", image, place]):
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk):
    """Leave no free block on the disk."""
    with open(disk / "full", "wb") as file:
        size = 64 << 20
        while size:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
            except OSError:
                size = size // 2 if size > 4096 else 0
