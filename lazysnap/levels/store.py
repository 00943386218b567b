"""Snapshots at one level: shard first, manifest last; the manifest is the commit, and the first thing to go.

Layout (docs/format.md)::

    step-00001000/rank-00000-of-00001.safetensors
    step-00001000/rank-00000-of-00001.json
"""

import logging
import os
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from lazysnap import faults
from lazysnap.config import PersistentLevel, resolve_url
from lazysnap.errors import FormatError, LevelError, ShardCorrupt
from lazysnap.levels.local import PAGE, TEMP_MARK, LocalStorage, temp_writer_pid
from lazysnap.levels.source import BlockSource
from lazysnap.levels.storage import Storage, Writer
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


def _is_alive(pid: int) -> bool:
    return pid != os.getpid() and os.path.exists(f"/proc/{pid}")


def open_store(url: str, *, speed: int = 1) -> "SnapshotStore":
    """The store at a path or fsspec URL. Does no I/O for local paths.

    Raises: LevelUnavailable, if fsspec does not know the protocol or lacks its package.
    """
    url = resolve_url(url)
    if urlsplit(url).scheme in ("", "file", "local"):
        return SnapshotStore(LocalStorage(url), speed=speed)
    from lazysnap.levels.remote import FsspecStorage  # fsspec costs 0.1 s that local levels need not pay

    return SnapshotStore(FsspecStorage(url), speed=speed)


