"""Page-aligned memory to read into."""

import mmap


def map_anonymous(size_bytes: int) -> memoryview:
    """Page-aligned private memory, zeroed, freed with its last view."""
    return memoryview(mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size_bytes]
