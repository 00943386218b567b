"""``lazysnap copy``: snapshots from one level to another, verified on the way and again where they are."""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from rich.filesize import decimal

from lazysnap.cli.interrupt import noting_interrupts
from lazysnap.cli.output import BAD, OK, Output
from lazysnap.cli.places import LATEST, find, open_existing, open_place
from lazysnap.cli.survey import beats
from lazysnap.errors import ConfigError, FormatError, LevelUnavailable, ShardCorrupt, SnapshotNotFound
from lazysnap.levels.shards import NodeCapture, ShardPlace
from lazysnap.levels.store import SnapshotStore
from lazysnap.levels.verified import VerifiedReader, VerifiedSource
from lazysnap.resolver import Entry, FrozenEntry, RestartPlan, candidates
from lazysnap.shard.manifest import CaptureMeta, Manifest

Beat = Callable[[int], None]


@dataclass
class Copied:
    """What became of one snapshot."""

    step: int
    run_id: str
    state: str = "there already"
    """``copied``, ``there already``, ``newer there`` or ``bad``."""
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
    plans, problems = _plans(source, args)
    started = time.perf_counter()
    done = []
    with noting_interrupts() as interrupt:
        target.sweep()  # what an earlier copy left that was killed
        there = target.inventory().entries
        for plan in plans:
            interrupt.check()
            work = _Work(source, target, plan, there)
            with output.bar(f"step {plan.step}", work.total()) as advance:

                def beat(count: int, advance: Beat = advance) -> None:
                    interrupt.check()
                    advance(count)

                copied = work.run(beat)
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


def _plans(source: SnapshotStore, args: argparse.Namespace) -> tuple[list[RestartPlan], list[str]]:
    """What to copy, the newest first, and what cannot be."""
    inventory = source.inventory()
    wanted = args.step or ([LATEST] if args.latest else None)
    if wanted is not None:
        found = [find(inventory, text, args.run) for text in wanted]
        return list({(plan.run_id, plan.step, plan.world_size): plan for plan in found}.values()), []
    plans = [plan for plan in candidates([inventory]) if plan.run_id.startswith(args.run or "")]
    if not plans:
        raise SnapshotNotFound(f"{source.url}: no complete snapshot" + "".join(f"\n{p}" for p in inventory.problems))
    return plans, list(inventory.problems)


class _Work:
    """One snapshot on its way."""

    def __init__(self, source: SnapshotStore, target: SnapshotStore, plan: RestartPlan, there: Iterable[Entry]) -> None:
        """``there``: what the target held when the copying began."""
        self._source = source
        self._target = target
        self._there = list(there)
        self._plan = plan
        # One of the ranks of each file.
        files = {offers[0].file or str(offers[0].rank): offers[0] for offers in reversed(plan.sources)}
        self._entries = list(files.values())[::-1]
        self._copied = Copied(plan.step, plan.run_id)
        try:
            self._manifests = [source.read_manifest(entry) for entry in self._entries]
            self._images = [(offers[0], source.read_manifest(offers[0])) for offers in plan.frozen.values()]
        except (FormatError, FileNotFoundError) as error:
            self._manifests, self._images = [], []
            self._blame(error)

    def total(self) -> int:
        """Bytes to read, or to read back, at most."""
        manifests = [*self._manifests, *(manifest for _, manifest in self._images)]
        return sum(manifest.size_bytes for manifest in manifests) * (1 if self._target.storage.checks_writes else 2)

    def run(self, beat: Beat) -> Copied:
        """Copy what is not there yet: first the immutable tensors, then the shards, last the names."""
        if self._copied.problem is None:
            try:
                with contextlib.ExitStack() as stack:
                    for image, manifest in self._images:
                        stack.enter_context(self._target.frozen_lease(image.run_id, image.digest))
                        self._copy_image(image, manifest, beat)
                    for entry, manifest in zip(self._entries, self._manifests, strict=True):
                        self._copy_shard(entry, manifest, beat)
            except (FormatError, FileNotFoundError) as error:
                self._blame(error)
        return self._copied

    def _blame(self, error: Exception) -> None:
        self._copied.state, self._copied.problem = "bad", str(error)

    def _copy_image(self, image: FrozenEntry, manifest: Manifest, beat: Beat) -> None:
        place = self._source.place(image)
        there = self._target.place(image)
        here = FrozenEntry(self._target.url, self._target.speed, image.run_id, image.digest, image.location)
        if self._is_sound(here, manifest, beat):
            return
        if _is_there(there):
            there.delete()  # committed, and not what it says: no snapshot there can be restored with it
        self._write(place, manifest, beat, lambda meta, source: self._target.write_frozen(meta, source, image.digest))
        self._read_back(here, manifest, beat)

    def _copy_shard(self, entry: Entry, manifest: Manifest, beat: Beat) -> None:
        place = self._source.place(entry)
        for other, found in self._same(entry):
            if found.meta == manifest.meta and self._is_sound(other, manifest, beat):
                self._copied.location = other.location
                self._name(other, entry.names)
                return
            is_alike = (other.file is None) == (entry.file is None)  # one rank says nothing of those beside it
            if (
                is_alike
                and found.meta.captured_ns > manifest.meta.captured_ns
                and self._is_sound(other, found, lambda _: None)
            ):
                self._copied.state, self._copied.location = "newer there", other.location
                return
        written: list[Entry] = []

        def write(meta: CaptureMeta, source: VerifiedSource) -> Manifest:
            made, result = self._target.write_entry(NodeCapture.of(manifest), source)
            written.append(made)
            return result

        self._write(place, manifest, beat, write)
        self._read_back(written[0], manifest, beat)
        self._copied.location = written[0].location
        self._name(written[0], entry.names)

    def _write(
        self,
        place: ShardPlace,
        manifest: Manifest,
        beat: Beat,
        write: Callable[[CaptureMeta, VerifiedSource], Manifest],
    ) -> None:
        with VerifiedReader(place, manifest) as reader:
            result = write(manifest.meta, VerifiedSource(reader, beat))
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
            found = self._target.verify_entry(entry, beats(manifest, beat))
        except (FormatError, FileNotFoundError):
            return False
        if found.checksums.block_bytes != manifest.checksums.block_bytes:
            return found.size_bytes == manifest.size_bytes
        return found.checksums == manifest.checksums

    def _same(self, entry: Entry) -> Iterator[tuple[Entry, Manifest]]:
        """The same shard of the same run at the target, if it can be read."""
        for other in self._there:
            facts = (other.run_id, other.step, other.rank, other.world_size)
            if facts != (entry.run_id, entry.step, entry.rank, entry.world_size):
                continue
            try:
                found = self._target.read_manifest(other)
            except (FormatError, FileNotFoundError):
                continue  # retention there took it, or it is damaged
            yield other, found

    def _name(self, entry: Entry, names: Iterable[str]) -> None:
        for name in set(names) - set(entry.names):
            self._target.keep(entry, name)


def _is_there(place: ShardPlace) -> bool:
    try:
        place.storage.size(place.manifest_path)
    except FileNotFoundError:
        return False
    return True
