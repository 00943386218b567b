"""How fast is one file per node beside one file per rank, and beside the raw limit of the medium?

    python benchmarks/nodes.py
    python benchmarks/nodes.py --ranks 2 --size-mb 64 --levels local

Real keepers, one per rank, and captures that are whole in their slots: timed from the word that they are there until
each keeper said that its own is durable. Rounds, raw limits and tables are those of levels.py (docs/benchmarks.md).
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from media import DirectFile, S3Client
from places import NotHere, Place, opened
from rates import FILE_THREADS, OURS, S3_THREADS, Side, alternate, make_image, warm
from ratios import Lines, comparisons, rate, table
from rich.console import Console
from rich.table import Table

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.arena import Slot, Word
from lazysnap.keeper.attach import attach
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.team import Team
from lazysnap.levels import open_store
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.topology import places

RUN, GENERATION = "0" * 16, "1" * 16
PATIENCE_S = 300.0


class Rank:
    """One rank: its keeper, and a slot with its part."""

    def __init__(self, identity: JobIdentity, level: PersistentLevel, team: Team, image: memoryview) -> None:
        config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=0.0))
        self._connection: Connection
        self._connection, _ = attach(identity, config, team)
        self._connection.set_receive_timeout(PATIENCE_S)
        self._team = team
        self._slot = Slot.create(1 << 16, len(image))
        self._slot.populate()
        self._slot.image[: len(image)] = image
        self._slot.set_word(Word.READY, 1)
        self._size = len(image)
        self._connection.send({"type": "adopt"}, (self._slot.fd,))
        self._wait("adopted")

    def capture(self, number: int) -> None:
        """As if all bytes landed at once."""
        team = self._team
        meta = CaptureMeta(RUN, 1, number + 1, team.rank, team.world_size, time.time_ns(), generation=GENERATION)
        size = self._size
        self._slot.begin(number + 1, sequence=number + 1, image_bytes=size, meta=meta.to_bytes(), pin=True)
        self._slot.commit()
        self._connection.send({"type": "begun"})

    def wait_durable(self) -> None:
        """Until its keeper says so."""
        self._wait("durable")

    def drain(self) -> None:
        """Until nothing is left to do there."""
        self._connection.send({"type": "drain", "id": 1})
        self._wait("drained")

    def _wait(self, kind: str) -> None:
        while (received := self._connection.receive()) is not None:
            for fd in (fd for _, fds in received for fd in fds):
                os.close(fd)
            for message, _ in received:
                if message["type"] == "level_failed":
                    raise RuntimeError(message["text"])
                if message["type"] == kind:
                    return
        raise RuntimeError(f"the keeper of rank {self._team.rank} said nothing")

    def close(self) -> None:
        """The keeper leaves, too."""
        self._connection.send({"type": "goodbye"})
        self._connection.close()
        self._slot.close()


class Keepers:
    """All ranks of a node at one level; see ``media``."""

    def __init__(self, place: Place, aggregate: Any, images: list[memoryview]) -> None:
        url = f"{place.url}/{aggregate}"
        level = PersistentLevel(
            url, every_n_steps=1, keep_last=1000, verify=False, aggregate=aggregate, storage_options=place.options
        )
        self._store = open_store(url, options=place.options)
        identity = JobIdentity.from_config(SnapshotConfig(job_id=f"{place.directory}/{aggregate}"))
        here = places(["here"] * len(images))
        self._ranks = []
        for rank, image in enumerate(images):
            own = dataclasses.replace(identity, local_rank=rank)
            self._ranks.append(Rank(own, level, Team.of(here, rank, identity), image))

    def write(self, number: int) -> None:
        """All ranks capture the same step; until it is durable for each of them."""
        for rank in self._ranks:
            rank.capture(number)
        for rank in self._ranks:
            rank.wait_durable()

    def read(self, number: int) -> None:
        """Not measured here."""

    def delete(self, number: int) -> None:
        """What retention does, at a moment when it disturbs nothing."""
        for rank in self._ranks:
            rank.drain()
        entries = {(entry.location, entry.file, entry.file or entry.rank): entry for entry in self._entries(number)}
        for entry in entries.values():
            self._store.place(entry).delete()
        os.sync()

    def _entries(self, number: int) -> Any:
        return [entry for entry in self._store.inventory().entries if entry.step == number + 1]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


def rates(lines: Lines) -> Table:
    """Without processor time: that of other processes is not in the lines."""
    made = table(
        "writes of all ranks of a node: median (range)", ("level", "raw limit", "raw MB/s", "MB/s", "of raw"), 2
    )
    for found in comparisons(lines):
        made.add_row(found.level, found.raw["who"], rate(found.raw), rate(found.ours), f"{found.ratio:.0%}")
    return made


def measure(place: Place, args: argparse.Namespace) -> Lines:
    """Lines of one level: writes."""
    image, size = make_image(args.size_mb << 20)
    raw_image = warm(args.ranks * size)
    for start in range(0, args.ranks * size, size):
        raw_image[start : start + size] = image[:size]
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        if place.name == "s3":
            buffers = (raw_image, raw_image)
            sides["botocore"] = S3Client(place.options or {}, urlsplit(place.url).netloc, S3_THREADS, buffers)
        else:
            sides["O_DIRECT"] = DirectFile(Path(place.url), FILE_THREADS, raw_image, raw_image)
        for aggregate in ("rank", "node"):
            keepers = sides[aggregate] = Keepers(place, aggregate, [image[:size]] * args.ranks)
            stack.callback(keepers.close)
        taken = alternate(sides, ("write",), args.rounds)
    lines = []
    for (direction, who), samples in taken.items():
        for aggregate in ("rank", "node"):
            if who in ("rank", "node") and who != aggregate:
                continue
            facts = {"measure": "rate", "level": f"{place.name}, file per {aggregate}", "direction": direction}
            name = OURS if who == aggregate else who
            lines.append({**facts, "who": name, "bytes": args.ranks * size, "seconds": samples.seconds})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size-mb", type=int, default=256, help="of one rank's part, in MiB")
    parser.add_argument("--levels", default="local,s3", help="of local, s3")
    parser.add_argument("--rounds", type=int, default=6, help="that count; one more goes ahead")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: TMPDIR")
    args = parser.parse_args()
    console = Console(stderr=True, width=150)
    # Keepers are started by the dozen: compiled once, wherever the environment says that nothing is to be written.
    with tempfile.TemporaryDirectory(prefix="lazysnap-bytecode-") as bytecode:
        os.environ.update(PYTHONPYCACHEPREFIX=bytecode, PYTHONDONTWRITEBYTECODE="")
        for level in args.levels.split(","):
            try:
                with opened(level, args.directory, args.ranks * args.size_mb << 20) as place:
                    lines = measure(place, args)
            except NotHere as error:
                console.print(f"{level} left out: {error}", markup=False)
                continue
            for line in lines:
                print(json.dumps(line), flush=True)
            console.print(rates(lines))


if __name__ == "__main__":
    sys.exit(main())
