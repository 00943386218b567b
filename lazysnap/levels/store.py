"""Snapshots at one level: shard first, manifest last; the manifest is the commit, and the first thing to go.

Layout (docs/format.md)::

    step-00001000/rank-00000-of-00001.safetensors
    step-00001000/rank-00000-of-00001.json
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from lazysnap import faults
from lazysnap.config import PersistentLevel, resolve_url
from lazysnap.errors import FormatError, LazySnapError, LevelError, ShardCorrupt
from lazysnap.levels.files import PAGE, TEMP_MARK
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.source import BlockSource
from lazysnap.levels.storage import Storage, Writer, level_error
from lazysnap.policy import expired
from lazysnap.resolver import Entry, Inventory
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums, block_ranges, digest
from lazysnap.shard.manifest import (
    CaptureMeta,
    Manifest,
    directory_name,
    manifest_name,
    parse_directory_name,
    parse_rank_name,
    shard_name,
)

logger = logging.getLogger(__name__)
_READ_THREADS = 2
_USUAL_NAMES = 3


def _directory_names(meta: CaptureMeta) -> Iterator[str]:
    """Names for a snapshot's directory, the first that is free is taken: two runs, or one that passes a step again."""
    yield directory_name(meta.step)
    yield directory_name(meta.step, meta.run_id[:8])
    yield directory_name(meta.step, meta.run_id[8:])
    for number in itertools.count():
        yield directory_name(meta.step, digest(f"{meta.run_id} {number}".encode()))


def _is_complete(entries: list[Entry]) -> bool:
    """Whether all ranks of the world that one of them names are there."""
    return any(
        len({entry.rank for entry in entries if entry.world_size == world_size}) == world_size
        for world_size in {entry.world_size for entry in entries}
    )


def open_store(url: str, *, speed: int = 1, options: Mapping[str, Any] | None = None) -> "SnapshotStore":
    """The store at a path or fsspec URL. Does no I/O for local paths.

    Raises: LevelUnavailable, if fsspec does not know the protocol or lacks its package.
    """
    url = resolve_url(url)
    if urlsplit(url).scheme in ("", "file", "local"):
        return SnapshotStore(LocalStorage(url), speed=speed)
    from lazysnap.levels.remote import FsspecStorage  # fsspec costs 0.1 s that local levels need not pay

    return SnapshotStore(FsspecStorage(url, options), speed=speed)


