"""``lazysnap copy``: snapshots from one level to another, verified on the way and again where they are."""

import argparse
import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from rich.filesize import decimal

from lazysnap.cli.output import BAD, OK, Output
from lazysnap.cli.places import open_existing, open_place
from lazysnap.errors import ConfigError, FormatError, LevelUnavailable, ShardCorrupt, SnapshotNotFound
from lazysnap.levels.blocks import FileBlocks, VerifiedSource, read_shard
from lazysnap.levels.shards import ShardPlace, read_committed
from lazysnap.levels.store import SnapshotStore
from lazysnap.resolver import Entry, FrozenEntry, RestartPlan
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.names import keep_file_name
from lazysnap.snapshots.catalogue import LATEST, Catalogue

Beat = Callable[[int], None]


@dataclass
class Copied:
    """What became of one snapshot."""

    step: int
    run_id: str
    state: str = "there already"
    """``copied``, ``there already`` or ``bad``."""
    location: str = ""
    size_bytes: int = 0
    """Bytes written."""
    problem: str | None = None


def run(args: argparse.Namespace, output: Output) -> int:
    """Copy. Blocks. Exit code 1 if a snapshot was damaged, and left out. Raises: LevelError, SnapshotNotFound."""
    source = open_existing(args.url, args.storage_option, args.from_option)
    target = open_place(args.to, args.storage_option, args.to_option)
    if source.url == target.url:
        raise ConfigError(f"{source.url}: both URLs name the same place")
    catalogue = Catalogue(source)
    plans, problems = _plans(catalogue, args)
    started = time.perf_counter()
    done = []
    target.sweep()  # what an earlier copy left that was killed
    for plan in plans:
        work = _Work(catalogue, target, plan)
        with output.bar(f"step {plan.step}", work.total()) as advance:
            copied = work.run(advance)
        done.append(copied)
        size = f", {decimal(copied.size_bytes)}" if copied.size_bytes else ""
        output.say(f"step {copied.step}: {copied.problem or copied.state}{size}", "red" if copied.problem else "")
    seconds = time.perf_counter() - started
    bad = [*problems, *(copied.problem for copied in done if copied.problem)]
    total = sum(copied.size_bytes for copied in done)
    output.result(
        {
            "command": "copy",
            "ok": not bad,
            "url": source.url,
            "to": target.url,
            "snapshots": [asdict(copied) for copied in done],
            "problems": bad,
            "size_bytes": total,
            "seconds": round(seconds, 3),
        }
    )
    for problem in problems:
        output.line(f"bad: {problem}", "red")
    count = sum(copied.state == "copied" for copied in done)
    kept = sum(copied.state == "there already" for copied in done)
    output.line(
        f"{count} snapshot{'s' * (count != 1)} copied, {decimal(total)} in {seconds:.1f} s "
        f"({decimal(int(total / max(seconds, 1e-9)))}/s), {kept} there already, {len(bad)} bad"
    )
    return BAD if bad else OK


def _plans(catalogue: Catalogue, args: argparse.Namespace) -> tuple[list[RestartPlan], list[str]]:
    """What to copy, the newest first, and what cannot be."""
    wanted = args.step or ([LATEST] if args.latest else None)
    if wanted is not None:
        found = [catalogue.find(text, args.run) for text in wanted]
        return list({plan.key: plan for plan in found}.values()), []
    plans = list(catalogue.plans(run=None if args.run is None else catalogue.run_of(args.run)))
    if not plans:
        raise SnapshotNotFound(
            f"{catalogue.store.url}: no complete snapshot" + "".join(f"\n{p}" for p in catalogue.problems)
        )
    return plans, catalogue.problems


class _Work:
    """One snapshot on its way."""

    def __init__(self, catalogue: Catalogue, target: SnapshotStore, plan: RestartPlan) -> None:
        self._source = catalogue.store
        self._target = target
        self._plan = plan
        self._shards = list(zip((offers[0] for offers in plan.sources), catalogue.manifests(plan), strict=True))
        self._images = catalogue.images(plan)
        self._copied = Copied(plan.step, plan.run_id)

    def total(self) -> int:
        """Bytes to read, or to read back, at most."""
        manifests = [manifest for _, manifest in [*self._shards, *self._images]]
        return sum(manifest.size_bytes for manifest in manifests) * (1 if self._target.storage.checks_writes else 2)

    def run(self, beat: Beat) -> Copied:
        """Copy what is not there yet: first the immutable tensors, then the shards, last the names."""
        try:
            for image, manifest in self._images:
                self._copy_image(image, manifest, beat)
            for entry, manifest in self._shards:
                self._copy_shard(entry, manifest, beat)
        except (FormatError, FileNotFoundError) as error:
            self._copied.state, self._copied.problem = "bad", str(error)
        return self._copied

    def _copy_image(self, image: FrozenEntry, manifest: Manifest, beat: Beat) -> None:
        place = self._source.place(image)
        here = FrozenEntry(self._target.url, self._target.speed, image.digest, image.location)
        if self._is_sound(here, manifest, beat):
            return
        self._write(place, manifest, beat, lambda meta, source: self._target.write_frozen(meta, source, image.digest))
        self._read_back(here, manifest, beat)

    def _copy_shard(self, entry: Entry, manifest: Manifest, beat: Beat) -> None:
        place = self._source.place(entry)
        here = replace(entry, level=self._target.url, speed=self._target.speed)
        self._copied.location = here.location
        if self._is_sound(here, manifest, beat):
            self._name(here)
            return
        # What is there is damaged, if anything is.
        self._target.place(here).delete()

        def write(meta: CaptureMeta, source: VerifiedSource) -> Manifest:
            return self._target.write_entry(meta, source)[1]

        self._write(place, manifest, beat, write)
        self._read_back(here, manifest, beat)
        self._name(here)

    def _write(
        self,
        place: ShardPlace,
        manifest: Manifest,
        beat: Beat,
        write: Callable[[CaptureMeta, VerifiedSource], Manifest],
    ) -> None:
        blocks = FileBlocks(place, manifest)
        with place.storage.lease(place.shard_path), contextlib.closing(blocks):
            result = write(manifest.meta, VerifiedSource(blocks, beat))
        same_blocks = result.checksums.block_bytes == manifest.checksums.block_bytes
        if same_blocks and result.checksums != manifest.checksums:
            raise ShardCorrupt(f"{place.where}: changed between reading and writing; checksums differ")
        self._copied.state = "copied"
        self._copied.size_bytes += manifest.size_bytes

    def _read_back(self, entry: Entry | FrozenEntry, manifest: Manifest, beat: Beat) -> None:
        """Compare what is there now with what was to be copied, where the place has not done so itself."""
        if self._target.storage.checks_writes:
            return
        if not self._is_sound(entry, manifest, beat):
            raise LevelUnavailable(f"{self._target.url}/{entry.location}: reads back other bytes than were written")

    def _is_sound(self, entry: Entry | FrozenEntry, manifest: Manifest, beat: Beat) -> bool:
        """Whether exactly the bytes that ``manifest`` describes are at the target."""
        try:
            place = self._target.place(entry)
            found = read_committed(place)
            read_shard(place, found, beat=beat)
        except (FormatError, FileNotFoundError):
            return False
        if found.checksums.block_bytes != manifest.checksums.block_bytes:
            return found.size_bytes == manifest.size_bytes
        return found.checksums == manifest.checksums

    def _name(self, entry: Entry) -> None:
        there = self._target.storage.list(entry.location)
        for name in entry.names:
            if keep_file_name(name) not in there:
                self._target.keep(entry, name)