class SnapshotStore:
    """All snapshots at one level. Thread-safe for different steps. Every method blocks."""

    def __init__(self, storage: Storage, *, speed: int = 1) -> None:
        self.storage = storage
        self.url = storage.url
        self.speed = speed

    def write(self, meta: CaptureMeta, source: BlockSource) -> Manifest:
        """Write and commit one shard while its later bytes may still be on their way.

        Durable: on return, shard and manifest survive a power cut.
        Raises: LevelError, and nothing of the shard is left or visible; CaptureAborted likewise.
        """
        directory, previous = self._directory_for(meta)
        name = shard_name(meta.rank, meta.world_size)
        faults.point("level.store.begin")
        writer = self.storage.begin(f"{directory}/{name}", source.size_bytes)
        try:
            blocks = self._write_blocks(writer, source)
            header_bytes = 8 + int.from_bytes(source.view(0, 8)[:8], "little")
            source.finish()
            # Only when both names are taken: a manifest must not stand over other bytes for a moment.
            self.storage.delete(f"{directory}/{manifest_name(meta.rank, meta.world_size)}")
            faults.point("level.store.publish_shard")
            writer.publish()
        except BaseException:
            writer.abort()
            self.storage.delete_directory(directory)
            raise
        checksums = Checksums(source.size_bytes, BLOCK_BYTES, tuple(blocks))
        manifest = Manifest(meta, name, header_bytes, checksums, time.time_ns())
        try:
            faults.point("level.store.commit")
            self.storage.put(f"{directory}/{manifest_name(meta.rank, meta.world_size)}", manifest.encode())
        except BaseException:
            self._discard(f"{directory}/{name}", directory)
            raise
        faults.point("level.store.committed")
        if previous not in (None, directory):
            self._delete(f"{previous}", meta.rank, meta.world_size)
        return manifest

    def _write_blocks(self, writer: Writer, source: BlockSource) -> list[str]:
        """Write from ``parallel_writes`` threads; each block's checksum is computed by the thread that writes it."""
        size = source.size_bytes

        def one(span: tuple[int, int]) -> str:
            offset, length = span
            block = source.view(offset, -(-length // PAGE) * PAGE)
            checksum = digest(block[:length])
            # The padding of the last page is cut off again when the file is published.
            writer.write(offset, block)
            return checksum

        with ThreadPoolExecutor(self.storage.parallel_writes, "lazysnap-write") as pool:
            futures = []
            try:
                for span in block_ranges(size):
                    source.wait(span[0] + span[1])
                    futures.append(pool.submit(one, span))
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _discard(self, shard: str, directory: str) -> None:
        try:
            self.storage.delete(shard)
            self.storage.delete_directory(directory)
        except LevelError as error:
            logger.debug("left %s/%s for the next sweep: %s", self.url, shard, error)

    def _directory_for(self, meta: CaptureMeta) -> tuple[str, str | None]:
        """Where to write, and where the same shard of the same run stands already (a resumed run passes a step again).

        A committed shard is never written over: the second name is used, and the first deleted after the commit.
        """
        names = (directory_name(meta.step), directory_name(meta.step, meta.run_id))
        owners = [self._run_of(f"{name}/{manifest_name(meta.rank, meta.world_size)}") for name in names]
        previous = next((name for name, owner in zip(names, owners, strict=True) if owner == meta.run_id), None)
        free = next((name for name, owner in zip(names, owners, strict=True) if owner is None), names[1])
        return free, previous

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
        entries, problems = [], []
        for directory in self.storage.list():
            step = parse_directory_name(directory)
            if step is None:
                continue
            names = set(self.storage.list(directory))
            for name in sorted(names):
                parsed = parse_rank_name(name)
                if parsed is None or parsed[2] != "json":
                    continue
                where = f"{directory}/{name}"
                try:
                    manifest = Manifest.decode(self.storage.get(where), f"{self.url}/{where}")
                    self._check_place(manifest, step, parsed[:2], f"{self.url}/{where}")
                    size = self.storage.size(f"{directory}/{manifest.file}")
                    if size != manifest.size_bytes:
                        problems.append(
                            f"{self.url}/{directory}/{manifest.file}: {size} bytes, the manifest says "
                            f"{manifest.size_bytes}"
                        )
                        continue
                except FileNotFoundError as error:
                    problems.append(f"{self.url}/{directory}: a manifest without its shard: {error.filename or error}")
                    continue
                except FormatError as error:
                    problems.append(str(error))
                    continue
                meta = manifest.meta
                entries.append(
                    Entry(
                        level=self.url,
                        speed=self.speed,
                        run_id=meta.run_id,
                        run_started_ns=meta.run_started_ns,
                        step=meta.step,
                        rank=meta.rank,
                        world_size=meta.world_size,
                        location=directory,
                    )
                )
        return Inventory(self.url, tuple(entries), tuple(problems))

    @staticmethod
    def _check_place(manifest: Manifest, step: int, ranks: tuple[int, int], where: str) -> None:
        meta = manifest.meta
        if (meta.step, meta.rank, meta.world_size) != (step, *ranks):
            raise ShardCorrupt(
                f"{where}: holds step {meta.step} of rank {meta.rank} of {meta.world_size}, its name says otherwise"
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
            raise ShardCorrupt(f"{where}: {size} bytes, the manifest says {checksums.size_bytes}")

        def one(index: int, offset: int, length: int) -> None:
            block = out[offset : offset + length]
            self.storage.read_into(path, offset, block)
            checksums.verify_block(index, block, where)

        with ThreadPoolExecutor(_READ_THREADS, "lazysnap-read") as pool:
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
        ranks: dict[int, dict[int, Entry]] = defaultdict(dict)
        for entry in self.inventory().entries:
            if entry.run_id == run_id:
                ranks[entry.step][entry.rank] = entry
        complete = [step for step, offers in ranks.items() if len(offers) == next(iter(offers.values())).world_size]
        gone = expired(complete, level)
        for step in gone:
            for entry in ranks[step].values():
                self._delete(entry.location, entry.rank, entry.world_size)
        return gone

    def _delete(self, directory: str, rank: int, world_size: int) -> None:
        self.storage.delete(f"{directory}/{manifest_name(rank, world_size)}")
        faults.point("level.store.uncommitted")
        self.storage.delete(f"{directory}/{shard_name(rank, world_size)}")
        self.storage.delete_directory(directory)

    def sweep(self, rank: int, world_size: int) -> list[str]:
        """Remove what dead writers of this rank left: temporary files, and shards without a manifest.

        Only the one writer of this rank may call it, and not while it writes. What went is returned.
        """
        gone = []
        shard, manifest = shard_name(rank, world_size), manifest_name(rank, world_size)
        for directory in self.storage.list():
            if parse_directory_name(directory) is None:
                continue
            names = self.storage.list(directory)
            for name in names:
                pid = temp_writer_pid(name)
                own = name.startswith((f".{shard}{TEMP_MARK}", f".{manifest}{TEMP_MARK}"))
                if own and pid is not None and not _is_alive(pid):
                    self.storage.delete(f"{directory}/{name}")
                    gone.append(f"{directory}/{name}")
            if shard in names and manifest not in names:
                self.storage.delete(f"{directory}/{shard}")
                gone.append(f"{directory}/{shard}")
            self.storage.delete_directory(directory)
        return gone