class SnapshotStore:
    """All snapshots at one level. Thread-safe for different steps. Every method blocks."""

    def __init__(self, storage: Storage, *, speed: int = 1) -> None:
        self.storage = storage
        self.url = storage.url
        self.speed = speed
        self._known: dict[str, tuple[object, int, Entry]] = {}
        """By path of the manifest: its stamp when it was read, size of the shard, what it says."""

    def write(self, meta: CaptureMeta, source: BlockSource) -> Manifest:
        """Write and commit one shard while its later bytes may still be on their way.

        Durable: on return, shard and manifest survive a power cut.
        Raises: LevelError, and nothing of the shard is left or visible; CaptureAborted likewise.
        """
        try:
            return self._write(meta, source)
        except LazySnapError:
            raise
        except OSError as error:
            raise level_error(self.url, f"writing step {meta.step}", error) from error

    def _write(self, meta: CaptureMeta, source: BlockSource) -> Manifest:
        directory, previous = self._directory_for(meta)
        name = shard_name(meta.rank, meta.world_size)
        faults.point("level.store.begin")
        writer = self.storage.begin(f"{directory}/{name}", source.size_bytes)
        # Until it is closed, no sweep of another process takes the shard for garbage.
        with contextlib.closing(writer):
            try:
                checksums, header_bytes = self._write_blocks(writer, source)
                source.finish()
                faults.point("level.store.publish_shard")
                writer.publish()
                manifest = Manifest(meta, name, header_bytes, checksums, time.time_ns())
                faults.point("level.store.commit")
                self.storage.put(f"{directory}/{manifest_name(meta.rank, meta.world_size)}", manifest.encode())
            except BaseException:
                # First the writer: what it removes is not published.
                writer.close()
                self._clean_up(directory, meta)
                raise
        # Nothing after the commit may fail the snapshot.
        faults.point("level.store.committed")
        for old in previous:
            self._clean_up(old, meta)
        return manifest

    def _write_blocks(self, writer: Writer, source: BlockSource) -> tuple[Checksums, int]:
        """Write from ``parallel_writes`` threads; each block's checksum is computed by the thread that writes it.

        Returns the checksums and the length of the shard's header.
        """
        size = source.size_bytes
        header_bytes = 0
        failed = threading.Event()

        def one(span: tuple[int, int]) -> str:
            nonlocal header_bytes
            offset, length = span
            try:
                block = source.view(offset, -(-length // PAGE) * PAGE)
                if len(block) < length:
                    raise ShardCorrupt(f"step for {self.url}: {len(block)} bytes at {offset}, expected {length}")
                if offset == 0:
                    header_bytes = 8 + int.from_bytes(block[:8], "little")
                checksum = digest(block[:length])
                # The padding of the last page is cut off again when the file is published.
                writer.write(offset, block)
            except BaseException:
                failed.set()
                raise
            return checksum

        with ThreadPoolExecutor(self.storage.parallel_writes, "lazysnap-write") as pool:
            futures = []
            try:
                for span in block_ranges(size):
                    source.wait(span[0] + span[1])
                    if failed.is_set():
                        break  # the capture may last, the level is done
                    futures.append(pool.submit(one, span))
                return Checksums(size, BLOCK_BYTES, tuple(future.result() for future in futures)), header_bytes
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _clean_up(self, directory: str, meta: CaptureMeta) -> None:
        """Delete one shard and its manifest, or leave them for the next sweep."""
        try:
            self._delete(directory, meta.rank, meta.world_size)
        except (LevelError, OSError) as error:
            logger.warning("left in %s/%s: %s", self.url, directory, error)

    def _directory_for(self, meta: CaptureMeta) -> tuple[str, list[str]]:
        """Where to write, and where the same shard of the same run stands already (a resumed run passes a step again).

        A committed shard is never written over: another name is used, and the first deleted after the commit.
        """
        free, previous = None, []
        for number, name in enumerate(_directory_names(meta)):
            owner = self._run_of(f"{name}/{manifest_name(meta.rank, meta.world_size)}")
            if owner == meta.run_id:
                previous.append(name)
            if owner is None and free is None:
                free = name
            if free is not None and number >= _USUAL_NAMES - 1:
                return free, previous
        raise AssertionError("there are names without end")

    def _run_of(self, path: str) -> str | None:
        """The run that committed a manifest, ``None`` if there is none, an empty string if it cannot be read."""
        try:
            return Manifest.decode(self.storage.get(path), f"{self.url}/{path}").meta.run_id
        except FileNotFoundError:
            return None
        except FormatError:
            return ""

    def inventory(self) -> Inventory:
        """What can be restored from here, and what cannot and why. Nothing found there makes it raise.

        Raises: LevelUnavailable, if the level does not answer.
        """
        entries: list[Entry] = []
        problems: list[str] = []
        for directory in self.storage.list():
            if parse_directory_name(directory) is None:
                continue
            try:
                names = self.storage.list(directory)
            except LevelError as error:
                problems.append(str(error))
                continue
            for name in names:
                parsed = parse_rank_name(name)
                if parsed is None or parsed[2] != "json":
                    continue
                try:
                    entries.append(self._look_at(directory, name))
                except FileNotFoundError as error:
                    problems.append(f"{self.url}/{directory}: a manifest without its shard: {error.filename or error}")
                except (FormatError, LevelError) as error:
                    # One file that cannot be read says nothing about the others.
                    problems.append(str(error))
        return Inventory(self.url, tuple(entries), problems=tuple(problems))

    def _look_at(self, directory: str, name: str) -> Entry:
        """Check one manifest, and that its shard is there. Manifests that did not change are not read again.

        Raises: FormatError, LevelError, FileNotFoundError.
        """
        path = f"{directory}/{name}"
        stamp = self.storage.stamp(path)
        known = self._known.get(path)
        if known is None or stamp is None or known[0] != stamp:
            manifest = Manifest.decode(self.storage.get(path), f"{self.url}/{path}")
            self._check_place(manifest, directory, name)
            meta = manifest.meta
            facts = (meta.run_id, meta.run_started_ns, meta.step, meta.rank, meta.world_size)
            known = self._known[path] = (stamp, manifest.size_bytes, Entry(self.url, self.speed, *facts, directory))
        _, expected, entry = known
        shard = f"{directory}/{shard_name(entry.rank, entry.world_size)}"
        size = self.storage.size(shard)
        if size != expected:
            raise ShardCorrupt(f"{self.url}/{shard}: {size} bytes, the manifest says {expected}")
        return entry

    def _check_place(self, manifest: Manifest, directory: str, name: str) -> None:
        meta = manifest.meta
        if meta.step != parse_directory_name(directory) or name != manifest_name(meta.rank, meta.world_size):
            raise ShardCorrupt(
                f"{self.url}/{directory}/{name}: holds step {meta.step} of rank {meta.rank} of {meta.world_size}, "
                "its name says otherwise"
            )

    def read_manifest(self, entry: Entry) -> Manifest:
        """The manifest of one entry. Raises: ShardCorrupt, FileNotFoundError, LevelUnavailable."""
        path = f"{entry.location}/{manifest_name(entry.rank, entry.world_size)}"
        return Manifest.decode(self.storage.get(path), f"{self.url}/{path}")

    def read_image(self, entry: Entry, manifest: Manifest, out: memoryview) -> None:
        """Read a shard into ``out`` (``manifest.size_bytes`` long), verifying every block as it arrives.

        Raises: ShardCorrupt, naming file and block; FileNotFoundError; LevelUnavailable. ``out`` is garbage then.
        """
        path = f"{entry.location}/{manifest.file}"
        where = f"{self.url}/{path}"
        checksums = manifest.checksums
        size = self.storage.size(path)
        if size != checksums.size_bytes or len(out) != size:
            raise ShardCorrupt(f"{where}: {size} bytes, the manifest says {checksums.size_bytes}, asked for {len(out)}")

        def one(index: int, offset: int, length: int) -> None:
            block = out[offset : offset + length]
            reader.read_into(offset, block)
            checksums.verify_block(index, block, where)

        with (
            contextlib.closing(self.storage.reader(path)) as reader,
            ThreadPoolExecutor(_READ_THREADS, "lazysnap-read") as pool,
        ):
            spans = block_ranges(size, checksums.block_bytes)
            futures = [pool.submit(one, index, *span) for index, span in enumerate(spans)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def retain(self, level: PersistentLevel, run_id: str) -> list[int]:
        """Delete what ``level`` need not keep of this run's complete snapshots; the steps that went.

        Crash-safe: the manifest goes first, so that a half-deleted snapshot is garbage, not a snapshot.
        """
        found: dict[int, list[Entry]] = defaultdict(list)
        for entry in self.inventory().entries:
            if entry.run_id == run_id:
                found[entry.step].append(entry)
        complete = [step for step, entries in found.items() if _is_complete(entries)]
        gone = expired(complete, level)
        for step in gone:
            for entry in found[step]:
                self._delete(entry.location, entry.rank, entry.world_size)
        return gone

    def _delete(self, directory: str, rank: int, world_size: int) -> None:
        self.storage.delete(f"{directory}/{manifest_name(rank, world_size)}")
        faults.point("level.store.uncommitted")
        self.storage.delete(f"{directory}/{shard_name(rank, world_size)}")
        faults.point("level.store.deleted")
        self.storage.delete_directory(directory)

    def sweep(self, rank: int, world_size: int) -> list[str]:
        """Remove what dead writers of this rank left: temporary files, and shards without a manifest.

        What a living writer works on stays, whoever it is. What went is returned.
        Raises: LevelError.
        """
        gone = []
        shard, manifest = shard_name(rank, world_size), manifest_name(rank, world_size)
        for directory in self.storage.list():
            if parse_directory_name(directory) is None:
                continue
            names = self.storage.list(directory)
            for name in names:
                is_temporary = name.startswith((f".{shard}{TEMP_MARK}", f".{manifest}{TEMP_MARK}"))
                is_uncommitted = name == shard and manifest not in names
                if not is_temporary and not is_uncommitted:
                    continue
                faults.point("level.store.sweep")
                unless = f"{directory}/{manifest}" if is_uncommitted else None
                if self.storage.delete_abandoned(f"{directory}/{name}", unless=unless):
                    gone.append(f"{directory}/{name}")
            self.storage.delete_directory(directory)
        return gone
