"""How fast one level is written and read, beside the raw limit of its medium, in one process; a worker of levels.py.

    python benchmarks/rates.py local /scratch/rates --size-mb 1024 --rounds 6 --out local.jsonl

Ours and raw take turns, the order changes from round to round, and a first round is not counted: what disturbs the
machine disturbs both. Memory is warm on both sides, file names are fresh on both sides.
"""

import argparse
import gc
import json
import mmap
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from media import BLOCK, PAGE, BufferedFile, DirectFile, S3Client

from lazysnap.levels import open_store
from lazysnap.levels.source import MemorySource
from lazysnap.resolver import Entry
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest

FILE_THREADS = 2
S3_THREADS = 4
OURS = "lazysnap"


class Side(Protocol):
    """One of those that are compared."""

    def write(self, number: int) -> None: ...
    def read(self, number: int) -> None: ...
    def delete(self, number: int) -> None: ...


@dataclass
class Samples:
    """What one side took in one direction, round by round."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def cpu_s() -> float:
    """Seconds of processor time of this process, user and system, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def alternate(sides: dict[str, Side], directions: Sequence[str], rounds: int) -> dict[tuple[str, str], Samples]:
    """Time every side in every direction, taking turns."""
    taken = {(direction, who): Samples() for direction in directions for who in sides}
    gc.disable()
    for number in range(rounds + 1):
        order = list(sides) if number % 2 else list(reversed(sides))
        for direction in directions:
            for who in order:
                work = getattr(sides[who], direction)
                busy, start = cpu_s(), time.perf_counter()
                work(number)
                seconds, busy = time.perf_counter() - start, cpu_s() - busy
                if number:  # the first one finds everything cold: connections, directories, modules
                    taken[direction, who].seconds.append(seconds)
                    taken[direction, who].cpu_s.append(busy)
        for side in sides.values():
            side.delete(number)
        gc.collect()
    return taken


def warm(size: int) -> memoryview:
    """Page-aligned memory with all its pages in place, up to the next page boundary."""
    room = mmap.mmap(-1, -(-size // PAGE) * PAGE)
    view = memoryview(room)
    for start in range(0, len(view), BLOCK):
        block = view[start : start + BLOCK]
        block[:] = bytes(len(block))
    return view


def make_image(size: int) -> tuple[memoryview, int]:
    """A shard of about ``size`` bytes that no disk or network can squeeze, and its exact length."""
    header = len(Layout.plan([TensorSpec("weight", "U8", (size,))]).header)
    layout = Layout.plan([TensorSpec("weight", "U8", (max(size - header, 1),))])
    image = warm(layout.size_bytes)
    for start in range(0, len(image), 1 << 20):
        block = image[start : start + (1 << 20)]
        block[:] = os.urandom(len(block))
    image[: len(layout.header)] = layout.header
    return image, layout.size_bytes


class Ours:
    """A level as the keeper uses it: write and commit from memory; read and compare every block."""

    def __init__(self, url: str, options: dict[str, Any] | None, image: memoryview, out: memoryview) -> None:
        self.store = open_store(url, options=options)
        self._image, self._out = image, out
        self._written: dict[int, tuple[Entry, Manifest]] = {}

    def write(self, number: int) -> None:
        """Shard, then manifest; durable on return."""
        meta = CaptureMeta("0" * 16, "1" * 16, number + 1, 0, 1, time.time_ns(), state={"step": number})
        self._written[number] = self.store.write_entry(meta, MemorySource(self._image, len(self._out)))

    def read(self, number: int) -> None:
        """Into warm memory, verified."""
        self.store.read_image(*self._written[number], self._out)

    def delete(self, number: int) -> None:
        """Manifest, then shard."""
        entry, _ = self._written.pop(number)
        self.store.place(entry).delete()
        os.sync()


def sides_of(level: str, url: str, options: dict[str, Any] | None, size: int) -> dict[str, Side]:
    """Ours and the raw ones, all over the same buffers."""
    image, size = make_image(size)
    # The very same pages for all: direct reads into other ones, made in the same way, were seen to take 40 % longer.
    room = warm(size)
    out = room[:size]
    sides: dict[str, Side] = {}
    if level == "s3":
        sides["botocore"] = S3Client(options or {}, urlsplit(url).netloc, S3_THREADS, (image[:size], out))
    else:
        # Raw ones copy whole pages: what is read past the page cache cannot end in the middle of one.
        sides["O_DIRECT"] = DirectFile(Path(url), FILE_THREADS, image, room)
    if level == "nfs":
        sides["buffered"] = BufferedFile(Path(url), FILE_THREADS, image, room)
    sides[OURS] = Ours(url, options, image, out)
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", choices=("memory", "local", "nfs", "s3"))
    parser.add_argument("url", help="of the level; its own file system or server is measured")
    parser.add_argument("--options", type=json.loads, default=None, help="storage_options as JSON")
    parser.add_argument("--size-mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    size = args.size_mb << 20
    if args.level == "memory":
        from slots import measure  # needs torch, which a guest has no time for

        taken = measure(size, args.rounds)
    else:
        taken = alternate(sides_of(args.level, args.url, args.options, size), ("write", "read"), args.rounds)
    with args.out.open("w") as file:
        for (direction, who), samples in taken.items():
            line = {"measure": "rate", "level": args.level, "direction": direction, "who": who, "bytes": size}
            file.write(json.dumps({**line, **vars(samples)}) + "\n")


if __name__ == "__main__":
    main()
